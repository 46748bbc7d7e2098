// All gradients of a chunk and head, for a gate of each channel (erasing along k from the decayed state). A chunk is
// four blocks of 16 rows; L is the sum of a block's gates up to a row, R the sum after it, t the sum of them all. With
//
//     P = tril(dO Uᵀ)     Q = −stril(dR Uᵀ)
//
// the rows of block I come from the state and from the blocks before it, the nearest last, those of block J from dS'
// and from the blocks after it, the nearest last:
//
//     x = dO S,   x ← e^t_J∘x + P_IJ (k e^R)_J,   J = 0 … I − 1       dq = scale·e^L∘x       and e of dR, Q the same
//     y = U dS'ᵀ, y ← e^t_I∘y + P_IJᵀ (q e^L)_I + Q_IJᵀ (βk e^L)_I    dk = e^R∘y             I = 3 … J + 1
//
// and pairs within a block are added one by one, by a thread for each block and channel, who then sums what spans each
// of its gates (docs/math.md, "Span form"). No exponent is positive.
#include "engines/cuda/delta_rule/chunk/launch_fold.h"
#include "engines/cuda/delta_rule/chunk/rows.h"
#include "engines/cuda/delta_rule/finish/channel_rows.h"
#include "engines/cuda/grid.h"

namespace softdelta::cuda {

namespace {

template <class T>
class ChannelFinish : ChannelRows<T> {
    using Base = ChannelRows<T>;
    using Base::base_;
    using Base::block_;
    using Base::C;
    using Base::c_;
    using Base::call_;
    using Base::D;
    using Base::diagonal;
    using Base::finish_channel;
    using Base::grad_;
    using Base::h_;
    using Base::hv_;
    using Base::key;
    using Base::lane_;
    using Base::load_gates;
    using Base::pairs;
    using Base::quarter_;
    using Base::row;
    using Base::row_of;
    using Base::rows_;
    using Base::s_;
    using Base::saved_;
    using Base::slot_;
    using Base::small_;
    using Base::sum_of_eight;
    using Base::sums;
    using Base::thread_;
    using Base::threads;
    using Base::tile;
    using typename Base::Gates;
    using typename Base::Layout;
    using typename Base::Rows;
    using typename Base::Square;
    static constexpr int N = 4;  // accumulators of 8 columns of a warp: 32 channels
    using Sums = float[N][4];

  public:
    using Base::Base;

    __device__ void run() {
        if (rows_ <= 0 || saved_.goes_by_token(slot_, hv_) != 0) return;
        copy_rows(tile(Layout::d_o), grad_.d_o, s_, c_, hv_, 0, grad_.d_o ? call_.value_size : 0, thread_, threads);
        copy_bytes(base_ + Layout::d_r, saved_.dr(slot_, hv_), Layout::rows_bytes, thread_, threads);
        copy_bytes(base_ + Layout::u, saved_.u(slot_, hv_), Layout::rows_bytes, thread_, threads);
        ptx::commit_copies();
        copy_bytes(base_ + Layout::state, saved_.state(slot_, hv_), Layout::state_bytes, thread_, threads);
        copy_bytes(base_ + Layout::dstate, saved_.dstate(slot_, hv_), Layout::state_bytes, thread_, threads);
        ptx::commit_copies();
        make_norms();
        __syncthreads();
        make_keys();
        ptx::wait_for_copies_but<1>();
        __syncthreads();
        multiply_values();
        make_pairs(quarter_ % 2, quarter_ / 2);
        ptx::wait_for_copies();
        __syncthreads();

        multiply_states();
        Sums x = {}, e = {}, y = {};
#pragma unroll 2
        for (int depth = 0; depth < D / 16; ++depth) {
            std::uint32_t read[4], erase[4];
            tile(Layout::d_o).load_left(read, 16 * block_, depth, lane_);
            tile(Layout::d_r).load_left(erase, 16 * block_, depth, lane_);
            multiply_both(read, erase, tile(Layout::state), depth, x, e);
        }
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) e[n][i] = -e[n][i];
        for (int J = 0; J < block_; ++J) {
            sum_rows(small_.later[block_][J], [&](int n, int half) {
                const float2 q = two(Layout::q, n, half), k = two(Layout::k, n, half);
                const float beta = small_.beta[row(half)];
                return float2{q.x * x[n][2 * half] + beta * k.x * e[n][2 * half],
                              q.y * x[n][2 * half + 1] + beta * k.y * e[n][2 * half + 1]};
            });
            decay(small_.own[J], x);
            decay(small_.own[J], e);
            std::uint32_t read[4], erase[4];
            pairs(0).load_left(read, 16 * block_, J, lane_);
            pairs(1).load_left(erase, 16 * block_, J, lane_);
            multiply_both(read, erase, tile(Layout::k_later), J, x, e);
        }
        multiply_state(tile(Layout::u), tile(Layout::dstate), y);
        sum_rows(small_.earlier[block_], [&](int n, int half) {
            const float2 k = two(Layout::k_later, n, half);
            return float2{k.x * y[n][2 * half], k.y * y[n][2 * half + 1]};
        });
        for (int I = blocks - 1; I > block_; --I) {
            decay(small_.own[I], y);
            std::uint32_t read[4], erase[4];
            pairs(0).load_transposed_result(read, 16 * I, block_, lane_);
            pairs(1).load_transposed_result(erase, 16 * I, block_, lane_);
            times_beta(I, erase);
            multiply_block(read, tile(Layout::q), I, y);
            multiply_block(erase, tile(Layout::k), I, y);
        }
        __syncthreads();  // dO, dR, U and the states were read
        keep(0, x);
        keep(1, e);
        keep(2, y);
        __syncthreads();
        finish_channel(thread_ / D, thread_ % D);
    }

  private:
    // --- before the products

    // Norms and β; a row by eight neighbouring threads.
    __device__ void make_norms() const {
        const int r = thread_ / 8;
        const auto norm = [&](const View& v) {
            float sum = 0;
            const auto* data = static_cast<const T*>(v.data) + row_of(v, r, h_);
#pragma unroll
            for (int u = thread_ % 8; u < Rows::units; u += 8) {
                if (r >= rows_ || 8 * u >= call_.key_size) continue;
                const uint4 x = *reinterpret_cast<const uint4*>(data + 8 * u);
                sum += dot<T>(x, x);
            }
            return call_.l2norm ? 1 / sqrtf(sum_of_eight(sum) + 1e-6F) : 1.0F;
        };
        const float q = norm(call_.q), k = norm(call_.k);
        if (thread_ % 8 != 0) return;
        small_.q_norm[r] = q;
        small_.k_norm[r] = k;
        float beta = r < rows_ ? 1.0F : 0.0F;
        if (call_.beta && r < rows_) beta = make_beta(call_, load(call_.beta, row_of(call_.beta, r, hv_)));
        small_.beta[r] = beta;
    }

    // scale·q e^L, k e^L, k e^R
    __device__ void make_keys() const {
        const int block = thread_ / D, m = thread_ % D;
        Gates gates;
        load_gates(block, m, gates);
        float total = 0, L = 0, all_q[rows_of_block], all_k[rows_of_block];
#pragma unroll
        for (int i = 0; i < rows_of_block; ++i) {
            const int r = rows_of_block * block + i;
            total += gates.g[i];
            all_q[i] = key(call_.q, small_.q_norm, r, m);
            all_k[i] = key(call_.k, small_.k_norm, r, m);
        }
        small_.own[block][m] = expf(total);
#pragma unroll
        for (int i = 0; i < rows_of_block; ++i) {
            const int r = rows_of_block * block + i;
            L += gates.g[i];
            const float q = all_q[i], k = all_k[i];
            const float before = __expf(L), after = __expf(fminf(total - L, 0.0F));
            const auto store_at = [&](int tile_at, float x) {
                assign(reinterpret_cast<T*>(shared_at(tile(tile_at).unit(r, m / 8))) + m % 8, x);
            };
            store_at(Layout::q, call_.scale * q * before);
            store_at(Layout::k, k * before);
            store_at(Layout::k_later, k * after);
        }
    }

    // rowsum(dR∘v), a row by eight neighbouring threads.
    __device__ void multiply_values() const {
        const int r = thread_ / 8;
        const auto* v = static_cast<const T*>(call_.v.data) + row_of(call_.v, r, hv_);
        float sum = 0;
#pragma unroll
        for (int unit = thread_ % 8; unit < Rows::units; unit += 8) {
            if (r >= rows_ || 8 * unit >= call_.value_size) continue;
            sum += dot<T>(*reinterpret_cast<const uint4*>(shared_at(tile(Layout::d_r).unit(r, unit))),
                       *reinterpret_cast<const uint4*>(v + 8 * unit));
        }
        sum = sum_of_eight(sum);
        if (thread_ % 8 == 0) small_.of_values[r] = sum;
    }

    // The block's rows of P or Q, one half of their columns.
    __device__ void make_pairs(int which, int column_half) const {
        float x[C / 16][4] = {};
        const Rows left = tile(which == 0 ? Layout::d_o : Layout::d_r), right = tile(Layout::u);
#pragma unroll 2
        for (int depth = 0; depth < D / 16; ++depth) {
            if (2 * column_half > block_) break;
            std::uint32_t a[4], b[4];
            left.load_left(a, 16 * block_, depth, lane_);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if (2 * column_half + n > block_) break;
                right.load_right(b, 32 * column_half + 16 * n, depth, lane_);
                ptx::multiply(x[2 * n], a, b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], a, b[2], b[3], T());
            }
        }
        const Square to = pairs(which);
#pragma unroll
        for (int n = 0; n < C / 16; ++n) {
            const int at = C / 16 * column_half + n;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = row(e / 2), j = 8 * at + 2 * (lane_ % 4) + e % 2;
                if (which == 1) x[n][e] = -x[n][e];
                if (which == 0 ? j > i : j >= i) x[n][e] = 0;
                if (at / 2 != block_) continue;
                PairCoefficients& c = diagonal(block_)[i % 16 * rows_of_block + j % 16];
                if (which == 0) {
                    c.read = call_.scale * x[n][e];
                } else {
                    c.erase = x[n][e];
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(row(half), at) + 4 * (lane_ % 4))) =
                    ptx::pack(x[n][2 * half], x[n][2 * half + 1], T());
        }
    }

    // --- products

    __device__ void multiply_state(const Rows& left, const Rows& right, Sums& x) const {
#pragma unroll 2
        for (int depth = 0; depth < D / 16; ++depth) {
            std::uint32_t a[4];
            left.load_left(a, 16 * block_, depth, lane_);
            multiply_block(a, right, depth, x);
        }
    }
    // x += left · right, y += other · right, as below.
    __device__ void multiply_both(const std::uint32_t (&left)[4], const std::uint32_t (&other)[4], const Rows& right,
                                  int depth, Sums& x, Sums& y) const {
        add_two_products<T>(x, left, y, other, right, depth, quarter_ * (N / 2), lane_);
    }
    // x += left [16, 16] · rows [16·depth, 16·depth + 16) of right
    __device__ void multiply_block(const std::uint32_t (&left)[4], const Rows& right, int depth, Sums& x) const {
        add_product<T>(x, left, right, depth, quarter_ * (N / 2), lane_);
    }
    __device__ void times_beta(int block, std::uint32_t (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* beta = small_.beta + 16 * block + 8 * (i / 2) + 2 * (lane_ % 4);
            const float2 both = ptx::unpack(a[i], T());
            a[i] = ptx::pack(both.x * beta[0], both.y * beta[1], T());
        }
    }
    __device__ int channel(int n) const {
        return 32 * quarter_ + 8 * n + 2 * (lane_ % 4);
    }
    __device__ void decay(const float* own, Sums& x) const {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float2 factor = *reinterpret_cast<const float2*>(own + channel(n));
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] *= i % 2 == 0 ? factor.x : factor.y;
        }
    }
    __device__ float2 two(int at, int n, int half) const {
        return ptx::unpack(*reinterpret_cast<const std::uint32_t*>(
                               shared_at(tile(at).unit(row(half), quarter_ * N + n) + 4 * (lane_ % 4))),
                           T());
    }
    // to[channel] = Σ over the block's rows of term(n, half of the rows)
    template <class Term>
    __device__ void sum_rows(float* to, Term&& term) const {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float2 low = term(n, 0), high = term(n, 1);
            float2 sum{low.x + high.x, low.y + high.y};
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) {
                sum.x += __shfl_xor_sync(0xffffffffu, sum.x, lanes);
                sum.y += __shfl_xor_sync(0xffffffffu, sum.y, lanes);
            }
            if (lane_ < 4) *reinterpret_cast<float2*>(to + channel(n)) = sum;
        }
    }
    // rowsum(S∘dS') over some value columns.
    __device__ void multiply_states() const {
        const int unit = thread_ % Rows::units, part = thread_ / Rows::units;
        float sum[8] = {};
        for (int r = part; r < D; r += threads / Rows::units) {
            const uint4 x = *reinterpret_cast<const uint4*>(shared_at(tile(Layout::state).unit(r, unit)));
            const uint4 y = *reinterpret_cast<const uint4*>(shared_at(tile(Layout::dstate).unit(r, unit)));
            const std::uint32_t left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 a = ptx::unpack(left[i], T()), b = ptx::unpack(right[i], T());
                sum[2 * i] = fmaf(a.x, b.x, sum[2 * i]);
                sum[2 * i + 1] = fmaf(a.y, b.y, sum[2 * i + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 16);
            if (lane_ < 16) small_.through[part / 2][8 * unit + i] = sum[i];
        }
    }
    __device__ void keep(int which, const Sums& x) const {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2*>(sums(which) + row(half) * sum_row + channel(n)) = {x[n][2 * half],
                                                                                              x[n][2 * half + 1]};
    }
};

template <class T>
__global__ void __launch_bounds__(channel_threads, 1)
    finish_channel_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                          const __grid_constant__ SavedChunks saved, const __grid_constant__ GradientViews grad) {
    ChannelFinish<T>(call, sequences, grad, saved).run();
}

}  // namespace

template <class T>
void launch_finish_channel(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                           const SavedChunks& saved, cudaStream_t stream) {
    launch(finish_channel_kernel<T>, {fold_blocks(call, sequences), channel_threads, ChannelMemory<T>::bytes}, stream,
           "gradients of the delta rules", call, sequences, saved, grad);
}
template void launch_finish_channel<__nv_bfloat16>(const DeltaCall&, const DeltaSequences&, const GradientViews&,
                                                   const SavedChunks&, cudaStream_t);

}  // namespace softdelta::cuda
