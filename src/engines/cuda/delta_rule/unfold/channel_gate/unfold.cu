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
// then pairs within a block by halves (pairs.h), and the sum of what spans each gate (docs/math.md, "Span
// form"). No exponent is positive. All of it is transposed: x, E and y of a warp are 16 channels by 16 tokens, twice.
#include "engines/cuda/delta_rule/unfold/channel_gate/results.h"
#include "engines/cuda/delta_rule/unfold/values.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

template <class T>
class ChannelUnfold : ChannelResults<T> {
    using Base = ChannelResults<T>;
    using Base::add_own_products;
    using Base::block_of;
    using Base::C;
    using Base::c_;
    using Base::call_;
    using Base::channel;
    using Base::copy;
    using Base::copy_gates;
    using Base::copy_state;
    using Base::D;
    using Base::erase_keys;
    using Base::exchange_aside;
    using Base::forget;
    using Base::grad_;
    using Base::h_;
    using Base::has_own_products;
    using Base::hv_;
    using Base::keep;
    using Base::lane_;
    using Base::load_operand;
    using Base::load_parameters;
    using Base::make_norms;
    using Base::make_operands;
    using Base::make_pairs;
    using Base::make_sums;
    using Base::own_product;
    using Base::pairs;
    using Base::part_;
    using Base::put_aside;
    using Base::read_keys;
    using Base::row_of;
    using Base::rows_;
    using Base::s_;
    using Base::saved_;
    using Base::slice_;
    using Base::slot_;
    using Base::small_;
    using Base::store_keys;
    using Base::store_share;
    using Base::sum_rows;
    using Base::sum_spanning;
    using Base::take_aside;
    using Base::thread_;
    using Base::threads;
    using Base::tile;
    using Base::unfold_block;
    using Base::unpack;
    using Base::value_tile;
    using Base::written_keys;
    using typename Base::Layout;
    using typename Base::ValueRows;
    using OfTwo = BlockTokens[2];  // of the warp's two blocks

  public:
    using Base::Base;

    __device__ void run() {
        if (rows_ <= 0) return;
        const bool by_token = saved_.goes_by_token(slot_, hv_);  // looked at when copies are on their way
        copy_gates(rows_);
        ptx::commit_copies();
        const auto copy_rows = [&](const auto& to, const View& from, int head, int size) {
            copy_full_rows(to, from, s_, c_, head, 0, rows_, size, thread_, threads);
        };
        copy_rows(tile(Layout::q), call_.q, h_, call_.key_size);
        copy_rows(tile(Layout::k), call_.k, h_, call_.key_size);
        ptx::commit_copies();
        copy_rows(value_tile(Layout::d_o), grad_.d_o, hv_, grad_.d_o ? call_.value_size : 0);
        copy_saved_tile<T, D, threads>(value_tile(Layout::d_r), saved_.dr(slot_, hv_), C, thread_);
        copy_saved_tile<T, D, threads>(value_tile(Layout::u), saved_.u(slot_, hv_), C, thread_);
        ptx::commit_copies();
        copy_state(Layout::state, saved_.state(slot_, hv_));
        copy_state(Layout::dstate, saved_.dstate(slot_, hv_));
        ptx::commit_copies();
        if (by_token) {
            ptx::wait_for_copies();
            return;
        }
        load_parameters();
        ptx::wait_for_copies_but<3>();
        meet();
        OfTwo L;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            forget();
            make_sums(block_of(i), L[i]);
        }
        constexpr int threads_of_row = 4;  // of the second half: the first has P and Q
        const int r = (thread_ - threads / 2) / threads_of_row;
        const bool has_values = thread_ >= threads / 2;
        const RowValues<T, ValueRows, threads_of_row> v(
            static_cast<const T*>(call_.v.data) + row_of(call_.v, has_values ? r : 0, hv_),
            has_values && r < small_.rows ? call_.value_size : 0, thread_ % threads_of_row);
        ptx::wait_for_copies_but<2>();
        meet();
        make_norms();
        ptx::wait_for_copies_but<1>();
        ptx::publish_to_products();
        meet();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            forget();
            make_operands(block_of(i), L[i]);
        }
        make_pairs();
        if (has_values) {
            const float of_values = v.dot_row(value_tile(Layout::d_r), r);
            if (thread_ % threads_of_row == 0) small_.of_values[r] = of_values;
        }
        ptx::wait_for_copies();
        meet();

        BlockTokens l, x, E, y;
        {
            OfTwo of_x = {}, of_E = {}, of_y = {};
            multiply_states(of_x, of_E, of_y);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                forget();
                add_other_blocks(block_of(i), of_x[i], of_E[i], of_y[i]);
                __syncwarp();
            }
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
        sum_spanning();
        ptx::wait_for_copies();
        __syncwarp();
        for_both_blocks([&](int block) { unfold_block(block, l, x, E, y); },
                        [&] {
                            take_aside(0, l);
                            exchange_aside(1, x);
                            take_aside(2, E);
                            exchange_aside(3, y);
                        });
        meet();
        sum_rows();
        if (saved_.shares && thread_ >= 256) store_share((thread_ - 256) / D, thread_ % D);
        __syncwarp();
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

    // --- products

    // What the states give to both blocks, and rowsum(S∘dS').
    __device__ void multiply_states(OfTwo& x, OfTwo& E, OfTwo& y) const {
        float first[4] = {}, second[4] = {};
#pragma unroll 1
        for (int depth = 0; depth < D / 16; ++depth) {
            std::uint32_t before[4], after[4], b[4];
            tile(Layout::state).load_transposed_result(before, 16 * depth, slice_, lane_);
            tile(Layout::dstate).load_transposed_result(after, 16 * depth, slice_, lane_);
            if (depth % 2 == part_) add_own_products(before, after, first, second);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 16 * block_of(i);
                value_tile(Layout::d_o).load_right(b, row, depth, lane_);
                multiply(x[i], before, b);
                value_tile(Layout::d_r).load_right(b, row, depth, lane_);
                multiply(E[i], before, b);
                value_tile(Layout::u).load_right(b, row, depth, lane_);
                multiply(y[i], after, b);
            }
        }
        if (!has_own_products()) return;
        small_.through[part_][channel(0)] = own_product(first);
        small_.through[part_][channel(1)] = own_product(second + 2);
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
    unfold_channel_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                          const __grid_constant__ SavedChunks saved, const __grid_constant__ GradientViews grad) {
    ChannelUnfold<T>(call, sequences, grad, saved).run();
}

}  // namespace

template <class T>
void launch_unfold_channel(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                           const SavedChunks& saved, cudaStream_t stream) {
    launch(unfold_channel_kernel<T>, {blocks_by_head(call, sequences), channel_threads, ChannelMemory<T>::bytes},
           stream, "gradients of the delta rules", call, sequences, saved, grad);
}
template void launch_unfold_channel<__nv_bfloat16>(const DeltaCall&, const DeltaSequences&, const GradientViews&,
                                                   const SavedChunks&, cudaStream_t);

}  // namespace softdelta::cuda
