// All gradients of a chunk and head, for a gate of each channel (erasing along k from the decayed state). A chunk is
// four blocks of 16 rows. L is the sum of a block's gates up to a row, R the sum after it, t the sum of them all. With
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
template <class T, bool in_parts = false>
struct ChannelProducts {
    using Layout = ChannelMemory<T, in_parts>;

    const ChannelTiles<T, in_parts>& my;

    // What the states give to both blocks, and rowsum(S∘dS').
    __device__ void multiply_states(BlockTokens (&x)[2], BlockTokens (&E)[2], BlockTokens (&y)[2]) const {
        float first[4] = {}, second[4] = {};
        add_states<channels / 16>(my.tile(Layout::state), my.tile(Layout::dstate), my.value_tile(Layout::d_o),
                                  my.value_tile(Layout::d_r), my.value_tile(Layout::u), x, E, y, first, second);
        keep_own_products(first, second);
    }
    template <int depths, class States, class Values>
    __device__ void add_states(const States& state, const States& dstate, const Values& d_o, const Values& d_r,
                               const Values& u, BlockTokens (&x)[2], BlockTokens (&E)[2], BlockTokens (&y)[2],
                               float (&first)[4], float (&second)[4]) const {
#pragma unroll 1
        for (int depth = 0; depth < depths; ++depth) {
            std::uint32_t before[4], after[4], b[4];
            state.load_transposed_result(before, 16 * depth, 16 * my.slice, my.lane);
            dstate.load_transposed_result(after, 16 * depth, 16 * my.slice, my.lane);
            if (depth % 2 == my.part) my.add_own_products(before, after, first, second);
            unrolled<2>([&](int i) {
                const int row = 16 * my.block_of(i);
                d_o.load_right(b, row, depth, my.lane);
                multiply(x[i], before, b);
                d_r.load_right(b, row, depth, my.lane);
                multiply(E[i], before, b);
                u.load_right(b, row, depth, my.lane);
                multiply(y[i], after, b);
            });
        }
    }
    __device__ void keep_own_products(const float (&first)[4], const float (&second)[4]) const {
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

// From what states and other blocks give to the warp's two blocks to results. wait(): copies of keys are there.
template <class T, bool in_parts, class Wait>
__device__ inline void unfold_blocks(ChannelTiles<T, in_parts>& my, const ChannelResults<T, in_parts>& results,
                                     const BlockTokens (&L)[2], const BlockTokens (&of_x)[2],
                                     const BlockTokens (&of_E)[2], const BlockTokens (&of_y)[2], const Wait& wait) {
    using Layout = ChannelMemory<T, in_parts>;
    BlockTokens l, x, E, y;  // of the first block; those of the second are put aside
    my.keep_first(0, L, l);
    my.keep_first(1, of_x, x);
    my.keep_first(2, of_E, E);
    my.keep_first(3, of_y, y);
    results.sum_spanning();
    ptx::wait_for_copies();
    wait();
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
    for_both_blocks([&](int block) { results.unfold_block(block, l, x, E, y); },
                    [&] {
                        my.take_aside(0, l);
                        my.exchange_aside(1, x);
                        my.take_aside(2, E);
                        my.exchange_aside(3, y);
                    });
    my.forget();
    __syncthreads();
    results.sum_rows();
    if (my.saved.shares && my.thread >= 256) results.store_share((my.thread - 256) / channels, my.thread % channels);
    __syncwarp();
    for_both_blocks(
        [&](int block) {
            results.store_keys(0, Layout::q, Layout::d_o, my.small.q_norm, my.grad.dq, block, x);
            results.store_keys(1, Layout::k, Layout::d_r, my.small.k_norm, my.grad.dk, block, y);
        },
        [&] {
            my.exchange_aside(1, x);
            my.exchange_aside(3, y);
        });
}

// On sm_90a.
template <class T>
__device__ inline void unfold_channel(const ChunkGradients& of) {
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

    BlockTokens of_x[2] = {}, of_E[2] = {}, of_y[2] = {};
    products.multiply_states(of_x, of_E, of_y);
    unrolled<2>([&](int i) {
        my.forget();
        products.add_other_blocks(my.block_of(i), of_x[i], of_E[i], of_y[i]);
        __syncwarp();
    });
    wait_for_all();  // U, dO, dR, operands and the states were read
    if (call.raw_gate != core::RawGate::none) my.copy_gates(my.small.rows);
    unfold_blocks(my, results, L, of_x, of_E, of_y, [] { __syncwarp(); });
}

template <class T>
__global__ void __launch_bounds__(channel_threads, 1) unfold_channel_kernel(const __grid_constant__ ChunkGradients of) {
    if constexpr (ptx::has_warpgroups) unfold_channel<T>(of);
}

// The same where the tiles have no room side by side (ChannelMemory).
template <class T>
__global__ void __launch_bounds__(channel_threads, 1)
    unfold_channel_in_parts_kernel(const __grid_constant__ ChunkGradients of, bool apart) {
    const auto& [call, sequences, saved, grad] = of;
    using Layout = ChannelMemory<T, true>;
    constexpr int C = chunk_rows, D = channels, threads = channel_threads;
    ChannelTiles<T, true> my(of, chunk_of_block(sequences));
    my.keys_at = Layout::keys(apart);
    const ChannelOperands<T, true> operands{my};
    const ChannelProducts<T, true> products{my};
    const ChannelResults<T, true> results{my};
    const auto wait_for_all = [&] {
        my.forget();
        __syncthreads();
    };
    if (my.rows <= 0 || saved.goes_by_token(my.slot, my.hv)) return;

    const auto copy_part = [&](int part) {
        const auto copy_saved = [&](int which, const char* from) {
            copy_saved_tile<T, D, threads>(my.part_rows(which), from + 128 * part, C, my.thread);
        };
        copy_rows<threads>(my.part_rows(0), grad.d_o, my.s, my.c, my.hv, 64 * part, grad.d_o ? call.value_size : 0,
                           my.thread);
        copy_saved(1, saved.dr(my.slot, my.hv));
        copy_saved(2, saved.u(my.slot, my.hv));
        const char* const states[2] = {saved.state(my.slot, my.hv), saved.dstate(my.slot, my.hv)};
        unrolled<2>([&](int i) {
            copy_bytes<Layout::part_state_bytes, threads>(my.part_state(i).base,
                                                          states[i] + part * Layout::part_state_bytes, my.thread);
        });
        ptx::commit_copies();
    };
    const auto copy_keys = [&](int at) {
        copy_rows<threads>(my.tile(at), call.q, my.s, my.c, my.h, 0, call.key_size, my.thread);
        copy_rows<threads>(my.tile(at + Layout::rows_bytes), call.k, my.s, my.c, my.h, 0, call.key_size, my.thread);
        ptx::commit_copies();
    };
    copy_part(0);
    if (apart) copy_keys(my.keys_at);
    my.load_parameters();
    BlockTokens of_x[2] = {}, of_E[2] = {}, of_y[2] = {};
    {
        const int warp = __shfl_sync(0xffffffffu, my.warp, 0), which = warp / 4, block = warp % 4;  // of pairs
        constexpr int threads_of_row = 4;  // of the second half: the first has P and Q
        const bool has_values = warp >= 8;
        const int r = (my.thread - threads / 2) / threads_of_row;
        float x[C / 8][4] = {}, first[4] = {}, second[4] = {}, of_values = 0;
#pragma unroll 1
        for (int part = 0; part < D / 64; ++part) {
            ptx::wait_for_copies();
            wait_for_all();
            if (has_values) {
                const RowValues<T, KeyTile<T, 64>, threads_of_row> v(
                    static_cast<const T*>(call.v.data) + my.row_of(call.v, r, my.hv) + 64 * part,
                    r < my.rows ? call.value_size - 64 * part : 0, my.thread % threads_of_row);
                of_values += v.dot_row(my.part_rows(1), r);
            } else {
                add_keys<T>(my.part_rows(which), my.part_rows(2), 16 * block, my.lane, x);
            }
            products.template add_states<4>(my.part_state(0), my.part_state(1), my.part_rows(0), my.part_rows(1),
                                            my.part_rows(2), of_x, of_E, of_y, first, second);
            wait_for_all();
            if (part + 1 < D / 64) copy_part(part + 1);
        }
        copy_keys(apart ? Layout::q : my.keys_at);
        if (has_values) {
            if (my.thread % threads_of_row == 0) my.small.of_values[r] = of_values;
        } else {
            operands.store_all_pairs(which, block, x);
        }
        products.keep_own_products(first, second);
    }
    BlockTokens L[2];
    unrolled<2>([&](int i) {
        my.forget();
        my.make_sums(my.block_of(i), L[i]);
    });
    if (apart)
        ptx::wait_for_copies_but<1>();
    else
        ptx::wait_for_copies();
    wait_for_all();
    operands.norms();
    std::uint32_t keys[2][2][4];
    unrolled<2, 2>([&](int i, int which) {
        my.tile(operands.key(which))
            .load_transposed_result(keys[i][which], rows_of_block * my.block_of(i), 16 * my.slice, my.lane);
    });
    wait_for_all();  // norms are there, keys were read
    unrolled<2>([&](int i) {
        my.forget();
        operands.of_block(my.block_of(i), L[i], &keys[i]);
    });
    wait_for_all();
    unrolled<2>([&](int i) {
        my.forget();
        products.add_other_blocks(my.block_of(i), of_x[i], of_E[i], of_y[i]);
        __syncwarp();
    });
    wait_for_all();  // operands were read
    if (!apart) copy_keys(Layout::q);
    unfold_blocks(my, results, L, of_x, of_E, of_y, wait_for_all);
}

}  // namespace

void launch_unfold_channel(const Card& card, const ChunkGradients& of, cudaStream_t stream) {
    using T = SavedElement;
    constexpr const char* what = "gradients of the delta rules";
    if (card.level == Level::sm_90a)
        return launch(unfold_channel_kernel<T>, {blocks_by_head(of), channel_threads, ChannelMemory<T>::bytes}, stream,
                      what, of);
    using Layout = ChannelMemory<T, true>;
    const bool apart = Layout::bytes(true) <= card.shared_bytes;
    launch(unfold_channel_in_parts_kernel<T>, {blocks_by_head(of), channel_threads, Layout::bytes(apart)}, stream, what,
           of, apart);
}

}  // namespace softdelta::cuda
