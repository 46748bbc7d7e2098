// All gradients of a chunk and head, for a gate of each channel (erasing along k from the decayed state). A chunk is
// four blocks of 16 rows; L is the sum of a block's gates up to a row, R the sum after it, t the sum of them all. With
//
//     P = tril(dO Uᵀ)     Q = stril(dR Uᵀ)     E = −e
//
// the rows of block I come from the state and from the blocks before it, the nearest last, those of block J from dS'
// and from the blocks after it, the nearest last:
//
//     x = dO S,   x ← e^t_J∘x + P_IJ (k e^R)_J,   J = 0 … I − 1       dq = scale·e^L∘x       and E of dR, Q the same
//     y = U dS'ᵀ, y ← e^t_I∘y + P_IJᵀ (q e^L)_I − Q_IJᵀ (βk e^L)_I    dk = e^R∘y             I = 3 … J + 1
//
// then pairs within a block by halves (channel/pairs.h), and the sum of what spans each gate (docs/math.md, "Span
// form"). No exponent is positive. All of it is transposed: x, E and y of a warp are 16 channels by 16 tokens, twice.
#include "engines/cuda/delta_rule/chunk/launch_fold.h"
#include "engines/cuda/delta_rule/finish/channel/results.h"
#include "engines/cuda/delta_rule/finish/values.h"
#include "engines/cuda/grid.h"

namespace softdelta::cuda {

namespace {

template <class T>
class ChannelFinish : ChannelResults<T> {
    using Base = ChannelResults<T>;
    using Base::base_;
    using Base::block_of;
    using Base::C;
    using Base::c_;
    using Base::call_;
    using Base::channel;
    using Base::copy;
    using Base::copy_gates;
    using Base::D;
    using Base::exchange_aside;
    using Base::finish_block;
    using Base::forget;
    using Base::grad_;
    using Base::group_;
    using Base::h_;
    using Base::hv_;
    using Base::keep;
    using Base::lane_;
    using Base::load_keys;
    using Base::load_operand;
    using Base::load_parameters;
    using Base::make_sums;
    using Base::pairs;
    using Base::part_;
    using Base::put_aside;
    using Base::row_of;
    using Base::rows_;
    using Base::s_;
    using Base::saved_;
    using Base::slot_;
    using Base::small_;
    using Base::store_keys;
    using Base::store_operand;
    using Base::store_share;
    using Base::sum_row;
    using Base::sum_spanning;
    using Base::thread_;
    using Base::threads;
    using Base::tile;
    using Base::unpack;
    using Base::up_to_eight;
    using Base::warp_;
    using Base::with_rows;
    using typename Base::Layout;
    using typename Base::Rows;
    using typename Base::Square;
    static constexpr int read_keys = 0, erase_keys = 1, written_keys = 2;  // operands: q e^L, −βk e^L, k e^R
    using OfTwo = BlockTokens[2];                                          // of the warp's two blocks

  public:
    using Base::Base;

    __device__ void run() {
        if (rows_ <= 0 || saved_.goes_by_token(slot_, hv_)) return;
        copy_gates(rows_);
        ptx::commit_copies();
        copy_rows(tile(Layout::q), call_.q, s_, c_, h_, 0, call_.key_size, thread_, threads);
        copy_rows(tile(Layout::k), call_.k, s_, c_, h_, 0, call_.key_size, thread_, threads);
        ptx::commit_copies();
        copy_rows(tile(Layout::d_o), grad_.d_o, s_, c_, hv_, 0, grad_.d_o ? call_.value_size : 0, thread_, threads);
        copy_bytes(base_ + Layout::d_r, saved_.dr(slot_, hv_), Layout::rows_bytes, thread_, threads);
        copy_bytes(base_ + Layout::u, saved_.u(slot_, hv_), Layout::rows_bytes, thread_, threads);
        ptx::commit_copies();
        copy_bytes(base_ + Layout::state, saved_.state(slot_, hv_), Layout::state_bytes, thread_, threads);
        copy_bytes(base_ + Layout::dstate, saved_.dstate(slot_, hv_), Layout::state_bytes, thread_, threads);
        ptx::commit_copies();
        load_parameters();
        ptx::wait_for_copies_but<3>();
        meet();
        OfTwo L;
        for_both_blocks([&](int block) { make_sums(block, L[0]); }, [&] { exchange(L); });
        const int r = thread_ / 8;
        const RowValues<T, Rows> v(static_cast<const T*>(call_.v.data) + row_of(call_.v, r, hv_),
                                   r < small_.rows ? call_.value_size : 0, thread_ % 8);
        ptx::wait_for_copies_but<2>();
        meet();
        make_norms();
        meet();
        for_both_blocks([&](int block) { make_operands(block, L[0]); }, [&] { exchange(L); });
        ptx::wait_for_copies_but<1>();
        meet();
        const float of_values = v.dot_row(tile(Layout::d_r), r);
        if (thread_ % 8 == 0) small_.of_values[r] = of_values;
        make_pairs(warp_ / 4 % 2, warp_ / 8);
        ptx::wait_for_copies();
        meet();

        BlockTokens l, x, E, y;
        {
            OfTwo of_x = {}, of_E = {}, of_y = {};
            multiply_states(of_x, of_E, of_y);
            for_both_blocks([&](int block) { add_other_blocks(block, of_x[0], of_E[0], of_y[0]); },
                            [&] {
                                exchange(of_x);
                                exchange(of_E);
                                exchange(of_y);
                            });
            meet();  // U, dO, dR, operands and the states were read
            if (call_.raw_gate != core::RawGate::none) copy_gates(small_.rows);
            // Of the second block aside, for registers are scarce.
            put_aside(0, L[1]);
            put_aside(1, of_x[1]);
            put_aside(2, of_E[1]);
            put_aside(3, of_y[1]);
            copy(L[0], l);
            copy(of_x[0], x);
            copy(of_E[0], E);
            copy(of_y[0], y);
        }
        sum_spanning(thread_ / D, thread_ % D);
        ptx::wait_for_copies();
        meet();
        for_both_blocks([&](int block) { finish_block(block, l, x, E, y); },
                        [&] {
                            exchange_aside(0, l);
                            exchange_aside(1, x);
                            exchange_aside(2, E);
                            exchange_aside(3, y);
                        });
        meet();
        if (thread_ < 3 * C) sum_row(thread_ / C, thread_ % C);
        if (saved_.shares && thread_ >= 256) store_share((thread_ - 256) / D, thread_ % D);
        meet();
        for_both_blocks(
            [&](int block) {
                store_keys(0, Layout::q, Layout::d_o, small_.q_norm, grad_.dq, block, x);
                store_keys(1, Layout::k, Layout::d_r, small_.k_norm, grad_.dk, block, y);
            },
            [&] {
                exchange_aside(1, x);
                exchange_aside(3, y);
            });
    }

  private:
    __device__ void meet() {
        forget();
        __syncthreads();
    }
    // use(block) for both blocks of the warp, with next() after each: one text of instructions.
    template <class Use, class Next>
    __device__ void for_both_blocks(const Use& use, const Next& next) {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            forget();
            use(block_of(i));
            next();
            __syncwarp();  // products of a warp want all its lanes
        }
    }
    __device__ static void exchange(OfTwo& x) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float first = x[0][n][i];
                x[0][n][i] = x[1][n][i];
                x[1][n][i] = first;
            }
    }

    // --- before the products

    // Norms and β; a row by eight neighbouring threads.
    __device__ void make_norms() const {
        const int r = thread_ / 8;
        const auto norm = [&](int at) {
            if (!call_.l2norm) return 1.0F;
            float sum = 0;
#pragma unroll
            for (int u = thread_ % 8; u < Rows::units; u += 8) {
                const uint4 x = *reinterpret_cast<const uint4*>(shared_at(tile(at).unit(r, u)));
                sum += dot<T>(x, x);
            }
            return 1 / sqrtf(sum_of_lanes<8>(sum) + 1e-6F);
        };
        const float q = norm(Layout::q), k = norm(Layout::k);
        if (thread_ % 8 != 0) return;
        small_.q_norm[r] = q;
        small_.k_norm[r] = k;
        small_.minus_beta[r] = r < small_.rows ? -make_beta(call_, s_.batch, s_.begin + c_ * C + r, hv_) : 0.0F;
    }
    __device__ void make_operands(int block, const BlockTokens& L) const {
        float total[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            total[half] = up_to_eight(L, 1, half);
            keep(small_.own[block], ptx::exp2(total[half]), half);
        }
        BlockTokens x, k, decay;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) decay[n][i] = ptx::exp2(L[n][i]);
        load_keys(Layout::q, block, x);
        with_rows(small_.q_norm, block, [&](int n, int i, float norm) { x[n][i] *= call_.scale * norm * decay[n][i]; });
        store_operand(read_keys, block, x);
        load_keys(Layout::k, block, k);
        with_rows(small_.k_norm, block, [&](int n, int i, float norm) {
            k[n][i] *= norm;
            x[n][i] = k[n][i] * ptx::exp2(total[i / 2] - L[n][i]);
        });
        store_operand(written_keys, block, x);
        with_rows(small_.minus_beta, block,
                  [&](int n, int i, float minus_beta) { x[n][i] = minus_beta * k[n][i] * decay[n][i]; });
        store_operand(erase_keys, block, x);
    }

    // 16 rows of P or Q, one half of their columns.
    __device__ void make_pairs(int which, int column_half) const {
        const int block = warp_ % 4;
        float x[C / 16][4] = {};
        const Rows left = tile(which == 0 ? Layout::d_o : Layout::d_r), right = tile(Layout::u);
#pragma unroll 2
        for (int depth = 0; depth < D / 16; ++depth) {
            if (2 * column_half > block) break;
            std::uint32_t a[4], b[4];
            left.load_left(a, 16 * block, depth, lane_);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if (2 * column_half + n > block) break;
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
            for (int half = 0; half < 2; ++half) {
                const int i = 16 * block + lane_ / 4 + 8 * half, j = 8 * at + 2 * (lane_ % 4), end = i + 1 - which;
                *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(i, at) + 4 * (lane_ % 4))) =
                    ptx::pack(j < end ? x[n][2 * half] : 0.0F, j + 1 < end ? x[n][2 * half + 1] : 0.0F, T());
            }
        }
    }

    // --- products

    // What the states give to both blocks, and rowsum(S∘dS').
    __device__ void multiply_states(OfTwo& x, OfTwo& E, OfTwo& y) const {
        float through[2] = {};
#pragma unroll 1
        for (int depth = 0; depth < D / 16; ++depth) {
            std::uint32_t before[4], after[4], b[4];
            tile(Layout::state).load_transposed_result(before, 16 * depth, group_, lane_);
            tile(Layout::dstate).load_transposed_result(after, 16 * depth, group_, lane_);
            if (depth % 2 == part_) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 s = ptx::unpack(before[i], T()), ds = ptx::unpack(after[i], T());
                    through[i % 2] = fmaf(s.x, ds.x, fmaf(s.y, ds.y, through[i % 2]));
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 16 * block_of(i);
                tile(Layout::d_o).load_right(b, row, depth, lane_);
                multiply(x[i], before, b);
                tile(Layout::d_r).load_right(b, row, depth, lane_);
                multiply(E[i], before, b);
                tile(Layout::u).load_right(b, row, depth, lane_);
                multiply(y[i], after, b);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) keep(small_.through[part_], sum_of_lanes<4>(through[half]), half);
    }
    // x [16 channels, 16 tokens] += left right
    __device__ static void multiply(BlockTokens& x, const std::uint32_t (&left)[4], const std::uint32_t (&right)[4]) {
        ptx::multiply(x[0], left, right[0], right[1], T());
        ptx::multiply(x[1], left, right[2], right[3], T());
    }
    __device__ void decay(const float* own, BlockTokens& x) const {
        const float factor[2] = {own[channel(0)], own[channel(1)]};
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] *= factor[i / 2];
    }
    // Of a half of the channels: Σ a∘x + b∘y over a block's tokens.
    __device__ float dot_tokens(const BlockTokens& a, const BlockTokens& x, int half) const {
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) sum = fmaf(a[n][2 * half + e], x[n][2 * half + e], sum);
        return sum;
    }
    __device__ void add_other_blocks(int block, BlockTokens& x, BlockTokens& E, BlockTokens& y) const {
        std::uint32_t left[4], b[4];
        BlockTokens read, erase;
        load_operand(read_keys, block, left);
        unpack(left, read);
        load_operand(erase_keys, block, left);
        unpack(left, erase);
#pragma unroll 1
        for (int J = 0; J < block; ++J) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                keep(small_.later[block - 1][J],
                     sum_of_lanes<4>(dot_tokens(read, x, half) + dot_tokens(erase, E, half)), half);
            decay(small_.own[J], x);
            decay(small_.own[J], E);
            load_operand(written_keys, J, left);
            pairs(0).load_right(b, 16 * block, J, lane_);
            multiply(x, left, b);
            pairs(1).load_right(b, 16 * block, J, lane_);
            multiply(E, left, b);
        }
        load_operand(written_keys, block, left);
        unpack(left, read);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            keep(small_.earlier[block], sum_of_lanes<4>(dot_tokens(read, y, half)), half);
#pragma unroll 1
        for (int I = blocks - 1; I > block; --I) {
            decay(small_.own[I], y);
            load_operand(read_keys, I, left);
            pairs(0).load_right_mn_major(b, 16 * I, block, lane_);
            multiply(y, left, b);
            load_operand(erase_keys, I, left);
            pairs(1).load_right_mn_major(b, 16 * I, block, lane_);
            multiply(y, left, b);
        }
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
    launch(finish_channel_kernel<T>, {blocks_by_head(call, sequences), channel_threads, ChannelMemory<T>::bytes},
           stream, "gradients of the delta rules", call, sequences, saved, grad);
}
template void launch_finish_channel<__nv_bfloat16>(const DeltaCall&, const DeltaSequences&, const GradientViews&,
                                                   const SavedChunks&, cudaStream_t);

}  // namespace softdelta::cuda
