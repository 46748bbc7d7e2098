// All gradients of a chunk and key head, its value heads one after the other, for gates that all channels share, or for
// none (docs/math.md, "Backward", "Unfold"):
//
//     P  = scale·tril(dO Uᵀ)∘e^(G_i − G_j)       Q = −stril(dR Uᵀ)∘e^(E_i − G_j)
//     dq = scale·e^G∘(dO Sᵀ) + P k               e = −e^E∘(dR Sᵀ) + Q k
//     dk = e^(G_last − G)∘(U dS'ᵀ) + Pᵀ q + Qᵀ βp     dp = βe     dβ = rowsum(dR∘v) + rowsum(p∘e)
//
// and dg, the sum of the terms that span a gate. A warp has 16 rows and a quarter of the channels.
#include <algorithm>

#include "engines/cuda/delta_rule/fold/launch.h"
#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/unfold/gates.h"
#include "engines/cuda/delta_rule/unfold/shared_pairs.h"
#include "engines/cuda/delta_rule/unfold/values.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

template <class T, int D, bool own_p, bool warpgroups>
class Unfold : PairGradients<T, D, own_p, warpgroups> {
    using Base = PairGradients<T, D, own_p, warpgroups>;
    using Base::add;
    using Base::add_later_blocks;
    using Base::base_;
    using Base::block_;
    using Base::C;
    using Base::call_;
    using Base::copy_first;
    using Base::copy_first_of_next;
    using Base::copy_keys;
    using Base::copy_rest;
    using Base::copy_rest_of_next;
    using Base::d_o;
    using Base::d_r;
    using Base::dstate;
    using Base::erases_;
    using Base::factors;
    using Base::find;
    using Base::forget;
    using Base::grad_;
    using Base::here;
    using Base::k;
    using Base::keep_row_sums;
    using Base::lane_;
    using Base::make_pairs;
    using Base::multiply;
    using Base::multiply_both;
    using Base::multiply_pairs_transposed;
    using Base::N;
    using Base::next;
    using Base::p;
    using Base::pairs;
    using Base::q;
    using Base::quarter_;
    using Base::row;
    using Base::rows;
    using Base::saved_;
    using Base::scale_and_dot;
    using Base::small_;
    using Base::state;
    using Base::step_;
    using Base::sum_of;
    using Base::thread_;
    using Base::threads;
    using Base::turn_;
    using Base::two;
    using Base::u;
    using Base::value_row;
    using typename Base::Layout;
    using typename Base::Rows;
    using typename Base::Sums;

  public:
    using Base::Base;

    __device__ void run() {
        if (thread_ == threads - 1) small_.places[0] = find(blockIdx.x);
        __syncthreads();
        if (here().left_out != 0) return;
        copy_keys(here(), 0);
        copy_first(here(), 0, 0);
        copy_rest(here(), 0);
        for (;; ++step_) {
            Sums dq = {}, dk = {}, dp = {};
            for (int i = 0; i < call_.group; ++i) {
                if (i > 0) turn_ ^= 1;
                add_value_head(i, dq, dk, own_p ? dp : dk);
            }
            store_all(dq, dk, dp);
            turn_ ^= 1;
            if (next().left_out != 0) return;
            if (Layout::key_sets > 1) continue;
            __syncthreads();
            copy_keys(next(), 0);
            copy_rest(next(), 0);
        }
    }

  private:
    // What was copied or written is there for all threads, and for products of warpgroups.
    __device__ void meet() {
        forget();
        if constexpr (warpgroups) ptx::publish_to_products();
        __syncthreads();
    }
    // The key head's value head i.
    __device__ void add_value_head(int i, Sums& dq, Sums& dk, Sums& dp) {
        const int hv = call_.value_head(here().h, i);
        const int r = thread_ / 8;
        const RowValues<T, Rows> v(static_cast<const T*>(call_.v.data) + value_row(call_.v, hv, r),
                                   erases_ && r < rows() ? call_.value_size : 0, thread_ % 8);
        if (i == 0 && thread_ == threads - 1) next() = find(here().number + gridDim.x);
        ptx::wait_for_copies_but<2>();
        meet();
        if (i == 0 && call_.l2norm) normalise();
        make_factors();
        if (erases_) {
            const float of_values = v.dot_row(d_r(), r);
            if (thread_ % 8 == 0) small_.of_values[r] = of_values;
        }
        meet();

        const int which = quarter_ % 2;
        if (which == 0 || erases_) make_pairs(which, quarter_ / 2);
        ptx::wait_for_copies_but<1>();
        meet();
        add_state_rows(dq, dp);
        add_later_blocks();
        ptx::wait_for_copies();
        meet();
        copy_first_of_next(i);
        multiply_states();
        {
            Sums x = {};
            multiply(u(), dstate(), false, x);
            float factor[2], sums[2] = {};
            for (int half = 0; half < 2; ++half) factor[half] = small_.to_end[row(half)];
            scale_and_dot(k(), factor, x, sums);
            keep_row_sums(small_.write[quarter_], sums);
            add(x, dk);
        }
        multiply_pairs_transposed(pairs(0), q(), false, dk);
        if (erases_) multiply_pairs_transposed(pairs(1), p(), true, dk);
        __syncthreads();
        copy_rest_of_next(i);
        if (thread_ < 32) unfold_gates(hv);
        if (thread_ >= 64 && thread_ < 64 + C && grad_.dbeta)
            unfold_beta(call_, grad_, here(), hv, thread_ - 64,
                        small_.of_values[thread_ - 64] + sum_of(small_.erased, thread_ - 64));
    }

    // What comes from the state before the chunk, and from pairs of tokens: dq, e, dp = βe.
    __device__ void add_state_rows(Sums& dq, Sums& dp) const {
        Sums x = {}, e = {};
        if (erases_)
            multiply_both(d_o(), d_r(), state(), false, x, e);
        else
            multiply(d_o(), state(), false, x);
        float factor[2], sums[2] = {};
        for (int i = 0; i < 2; ++i) factor[i] = call_.scale * small_.from_start[row(i)];
        scale_and_dot(q(), factor, x, sums);
        keep_row_sums(small_.read[quarter_], sums);
        add(x, dq);
        if (!erases_) return multiply(pairs(0), k(), true, dq);

        sums[0] = sums[1] = 0;
        for (int i = 0; i < 2; ++i) factor[i] = -small_.since_erase[row(i)];
        scale_and_dot(p(), factor, e, sums);
        for (int i = 0; i < 2; ++i) sums[i] *= factors().beta[row(i)];
        keep_row_sums(small_.erase[quarter_], sums);
        multiply_both(pairs(0), pairs(1), k(), true, dq, e);
        sums[0] = sums[1] = 0;
        factor[0] = factor[1] = 1;
        scale_and_dot(p(), factor, e, sums);
        keep_row_sums(small_.erased[quarter_], sums);
        for (int i = 0; i < 2; ++i) factor[i] = factors().beta[row(i)];
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int m = 0; m < 4; ++m) dp[n][m] = fmaf(factor[m / 2], e[n][m], dp[n][m]);
    }

    // Rows of q, k and p with their norms.
    __device__ void normalise() const {
        const RowFactors& f = factors();
        const auto scale_rows = [&](const Rows& tile, const float* norm) {
            for (int i = thread_; i < C * Rows::units; i += threads) {
                const int r = i / Rows::units;
                auto* at = reinterpret_cast<uint4*>(shared_at(tile.unit(r, i % Rows::units)));
                const uint4 x = *at;
                const auto times = [&](std::uint32_t two) {
                    const float2 both = ptx::unpack(two, T());
                    return ptx::pack(both.x * norm[r], both.y * norm[r], T());
                };
                *at = {times(x.x), times(x.y), times(x.z), times(x.w)};
            }
        };
        scale_rows(q(), f.q_norm);
        scale_rows(k(), f.k_norm);
        if (own_p) scale_rows(p(), f.p_norm);
    }

    __device__ void make_factors() const {
        const double* sums = factors().sums;
        const double* G = sums + 1;
        if (thread_ < C) {
            small_.from_start[thread_] = expf(static_cast<float>(G[thread_]));
            small_.since_erase[thread_] = expf(static_cast<float>(G[thread_ - call_.erase_shift()]));
            small_.to_end[thread_] = expf(static_cast<float>(G[C - 1] - G[thread_]));
        }
        if (thread_ >= 4 * C) return;
        const int block = thread_ / C, j = thread_ % C;
        small_.anchors[block][j] = j < 16 * block ? expf(static_cast<float>(sums[16 * block] - G[j])) : 0.0F;
    }

    // rowsum(S∘dS')
    __device__ void multiply_states() const {
        const auto* left = reinterpret_cast<const uint4*>(shared_at(state().base)) + thread_;
        const auto* right = reinterpret_cast<const uint4*>(shared_at(dstate().base)) + thread_;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < D * D / 8 / threads; ++i) sum += dot<T>(left[i * threads], right[i * threads]);
        sum = sum_of_warp(sum);
        if (lane_ == 0) small_.through[thread_ / 32] = sum;
    }

    // --- gates and β

    __device__ void unfold_gates(int hv) const {
        if (call_.gate == core::Gate::none || (!grad_.dg && !saved_.shares)) return;
        float through = 0;
        for (const float x : small_.through) through += x;
        GateParts of;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = 2 * lane_ + i;
            of.read[i] = sum_of(small_.read, r);
            of.erase[i] = erases_ ? sum_of(small_.erase, r) : 0.0F;
            of.write[i] = sum_of(small_.write, r);
            of.spans[i] = small_.spans[r];
        }
        cuda::unfold_gates(call_, grad_, saved_, here(), hv, lane_, of, through * factors().last);
    }

    // --- results

    __device__ void store_all(Sums& dq, Sums& dk, Sums& dp) const {
        const RowFactors& f = factors();
        if (call_.l2norm) {
            keep_along(0, q(), dq);
            keep_along(1, k(), dk);
            if (own_p) keep_along(2, p(), dp);
            __syncthreads();
        }
        store_rows(0, q(), f.q_norm, grad_.dq, dq);
        store_rows(1, k(), f.k_norm, grad_.dk, dk);
        if (own_p) store_rows(2, p(), f.p_norm, grad_.dp, dp);
    }
    __device__ void keep_along(int which, const Rows& rows, Sums& x) const {
        float sums[2] = {}, factor[2] = {1, 1};
        scale_and_dot(rows, factor, x, sums);
        keep_row_sums(small_.along[which][quarter_], sums);
    }
    // Through the warp's part of the tile, which nobody else reads any more; y = x r: dx = r (dy − y Σ dy∘y).
    __device__ void store_rows(int which, const Rows& tile, const float* norm, const View& to, Sums& x) const {
        if (!to) return;
        float along[2] = {}, r[2] = {1, 1};
        for (int half = 0; half < 2 && call_.l2norm; ++half) {
            along[half] = sum_of(small_.along[which], row(half));
            r[half] = norm[row(half)];
        }
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 y = two(tile, n, half);
                const float low = r[half] * (x[n][2 * half] - y.x * along[half]),
                            high = r[half] * (x[n][2 * half + 1] - y.y * along[half]);
                *reinterpret_cast<std::uint32_t*>(shared_at(tile.unit(row(half), quarter_ * N + n) + 4 * (lane_ % 4))) =
                    ptx::pack(low, high, T());
            }
        __syncwarp();
        auto* data = static_cast<T*>(to.data) + here().tokens.batch * to.stride[0] + here().h * to.stride[2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const int at = 32 * i + lane_, own = 16 * block_ + at / N, unit = quarter_ * N + at % N;
            if (own >= rows() || 8 * unit >= call_.key_size) continue;
            *reinterpret_cast<uint4*>(data + (here().tokens.begin + own) * to.stride[1] + 8 * unit) =
                *reinterpret_cast<const uint4*>(shared_at(tile.unit(own, unit)));
        }
    }
};

template <class T, int D, bool own_p, bool warpgroups>
__global__ void __launch_bounds__(unfold_threads, 1)
    unfold_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                  const __grid_constant__ SavedChunks saved, const __grid_constant__ GradientViews grad) {
    Unfold<T, D, own_p, warpgroups>(call, sequences, grad, saved).run();
}

}  // namespace

template <class T>
void launch_unfold(Level level, const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                   const SavedChunks& saved, cudaStream_t stream) {
    const dim3 all = fold_blocks(call, sequences);
    const unsigned chunks = all.x * static_cast<unsigned>(call.key_heads()) * all.z;
    const dim3 blocks(std::min(chunks, static_cast<unsigned>(multiprocessors())));
    const auto with = [&]<int D, bool own_p, bool warpgroups>() {
        launch(unfold_kernel<T, D, own_p, warpgroups>, {blocks, unfold_threads, UnfoldMemory<T, D, own_p>::bytes},
               stream, "gradients of the delta rules", call, sequences, saved, grad);
    };
    const bool warpgroups = level == Level::sm_90a;
    if (saved.size == 64)
        with.template operator()<64, false, false>();
    else if (!call.own_p)
        with.template operator()<128, false, false>();
    else
        warpgroups ? with.template operator()<128, true, true>() : with.template operator()<128, true, false>();
}
template void launch_unfold<__nv_bfloat16>(Level, const DeltaCall&, const DeltaSequences&, const GradientViews&,
                                           const SavedChunks&, cudaStream_t);

}  // namespace softdelta::cuda
