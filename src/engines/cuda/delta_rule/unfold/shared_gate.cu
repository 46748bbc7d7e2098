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
#include "engines/cuda/delta_rule/unfold/shared_copies.h"
#include "engines/cuda/delta_rule/unfold/shared_pairs.h"
#include "engines/cuda/delta_rule/unfold/values.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

// What a chunk has before any product: factors of its rows, and rows with their norms.
template <class Tiles>
struct UnfoldFactors {
    using T = typename Tiles::Element;
    using Rows = typename Tiles::Rows;
    static constexpr int C = chunk_rows, threads = unfold_threads;

    const Tiles& my;

    // Rows of q, k and p with their norms.
    __device__ void normalise() const {
        const RowFactors& f = my.factors();
        normalise(my.q(), f.q_norm);
        normalise(my.k(), f.k_norm);
        if (Tiles::has_p && !Tiles::p_in_part) normalise(my.p(), f.p_norm);
    }
    __device__ void normalise(const Rows& tile, const float* norm) const {
        for (int i = my.thread; i < C * Rows::units; i += threads) {
            const int r = i / Rows::units;
            auto* at = reinterpret_cast<uint4*>(shared_at(tile.unit(r, i % Rows::units)));
            const uint4 x = *at;
            const auto times = [&](std::uint32_t word) {
                if constexpr (sizeof(T) == 4) {
                    return __float_as_uint(__uint_as_float(word) * norm[r]);
                } else {
                    const float2 both = ptx::unpack(word, T());
                    return ptx::pack(both.x * norm[r], both.y * norm[r], T());
                }
            };
            *at = {times(x.x), times(x.y), times(x.z), times(x.w)};
        }
    }

    __device__ void make() const {
        const double* sums = my.factors().sums;
        const double* G = sums + 1;
        if (my.thread < C) {
            my.small.from_start[my.thread] = expf(static_cast<float>(G[my.thread]));
            my.small.since_erase[my.thread] = expf(static_cast<float>(G[my.thread - my.call.erase_shift()]));
            my.small.to_end[my.thread] = expf(static_cast<float>(G[C - 1] - G[my.thread]));
        }
        if (my.thread >= 4 * C) return;
        const int block = my.thread / C, j = my.thread % C;
        my.small.anchors[block][j] = j < 16 * block ? expf(static_cast<float>(sums[16 * block] - G[j])) : 0.0F;
    }
};

// Rows of keys, from products with the states and with pairs of tokens, to their tensors.
template <class Tiles>
struct KeyGradients {
    using T = typename Tiles::Element;
    using Rows = typename Tiles::Rows;
    using Sums = typename Tiles::Sums;
    static constexpr int N = Tiles::N;

    const Tiles& my;

    // What comes from the state before the chunk, and from pairs of tokens: dq, e, dp = βe.
    __device__ void add_reads(Sums& dq, Sums& dp) const {
        Sums x = {}, e = {};
        if (my.erases)
            my.multiply_both(my.d_o(), my.d_r(), my.state(), false, x, e);
        else
            my.multiply(my.d_o(), my.state(), false, x);
        finish_reads(x, e, dq, dp);
    }
    __device__ void finish_reads(Sums& x, Sums& e, Sums& dq, Sums& dp) const {
        float factor[2], sums[2] = {};
        for (int i = 0; i < 2; ++i) factor[i] = my.call.scale * my.small.from_start[my.row(i)];
        my.scale_and_dot(my.q(), factor, x, sums);
        my.keep_row_sums(my.small.read[my.quarter], sums);
        my.add(x, dq);
        if (!my.erases) return my.multiply(my.pairs(0), my.k(), true, dq);

        sums[0] = sums[1] = 0;
        for (int i = 0; i < 2; ++i) factor[i] = -my.small.since_erase[my.row(i)];
        my.scale_and_dot(my.p(), factor, e, sums);
        for (int i = 0; i < 2; ++i) sums[i] *= my.factors().beta[my.row(i)];
        my.keep_row_sums(my.small.erase[my.quarter], sums);
        my.multiply_both(my.pairs(0), my.pairs(1), my.k(), true, dq, e);
        sums[0] = sums[1] = 0;
        factor[0] = factor[1] = 1;
        my.scale_and_dot(my.p(), factor, e, sums);
        my.keep_row_sums(my.small.erased[my.quarter], sums);
        for (int i = 0; i < 2; ++i) factor[i] = my.factors().beta[my.row(i)];
        unrolled<N, 4>([&](int n, int m) { dp[n][m] = fmaf(factor[m / 2], e[n][m], dp[n][m]); });
    }

    // What comes from the state after the chunk, and from pairs of tokens: dk, and for rules without a p of its own dp.
    __device__ void add_writes(Sums& dk) const {
        Sums x = {};
        my.multiply(my.u(), my.dstate(), false, x);
        finish_writes(x, dk);
    }
    __device__ void finish_writes(Sums& x, Sums& dk) const {
        float factor[2], sums[2] = {};
        for (int half = 0; half < 2; ++half) factor[half] = my.small.to_end[my.row(half)];
        my.scale_and_dot(my.k(), factor, x, sums);
        my.keep_row_sums(my.small.write[my.quarter], sums);
        my.add(x, dk);
        my.multiply_pairs_transposed(my.pairs(0), my.q(), false, dk);
        if (my.erases) my.multiply_pairs_transposed(my.pairs(1), my.p(), true, dk);
    }

    __device__ void store_all(Sums& dq, Sums& dk, Sums& dp) const {
        const RowFactors& f = my.factors();
        if (my.call.l2norm) {
            keep_along(0, my.q(), dq);
            keep_along(1, my.k(), dk);
            if (Tiles::has_p) keep_along(2, my.p(), dp);
            __syncthreads();
        }
        store_rows(0, my.q(), f.q_norm, my.grad.dq, dq);
        store_rows(1, my.k(), f.k_norm, my.grad.dk, dk);
        if (Tiles::has_p) store_rows(2, my.p(), f.p_norm, my.grad.dp, dp);
    }
    __device__ void keep_along(int which, const Rows& rows, Sums& x) const {
        float sums[2] = {}, factor[2] = {1, 1};
        my.scale_and_dot(rows, factor, x, sums);
        my.keep_row_sums(my.small.along[which][my.quarter], sums);
    }
    // Through the warp's part of the tile, which nobody else reads any more; y = x r: dx = r (dy − y Σ dy∘y).
    __device__ void store_rows(int which, const Rows& tile, const float* norm, const View& to, Sums& x) const {
        if (!to) return;
        float along[2] = {}, r[2] = {1, 1};
        for (int half = 0; half < 2 && my.call.l2norm; ++half) {
            along[half] = my.sum_of(my.small.along[which], my.row(half));
            r[half] = norm[my.row(half)];
        }
        unrolled<N, 2>([&](int n, int half) {
            const float2 y = my.two(tile, n, half);
            const float low = r[half] * (x[n][2 * half] - y.x * along[half]),
                        high = r[half] * (x[n][2 * half + 1] - y.y * along[half]);
            store_pair(tile, my.row(half), 8 * (my.quarter * N + n) + 2 * (my.lane % 4), low, high);
        });
        __syncwarp();
        auto* data = static_cast<T*>(to.data) + my.here().tokens.batch * to.stride[0] + my.here().h * to.stride[2];
        constexpr int elements = unit_elements<T>, units = 8 * N / elements;
        unrolled<units / 2>([&](int i) {
            const int at = 32 * i + my.lane, own = 16 * my.block + at / units, unit = my.quarter * units + at % units;
            if (own >= my.rows() || elements * unit >= my.call.key_size) return;
            *reinterpret_cast<uint4*>(data + (my.here().tokens.begin + own) * to.stride[1] + elements * unit) =
                *reinterpret_cast<const uint4*>(shared_at(tile.unit(own, unit)));
        });
    }
};

// The gates of a value head, by a warp.
template <class Tiles>
struct GateGradients {
    using T = typename Tiles::Element;
    static constexpr int D = Tiles::size;

    const Tiles& my;

    // rowsum(S∘dS')
    __device__ void multiply_states() const {
        multiply_states(shared_at(my.state().base), shared_at(my.dstate().base));
    }
    __device__ void multiply_states(const char* state, const char* dstate) const {
        const auto* left = reinterpret_cast<const uint4*>(state) + my.thread;
        const auto* right = reinterpret_cast<const uint4*>(dstate) + my.thread;
        float sum = 0;
        unrolled<D * D / unit_elements<T> / unfold_threads>(
            [&](int i) { sum += dot<T>(left[i * unfold_threads], right[i * unfold_threads]); });
        sum = sum_of_warp(sum);
        if (my.lane == 0) my.small.through[my.thread / 32] = sum;
    }

    __device__ void end(int hv) const {
        if (my.call.gate == core::Gate::none || (!my.grad.dg && !my.saved.shares)) return;
        float through = 0;
        for (const float x : my.small.through) through += x;
        GateParts of;
        unrolled<2>([&](int i) {
            const int r = 2 * my.lane + i;
            of.read[i] = my.sum_of(my.small.read, r);
            of.erase[i] = my.erases ? my.sum_of(my.small.erase, r) : 0.0F;
            of.write[i] = my.sum_of(my.small.write, r);
            of.spans[i] = my.small.spans[r];
        });
        unfold_gates(my.pass, my.here(), hv, my.lane, of, through * my.factors().last);
    }
    // Of gates and β, each by warps of its own.
    __device__ void end_all(int hv) const {
        if (my.thread < 32) end(hv);
        if (const int row = my.thread - 64; row >= 0 && row < chunk_rows && my.grad.dbeta)
            unfold_beta(my.pass, my.here(), hv, row, my.small.of_values[row] + my.sum_of(my.small.erased, row));
    }
};

// On sm_90a.
template <class T, int D, bool own_p, bool warpgroups>
__device__ inline void unfold(const ChunkGradients& of) {
    const DeltaCall& call = of.call;
    using Tiles = UnfoldTiles<T, D, own_p, warpgroups>;
    using Sums = typename Tiles::Sums;
    constexpr int last_thread = unfold_threads - 1;
    Tiles my(of);
    const UnfoldCopies<Tiles> copy{my};
    const UnfoldFactors<Tiles> factors{my};
    const PairGradients<Tiles> pairs{my};
    const KeyGradients<Tiles> keys{my};
    const GateGradients<Tiles> gates{my};
    // What was copied or written is there for all threads, and for products of warpgroups.
    const auto wait_for_all = [&] {
        my.forget();
        if constexpr (warpgroups) ptx::publish_to_products();
        __syncthreads();
    };

    if (my.thread == last_thread) my.small.places[0] = my.find(blockIdx.x);
    __syncthreads();
    if (my.here().left_out != 0) return;
    copy.keys(my.here(), 0);
    copy.first(my.here(), 0, 0);
    copy.rest(my.here(), 0);
    for (;; ++my.step) {
        Sums dq = {}, dk = {}, of_p = {};
        Sums& dp = own_p ? of_p : dk;
        for (int i = 0; i < call.group; ++i) {  // the key head's value heads
            if (i > 0) my.turn ^= 1;
            const int hv = call.value_head(my.here().h, i), r = my.thread / 8;
            const RowValues<T, typename Tiles::Rows> v(
                static_cast<const T*>(call.v.data) + my.here().row(call.v, hv, r),
                my.erases && r < my.rows() ? call.value_size : 0, my.thread % 8);
            if (i == 0 && my.thread == last_thread) my.next() = my.find(my.here().number + gridDim.x);
            ptx::wait_for_copies_but<2>();
            wait_for_all();
            if (i == 0 && call.l2norm) factors.normalise();
            factors.make();
            if (my.erases) {
                const float of_values = v.dot_row(my.d_r(), r);
                if (my.thread % 8 == 0) my.small.of_values[r] = of_values;
            }
            wait_for_all();

            const int which = my.quarter % 2;
            if (which == 0 || my.erases) pairs.make(which, my.quarter / 2);
            ptx::wait_for_copies_but<1>();
            wait_for_all();
            keys.add_reads(dq, dp);
            pairs.add_later_blocks();
            ptx::wait_for_copies();
            wait_for_all();
            copy.first_of_next(i);
            gates.multiply_states();
            keys.add_writes(dk);
            __syncthreads();
            copy.rest_of_next(i);
            gates.end_all(hv);
        }
        keys.store_all(dq, dk, of_p);
        my.turn ^= 1;
        if (my.next().left_out != 0) return;
        if (copy.keys_twice) continue;
        __syncthreads();
        copy.keys(my.next(), 0);
        copy.rest(my.next(), 0);
    }
}

template <class T, int D, bool own_p, bool warpgroups>
__global__ void __launch_bounds__(unfold_threads, 1) unfold_kernel(const __grid_constant__ ChunkGradients of) {
    if constexpr (ptx::has_warpgroups) unfold<T, D, own_p, warpgroups>(of);
}

// The same where the tiles have no room side by side: value channels come 64 at a time, first of dO, dR and U for the
// pairs, then of dO, dR and S, then of U and dS'. `buffers` of such parts are in memory.
template <class T, int D, bool own_p>
__global__ void __launch_bounds__(unfold_threads, 1)
    unfold_in_parts_kernel(const __grid_constant__ ChunkGradients of, int buffers) {
    const DeltaCall& call = of.call;
    using Tiles = UnfoldTiles<T, D, own_p, false, true>;
    using Sums = typename Tiles::Sums;
    constexpr int C = chunk_rows, last_thread = unfold_threads - 1, parts = D / 64,
                  steps = 3 * (parts + (own_p ? 1 : 0));
    Tiles my(of);
    const UnfoldCopies<Tiles> copy{my};
    const UnfoldFactors<Tiles> factors{my};
    const PairGradients<Tiles> pairs{my};
    const KeyGradients<Tiles> keys{my};
    const GateGradients<Tiles> gates{my};
    const int last = steps * call.group;  // of a chunk and key head

    if (my.thread == last_thread) my.small.places[0] = my.find(blockIdx.x);
    __syncthreads();
    for (; my.here().left_out == 0; ++my.step) {
        int n = 0;  // the step
        copy.keys(my.here(), 0);
        copy.step(0, steps, buffers);
        if (my.thread == last_thread) my.next() = my.find(my.here().number + gridDim.x);
        // use(where the step's part is)
        const auto take_step = [&](const auto& use) {
            if (buffers > 1 && n + 1 < last) {
                copy.step(n + 1, steps, buffers);
                ptx::wait_for_copies_but<1>();
            } else {
                ptx::wait_for_copies();
            }
            my.forget();
            __syncthreads();
            use(n % buffers);
            __syncthreads();
            ++n;
            if (buffers == 1 && n < last) copy.step(n, steps, buffers);
        };
        const auto for_each_part = [&](const auto& use) {
#pragma unroll 1
            for (int part = 0; part < parts; ++part) take_step([&](int at) { use(at, part); });
        };
        const auto with_p = [&](const auto& use) {
            if constexpr (own_p)
                take_step([&](int at) {
                    my.p_part = at;
                    if (call.l2norm) factors.normalise(my.p(), my.factors().p_norm);
                    if (call.l2norm) __syncthreads();
                    use();
                });
            else
                use();
        };
        Sums dq = {}, dk = {}, of_p = {};
        Sums& dp = own_p ? of_p : dk;
        for (int i = 0; i < call.group; ++i) {
            my.turn = i % 2;
            const int hv = call.value_head(my.here().h, i), r = my.thread / 8;
            const RowValues<T, typename Tiles::Rows> v(
                static_cast<const T*>(call.v.data) + my.here().row(call.v, hv, r),
                my.erases && r < my.rows() ? call.value_size : 0, my.thread % 8);
            const int which = my.quarter % 2, half = my.quarter / 2;
            const bool has_pairs = which == 0 || my.erases;
            {
                float x[C / 16][4] = {}, y[C / 16][4] = {}, of_values = 0;
                for_each_part([&](int at, int part) {
                    if (part == 0) {
                        if (i == 0 && call.l2norm) factors.normalise();
                        factors.make();
                        gates.multiply_states(of.saved.state(my.here().slot, hv), of.saved.dstate(my.here().slot, hv));
                    }
                    if (my.erases) of_values += v.dot_part(my.part_rows(at, 1), r, part);
                    if (has_pairs) pairs.multiply_lower(my.part_rows(at, which), my.part_rows(at, 2), half, x);
                });
                with_p([&] {
                    if (!has_pairs) return;
                    pairs.multiply_lower(which == 0 ? my.q() : my.p(), my.k(), half, y);
                    pairs.finish(which, half, x, y);
                });
                of_values = sum_of_lanes<8>(of_values);
                if (my.thread % 8 == 0) my.small.of_values[r] = of_values;
            }
            {
                Sums x = {}, e = {};
                for_each_part([&](int at, int) {
                    if (my.erases)
                        my.multiply_both(my.part_rows(at, 0), my.part_rows(at, 1), my.part_state(at), false, x, e);
                    else
                        my.multiply(my.part_rows(at, 0), my.part_state(at), false, x);
                });
                with_p([&] { keys.finish_reads(x, e, dq, dp); });
                pairs.add_later_blocks();
            }
            Sums x = {};
            for_each_part([&](int at, int) { my.multiply(my.part_rows(at, 0), my.part_state(at), false, x); });
            with_p([&] { keys.finish_writes(x, dk); });
            __syncthreads();
            gates.end_all(hv);
        }
        keys.store_all(dq, dk, of_p);
        __syncthreads();
    }
}

template <int D, bool own_p, class T = SavedElement>
void launch_in_parts(const Card& card, const Blocks& blocks, const ChunkGradients& of, cudaStream_t stream) {
    using Layout = UnfoldMemory<T, D, own_p, true>;
    const int buffers = Layout::bytes(2) <= card.shared_bytes ? 2 : 1;
    launch(unfold_in_parts_kernel<T, D, own_p>, {blocks, unfold_threads, Layout::bytes(buffers)}, stream,
           "gradients of the delta rules in parts", of, buffers);
}

template <int D, bool own_p, bool warpgroups>
void launch_whole(const Blocks& blocks, const ChunkGradients& of, cudaStream_t stream) {
    launch(unfold_kernel<SavedElement, D, own_p, warpgroups>,
           {blocks, unfold_threads, UnfoldMemory<SavedElement, D, own_p, false>::bytes}, stream,
           "gradients of the delta rules", of);
}

}  // namespace

void launch_unfold(const Card& card, const ChunkGradients& of, cudaStream_t stream) {
    const Index chunks = of.sequences.most_chunks() * of.call.key_heads();
    const Blocks blocks(std::min<Index>(chunks, multiprocessors()));
    if (of.call.q.dtype == core::DType::f32)
        return of.call.own_p ? launch_in_parts<128, true, float>(card, blocks, of, stream)
                             : launch_in_parts<128, false, float>(card, blocks, of, stream);
    const bool whole = card.level == Level::sm_90a;
    if (of.saved.size == 64)
        return whole ? launch_whole<64, false, false>(blocks, of, stream)
                     : launch_in_parts<64, false>(card, blocks, of, stream);
    if (!of.call.own_p) return launch_in_parts<128, false>(card, blocks, of, stream);
    whole ? launch_whole<128, true, true>(blocks, of, stream) : launch_in_parts<128, true>(card, blocks, of, stream);
}

}  // namespace softdelta::cuda
