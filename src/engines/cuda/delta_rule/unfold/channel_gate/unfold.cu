// All gradients of a chunk and head, for a gate of each channel (erasing along k from the decayed state). A chunk is
// four blocks of 16 rows; L is the sum of a block's gates up to a row, R the sum after it, t the sum of them all. With
//
//     P = tril(dO Uᵀ)     Q = stril(dR Uᵀ)     E = −e
//
// the rows of block I come from the state and from the blocks before it. Those of block J come from dS' and from the
// blocks after it. The nearest block is the last:
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

// Products of a chunk's rows with the states, and with the rows of other blocks.
template <class T>
struct ChannelProducts {
    using Layout = ChannelMemory<T>;
    static constexpr int D = channels;

    const ChannelTiles<T>& my;

    // What the states give to both blocks, and rowsum(S∘dS').
    __device__ void multiply_states(BlockTokens (&x)[2], BlockTokens (&E)[2], BlockTokens (&y)[2]) const {
        float first[4] = {}, second[4] = {};
#pragma unroll 1
        for (int depth = 0; depth < D / 16; ++depth) {
            std::uint32_t before[4], after[4], b[4];
            my.tile(Layout::state).load_transposed_result(before, 16 * depth, 16 * my.slice, my.lane);
            my.tile(Layout::dstate).load_transposed_result(after, 16 * depth, 16 * my.slice, my.lane);
            if (depth % 2 == my.part) my.add_own_products(before, after, first, second);
            unrolled<2>([&](int i) {
                const int row = 16 * my.block_of(i);
                my.value_tile(Layout::d_o).load_right(b, row, depth, my.lane);
                multiply(x[i], before, b);
                my.value_tile(Layout::d_r).load_right(b, row, depth, my.lane);
                multiply(E[i], before, b);
                my.value_tile(Layout::u).load_right(b, row, depth, my.lane);
                multiply(y[i], after, b);
            });
        }
        if (!my.has_own_products()) return;
        my.small.through[my.part][my.channel(0)] = my.own_product(first);
        my.small.through[my.part][my.channel(1)] = my.own_product(second + 2);
    }
    // x [16 channels, 16 tokens] += left right
    __device__ static void multiply(BlockTokens& x, const std::uint32_t (&left)[4], const std::uint32_t (&right)[4]) {
        ptx::multiply(x[0], left, right[0], right[1], T());
        ptx::multiply(x[1], left, right[2], right[3], T());
    }
    __device__ void decay(const float* own, BlockTokens& x) const {
        const float factor[2] = {own[my.channel(0)], own[my.channel(1)]};
        unrolled<2, 4>([&](int n, int i) { x[n][i] *= factor[i / 2]; });
    }
    // Of a half of the channels: Σ a∘x + b∘y over a block's tokens.
    __device__ float dot_tokens(const BlockTokens& a, const BlockTokens& x, int half) const {
        float sum = 0;
        unrolled<2, 2>([&](int n, int e) { sum = fmaf(a[n][2 * half + e], x[n][2 * half + e], sum); });
        return sum;
    }
    __device__ void add_other_blocks(int block, BlockTokens& x, BlockTokens& E, BlockTokens& y) const {
        std::uint32_t left[4], b[4];
        BlockTokens read, erase;
        my.load_operand(read_keys, block, left);
        my.unpack(left, read);
        my.load_operand(erase_keys, block, left);
        my.unpack(left, erase);
#pragma unroll 1
        for (int J = 0; J < block; ++J) {
            unrolled<2>([&](int half) {
                my.keep(my.small.later[block - 1][J],
                        sum_of_lanes<4>(dot_tokens(read, x, half) + dot_tokens(erase, E, half)), half);
            });
            decay(my.small.own[J], x);
            decay(my.small.own[J], E);
            my.load_operand(written_keys, J, left);
            my.pairs(0).load_right(b, 16 * block, J, my.lane);
            multiply(x, left, b);
            my.pairs(1).load_right(b, 16 * block, J, my.lane);
            multiply(E, left, b);
        }
        my.load_operand(written_keys, block, left);
        my.unpack(left, read);
        unrolled<2>(
            [&](int half) { my.keep(my.small.earlier[block], sum_of_lanes<4>(dot_tokens(read, y, half)), half); });
#pragma unroll 1
        for (int I = blocks - 1; I > block; --I) {
            decay(my.small.own[I], y);
            my.load_operand(read_keys, I, left);
            my.pairs(0).load_right_mn_major(b, 16 * I, block, my.lane);
            multiply(y, left, b);
            my.load_operand(erase_keys, I, left);
            my.pairs(1).load_right_mn_major(b, 16 * I, block, my.lane);
            multiply(y, left, b);
        }
    }
};

template <class T>
__global__ void __launch_bounds__(channel_threads, 1) unfold_channel_kernel(const __grid_constant__ ChunkGradients of) {
    const auto& [call, sequences, saved, grad] = of;
    using Layout = ChannelMemory<T>;
    constexpr int C = chunk_rows, D = channels, threads = channel_threads;
    ChannelTiles<T> my(of, chunk_of_block(sequences));
    const ChannelOperands<T> operands{my};
    const ChannelProducts<T> products{my};
    const ChannelResults<T> results{my};
    const auto wait_for_all = [&] {
        my.forget();
        __syncthreads();
    };
    // use(block) for both blocks of the warp, with next() after each: one text of instructions.
    const auto for_both_blocks = [&](const auto& use, const auto& next) {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            my.forget();
            use(my.block_of(i));
            next();
            __syncwarp();  // products of a warp want all its lanes
        }
    };

    if (my.rows <= 0) return;
    const bool by_token = saved.goes_by_token(my.slot, my.hv);  // looked at when copies are on their way
    my.copy_gates(my.rows);
    ptx::commit_copies();
    const auto copy = [&](const auto& to, const View& from, int head, int size) {
        copy_rows<threads>(to, from, my.s, my.c, head, 0, size, my.thread);
    };
    copy(my.tile(Layout::q), call.q, my.h, call.key_size);
    copy(my.tile(Layout::k), call.k, my.h, call.key_size);
    ptx::commit_copies();
    copy(my.value_tile(Layout::d_o), grad.d_o, my.hv, grad.d_o ? call.value_size : 0);
    copy_saved_tile<T, D, threads>(my.value_tile(Layout::d_r), saved.dr(my.slot, my.hv), C, my.thread);
    copy_saved_tile<T, D, threads>(my.value_tile(Layout::u), saved.u(my.slot, my.hv), C, my.thread);
    ptx::commit_copies();
    copy_bytes<Layout::state_bytes, threads>(my.tile(Layout::state).base, saved.state(my.slot, my.hv), my.thread);
    copy_bytes<Layout::state_bytes, threads>(my.tile(Layout::dstate).base, saved.dstate(my.slot, my.hv), my.thread);
    ptx::commit_copies();
    if (by_token) {
        ptx::wait_for_copies();
        return;
    }
    my.load_parameters();
    ptx::wait_for_copies_but<3>();
    wait_for_all();
    BlockTokens L[2];
    unrolled<2>([&](int i) {
        my.forget();
        my.make_sums(my.block_of(i), L[i]);
    });
    constexpr int threads_of_row = 4;  // of the second half: the first has P and Q
    const int r = (my.thread - threads / 2) / threads_of_row;
    const bool has_values = my.thread >= threads / 2;
    const RowValues<T, KeyTile<T, D>, threads_of_row> v(
        static_cast<const T*>(call.v.data) + my.row_of(call.v, has_values ? r : 0, my.hv),
        has_values && r < my.small.rows ? call.value_size : 0, my.thread % threads_of_row);
    ptx::wait_for_copies_but<2>();
    wait_for_all();
    operands.norms();
    ptx::wait_for_copies_but<1>();
    ptx::publish_to_products();
    wait_for_all();
    unrolled<2>([&](int i) {
        my.forget();
        operands.of_block(my.block_of(i), L[i]);
    });
    operands.pairs();
    if (has_values) {
        const float of_values = v.dot_row(my.value_tile(Layout::d_r), r);
        if (my.thread % threads_of_row == 0) my.small.of_values[r] = of_values;
    }
    ptx::wait_for_copies();
    wait_for_all();

    BlockTokens l, x, E, y;
    {
        BlockTokens of_x[2] = {}, of_E[2] = {}, of_y[2] = {};
        products.multiply_states(of_x, of_E, of_y);
        unrolled<2>([&](int i) {
            my.forget();
            products.add_other_blocks(my.block_of(i), of_x[i], of_E[i], of_y[i]);
            __syncwarp();
        });
        wait_for_all();  // U, dO, dR, operands and the states were read
        if (call.raw_gate != core::RawGate::none) my.copy_gates(my.small.rows);
        // Of the second block aside, for registers are scarce.
        my.put_aside(0, L[1]);
        my.put_aside(1, of_x[1]);
        my.put_aside(2, of_E[1]);
        my.put_aside(3, of_y[1]);
        my.copy(L[0], l);
        my.copy(of_x[0], x);
        my.copy(of_E[0], E);
        my.copy(of_y[0], y);
    }
    results.sum_spanning();
    ptx::wait_for_copies();
    __syncwarp();
    for_both_blocks([&](int block) { results.unfold_block(block, l, x, E, y); },
                    [&] {
                        my.take_aside(0, l);
                        my.exchange_aside(1, x);
                        my.take_aside(2, E);
                        my.exchange_aside(3, y);
                    });
    wait_for_all();
    results.sum_rows();
    if (saved.shares && my.thread >= 256) results.store_share((my.thread - 256) / D, my.thread % D);
    __syncwarp();
    for_both_blocks(
        [&](int block) {
            results.store_keys(0, Layout::q, Layout::d_o, my.small.q_norm, grad.dq, block, x);
            results.store_keys(1, Layout::k, Layout::d_r, my.small.k_norm, grad.dk, block, y);
        },
        [&] {
            my.exchange_aside(1, x);
            my.exchange_aside(3, y);
        });
}

}  // namespace

void launch_unfold_channel(const ChunkGradients& of, cudaStream_t stream) {
    launch(unfold_channel_kernel<SavedElement>,
           {blocks_by_head(of), channel_threads, ChannelMemory<SavedElement>::bytes}, stream,
           "gradients of the delta rules", of);
}

}  // namespace softdelta::cuda
