// A block of 16 warps with a chunk and head whose gates are of channels, for its gradients (unfold.cu). Products are
// transposed: a warp has 16 channels as rows and the tokens of two of the chunk's four blocks as columns, so that four
// lanes have all tokens of a channel.
#pragma once

#include <type_traits>

#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/saved.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

constexpr int channel_threads = 512, channels = 128, channel_slices = channels / 16;
constexpr int blocks = 4, rows_of_block = chunk_rows / blocks;

// Left operands of a block of tokens: q e^L, −βk e^L, k e^R.
enum ChannelOperand { read_keys, erase_keys, written_keys };

// A lane's part of 16 channels and the 16 tokens of a block, as accumulators lie: [n][2·h + e] is channel
// lane / 4 + 8·h of the warp's and token 8·n + 2·(lane % 4) + e of the block's.
using BlockTokens = float[2][4];

struct ChannelNumbers {
    float q_norm[chunk_rows], k_norm[chunk_rows];
    float given_beta[chunk_rows], minus_beta[chunk_rows];
    float of_values[chunk_rows];  // rowsum(dR∘v)
    float bias[channels];         // of raw gates, and e^A_log and g_gamma:
    float rate, constant, bound;
    int rows;                     // that exist
    float own[blocks][channels];  // e^t
    float later[blocks - 1][blocks]
               [channels];            // [I − 1][b]: Σ over rows of I of q∘dq + βk∘e, from S and blocks before b
    float earlier[blocks][channels];  // Σ over rows of k∘dk, from dS'
    float through[2][channels];       // rowsum(S∘dS'), over half of the columns each
    float spanning[blocks][channels];  // the sum of what spans all gates of a block
};

// Of the last steps, where U lay before.
struct ChannelSums {
    float parts[3][channel_slices][chunk_rows];  // q∘dq, k∘dk, k∘e of each row, over 16 channels
    float rows[2][channel_slices][chunk_rows];   // over all, q∘dq and k∘dk, for each of the slices
    float shares[2][blocks][channels];           // of the gradients of bias or g_gamma, of A_log
};

template <class T, bool in_parts = false>
struct ChannelMemory {
    using Rows = Tile<T, channels>;
    static constexpr int rows_bytes = Rows::bytes(chunk_rows), state_bytes = Rows::bytes(channels),
                         operand_bytes = blocks * channel_slices * 32 * static_cast<int>(sizeof(uint4));
    static constexpr int q = 0, k = rows_bytes, d_o = 2 * rows_bytes, d_r = d_o + rows_bytes, u = d_r + rows_bytes,
                         state = u + rows_bytes, dstate = state + state_bytes, pairs = dstate + state_bytes,
                         operands = pairs + 2 * ChunkRecord::square_bytes, small = operands + 3 * operand_bytes,
                         bytes = small + static_cast<int>(sizeof(ChannelNumbers));
    static_assert(sizeof(ChannelSums) <= rows_bytes && bytes <= 227 * 1024);
    static_assert(chunk_rows * (channels * 4 + 16) <= 3 * operand_bytes);         // gates in f32
    static_assert(4 * sizeof(BlockTokens) * channel_threads <= 2 * state_bytes);  // what is put aside
};

// Value channels 64 at a time: what products over them read lies where keys and sums come later. Operands lie where
// keys lay, which come once more.
template <class T>
struct ChannelMemory<T, true> {
    using Rows = Tile<T, channels>;
    static constexpr int rows_bytes = Rows::bytes(chunk_rows), part_rows_bytes = Tile<T, 64>::bytes(chunk_rows),
                         part_state_bytes = Rows::bytes(64), operand_bytes = rows_bytes;
    static constexpr int pairs = 0, small = 2 * ChunkRecord::square_bytes,
                         parts = (small + static_cast<int>(sizeof(ChannelNumbers)) + 127) / 128 * 128,
                         states = 3 * part_rows_bytes, part_bytes = states + 2 * part_state_bytes, q = parts,
                         k = q + rows_bytes, u = k + rows_bytes, d_o = q, d_r = k;
    static_assert(u + static_cast<int>(sizeof(ChannelSums)) <= parts + part_bytes && 3 * operand_bytes <= part_bytes);

    // apart: keys and operands do not wait until products over value channels are done.
    __host__ __device__ static constexpr int keys(bool apart) { return apart ? parts + part_bytes : parts; }
    static constexpr int bytes(bool apart) { return parts + part_bytes + (apart ? 3 * operand_bytes : 0); }
    static_assert(bytes(false) <= least_shared_bytes && bytes(true) <= 163 << 10);
};

template <class T, bool in_parts = false>
struct ChannelTiles {
    static constexpr int C = chunk_rows, D = channels, threads = channel_threads;
    using Layout = ChannelMemory<T, in_parts>;
    using Rows = Tile<T, D>;
    using ValueRows = KeyTile<T, D>;
    using Square = Tile<T, C>;

    __device__ ChannelTiles(const ChunkGradients& of, const ChunkPosition& at)
        : call(of.call), grad(of.grad), saved(of.saved), s(at.s), c(at.c), rows(at.rows()) {}

    // Registers are scarce, and L1 has no room for what would be put aside: places are computed anew.
    __device__ void forget() {
        ptx::forget(thread);
        ptx::forget(warp);
        ptx::forget(lane);
        ptx::forget(slice);
        ptx::forget(part);
    }
    __device__ Rows tile(int at) const { return {base + at}; }
    __device__ ValueRows value_tile(int at) const { return {base + at}; }  // dO, dR, U
    __device__ Square pairs(int which) const { return {base + Layout::pairs + which * ChunkRecord::square_bytes}; }
    // Of a part: dO, dR or U; S or dS'.
    __device__ KeyTile<T, 64> part_rows(int which) const {
        return {base + Layout::parts + which * Layout::part_rows_bytes};
    }
    __device__ Rows part_state(int which) const {
        return {base + Layout::parts + Layout::states + which * Layout::part_state_bytes};
    }
    __device__ Index row_of(const View& v, int i, int head) const { return s.row(v, c * C + i, head); }

    // --- what a lane has: channels channel(0) and channel(1), tokens first_token(block) + 8·n + e

    // The warp's blocks of tokens: 0 and 3, or 1 and 2, so that all have as many earlier and later ones.
    __device__ int block_of(int i) const { return i == 0 ? part : blocks - 1 - part; }
    // Of the rows of both.
    __device__ int row_of_two(int i) const { return rows_of_block * block_of(i / rows_of_block) + i % rows_of_block; }
    __device__ int channel(int half) const { return 16 * slice + lane / 4 + 8 * half; }
    __device__ int first_token(int block) const { return rows_of_block * block + 2 * (lane % 4); }
    // Two neighbouring tokens' numbers.
    __device__ static float2 two(const float* rows, int token) {
        return *reinterpret_cast<const float2*>(rows + token);
    }
    // use(element, n, half, token of the lane e, number of the row): all elements, with a number of their token's.
    template <class Use>
    __device__ void with_rows(const float* rows, int block, const Use& use) const {
        unrolled<2>([&](int n) {
            const float2 both = two(rows, first_token(block) + 8 * n);
            unrolled<4>([&](int i) { use(n, i, i % 2 == 0 ? both.x : both.y); });
        });
    }
    // As given: of q or k.
    __device__ void load_keys(int at, int block, BlockTokens& out) const {
        std::uint32_t words[4];
        tile(at).load_transposed_result(words, rows_of_block * block, 16 * slice, lane);
        unpack(words, out);
    }
    __device__ static void unpack(const std::uint32_t (&words)[4], BlockTokens& out) {
        unrolled<4>([&](int i) {
            const float2 both = ptx::unpack(words[i], T());
            out[i / 2][i % 2 * 2] = both.x;
            out[i / 2][i % 2 * 2 + 1] = both.y;
        });
    }
    __device__ static void pack(const BlockTokens& x, std::uint32_t (&out)[4]) {
        unrolled<4>([&](int i) { out[i] = ptx::pack(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1], T()); });
    }
    // Where operands lie, and given gates at other times.
    __device__ int operands() const {
        if constexpr (in_parts)
            return keys_at;
        else
            return Layout::operands;
    }
    // Left operands of a block that the warp of the other blocks reads, too, in the lane that reads them.
    __device__ uint4& operand(int which, int block) const {
        return reinterpret_cast<uint4*>(memory + operands() +
                                        which * Layout::operand_bytes)[(block * channel_slices + slice) * 32 + lane];
    }
    __device__ void load_operand(int which, int block, std::uint32_t (&out)[4]) const {
        const uint4 x = operand(which, block);
        out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
    }
    __device__ void store_operand(int which, int block, const BlockTokens& x) const {
        std::uint32_t words[4];
        pack(x, words);
        operand(which, block) = {words[0], words[1], words[2], words[3]};
    }

    // --- over the tokens of a channel, that four lanes have

    // What the lanes before, those after and all have of x.
    struct Spread {
        float earlier, later, all;
    };
    __device__ Spread spread(float x) const {
        const float next = __shfl_xor_sync(0xffffffffu, x, 1), pair = x + next,
                    others = __shfl_xor_sync(0xffffffffu, pair, 2);
        const bool second = (lane & 1) != 0, high = (lane & 2) != 0;
        return {(second ? next : 0.0F) + (high ? others : 0.0F), (second ? 0.0F : next) + (high ? 0.0F : others),
                pair + others};
    }
    __device__ void keep(float* of_channels, float x, int half) const {
        if (lane % 4 == 0) of_channels[channel(half)] = x;
    }

    // Products of rows with the same rows lie on the diagonal of what a warp multiplies: rows r of the first eight, of
    // the second eight.
    __device__ static void add_own_products(const std::uint32_t (&x)[4], const std::uint32_t (&y)[4], float (&first)[4],
                                            float (&second)[4]) {
        ptx::multiply(first, x, y[0], y[2], T());
        ptx::multiply(second, x, y[1], y[3], T());
    }
    // Lanes that have those of rows lane / 4 and lane / 4 + 8.
    __device__ bool has_own_products() const { return lane / 8 == lane % 4; }
    __device__ float own_product(const float* two) const { return lane / 4 % 2 == 0 ? two[0] : two[1]; }

    __device__ static void copy(const BlockTokens& from, BlockTokens& to) {
        unrolled<2, 4>([&](int n, int i) { to[n][i] = from[n][i]; });
    }
    // A thread's own memory, where the states lay; in parts, registers that the compiler puts aside.
    __device__ float4& aside(int which, int n) {
        if constexpr (in_parts)
            return own_aside[2 * which + n];
        else
            return reinterpret_cast<float4*>(memory + Layout::state)[(2 * which + n) * threads + thread];
    }
    __device__ void put_aside(int which, const BlockTokens& x) {
        unrolled<2>([&](int n) { aside(which, n) = {x[n][0], x[n][1], x[n][2], x[n][3]}; });
    }
    // The first block's numbers stay, those of the second go aside, for registers are scarce.
    __device__ void keep_first(int which, const BlockTokens (&of)[2], BlockTokens& first) {
        put_aside(which, of[1]);
        copy(of[0], first);
    }
    __device__ void take_aside(int which, BlockTokens& x) {
        unrolled<2>([&](int n) {
            const float4 other = aside(which, n);
            x[n][0] = other.x, x[n][1] = other.y, x[n][2] = other.z, x[n][3] = other.w;
        });
    }
    __device__ void exchange_aside(int which, BlockTokens& x) {
        unrolled<2>([&](int n) {
            const float4 other = aside(which, n);
            aside(which, n) = {x[n][0], x[n][1], x[n][2], x[n][3]};
            x[n][0] = other.x, x[n][1] = other.y, x[n][2] = other.z, x[n][3] = other.w;
        });
    }

    // --- gates

    // The given gates, as they are, to where operands lie at other times: the warp's own part, for itself. A row takes
    // 16 bytes more than it has, so that a warp reads different banks.
    template <class G>
    static constexpr int gate_pitch = D + 16 / static_cast<int>(sizeof(G));
    template <class G>
    __device__ G* gates(const G*) const {
        return reinterpret_cast<G*>(memory + operands());
    }
    __device__ void copy_gates(int rows) const {
        const View& v = call.g;
        if (!v) return;
        with_type(v, [&](const auto* data) {
            using G = std::remove_cvref_t<decltype(*data)>;
            constexpr int whole = 16 / static_cast<int>(sizeof(G)), units = 16 / whole, rows_at_once = 32 / units;
            const G* from = data + row_of(v, 0, hv);
            const bool units_are_whole = v.stride[3] == 1 && call.key_size % whole == 0 && v.stride[1] % whole == 0 &&
                                         reinterpret_cast<std::uintptr_t>(from) % 16 == 0;
            const int first = 16 * slice;
            if (units_are_whole) {
                const int m = first + lane % units * whole;
                if (m >= call.key_size) return;
                unrolled<2>([&](int two) {
                    const int row = rows_of_block * block_of(two) + lane / units;
                    const G* of_row = from + row * v.stride[1] + m;
                    const std::uint32_t to = ptx::shared_address(gates(data) + row * gate_pitch<G> + m);
                    unrolled<rows_of_block / rows_at_once>([&](int n) {
                        const int i = rows_at_once * n;
                        if (row + i < rows)
                            ptx::copy_async(to + i * gate_pitch<G> * static_cast<int>(sizeof(G)),
                                            of_row + i * v.stride[1], true);
                    });
                });
                return;
            }
            const int m = first + lane % 16;
#pragma unroll 1
            for (int i = lane / 16; i < 2 * rows_of_block; i += 2) {
                const int row = row_of_two(i);
                if (row < rows && m < call.key_size)
                    gates(data)[row * gate_pitch<G> + m] = from[row * v.stride[1] + m * v.stride[3]];
            }
        });
    }
    // Of rows and channels that do not exist, anything.
    __device__ void load_given(int block, BlockTokens& out) const {
        unrolled<2, 4>([&](int n, int i) { out[n][i] = call.g ? 0.0F : small.constant; });
        if (!call.g) return;
        with_type(call.g, [&](const auto* data) {
            using G = std::remove_cvref_t<decltype(*data)>;
            if constexpr (in_parts) {
                const Index from = row_of(call.g, first_token(block), hv) + channel(0) * call.g.stride[3];
                unrolled<2, 2, 2>([&](int half, int n, int e) {
                    if (first_token(block) + 8 * n + e < rows && channel(half) < call.key_size)
                        out[n][2 * half + e] =
                            to_float(data[from + (8 * n + e) * call.g.stride[1] + 8 * half * call.g.stride[3]]);
                });
                return;
            }
            const G* from = gates(data) + first_token(block) * gate_pitch<G> + channel(0);
            unrolled<2, 2, 2>([&](int half, int n, int e) {
                out[n][2 * half + e] = to_float(from[(8 * n + e) * gate_pitch<G> + 8 * half]);
            });
        });
    }
    __device__ void load_parameters() const {
        if (thread < D) {
            const int m = thread;
            const View& v = call.raw.bias;
            small.bias[m] = v && m < call.key_size ? load(v, (Index(hv) * call.key_size + m) * v.stride[0]) : 0.0F;
        } else if (thread >= 2 * D && thread < 2 * D + C) {
            const int r = thread - 2 * D;
            const float given = call.beta && r < rows ? load(call.beta, row_of(call.beta, r, hv)) : 0.0F;
            small.given_beta[r] = given;
            small.minus_beta[r] = r >= rows ? 0.0F : call.beta ? -make_beta(call, given) : -1.0F;
        } else if (thread == D) {
            const HeadGate head(call, hv);
            small.rate = head.rate;
            small.constant = head.constant;
            small.bound = static_cast<float>(call.lower_bound);
            small.rows = rows;
        }
    }
    // use(n, i, x_ni and its channel's bias)
    template <class Use>
    __device__ void with_bias(const BlockTokens& x, const Use& use) const {
        unrolled<2>([&](int half) {
            const float dt = small.bias[channel(half)];
            unrolled<2>([&](int n) {
                unrolled<2>([&](int e) {
                    const int i = 2 * half + e;
                    use(n, i, x[n][i] + dt);
                });
            });
        });
    }
    // L, the sum of a block's gates up to each token, divided by ln 2 (fold/channel_gate.cu).
    __device__ void make_sums(int block, BlockTokens& L) const {
        load_given(block, L);
        const float rate = small.rate;
        const auto make = [&](const auto& gate) {
            with_bias(L, [&](int n, int i, float given) { L[n][i] = gate(given); });
        };
        if (call.raw_gate == core::RawGate::softplus) make([&](float x) { return -rate * fast_softplus(x); });
        if (call.raw_gate == core::RawGate::lower_bound)
            make([&](float x) { return small.bound * ptx::reciprocal(1 + ptx::exp2(-log2_e * rate * x)); });
        unrolled<2>([&](int half) {
            const int rows = channel(half) < call.key_size ? small.rows - first_token(block) : 0;
            float before = 0;
            unrolled<2>([&](int n) {
                float g[2];
                unrolled<2>(
                    [&](int e) { g[e] = 8 * n + e < rows ? fmaxf(L[n][2 * half + e], -100.0F) * log2_e : 0.0F; });
                const Spread of = spread(g[0] + g[1]);
                L[n][2 * half] = before + of.earlier + g[0];
                L[n][2 * half + 1] = L[n][2 * half] + g[1];
                before += of.all;
            });
        });
    }
    // Of the last token of a block, or of the first eight.
    __device__ float up_to_eight(const BlockTokens& L, int n, int half) const {
        return __shfl_sync(0xffffffffu, L[n][2 * half + 1], lane | 3);
    }

    const DeltaCall& call;
    const GradientViews& grad;
    const SavedChunks& saved;
    const DeltaSequence s;
    const Index c;
    const int hv = static_cast<int>(blockIdx.x), h = hv;  // gates of channels have as many key as value heads
    int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, slice = warp % channel_slices,
        part = warp / channel_slices;
    const int rows;
    const Index slot = s.first_slot + c;
    char* memory = ptx::shared_memory();
    std::uint32_t base = ptx::shared_address(memory);
    int keys_at = 0;  // in parts: where keys lie first, and then operands
    float4 own_aside[in_parts ? 8 : 1];
    ChannelNumbers& small = *reinterpret_cast<ChannelNumbers*>(memory + Layout::small);
    ChannelSums& sums = *reinterpret_cast<ChannelSums*>(memory + Layout::u);
};

}  // namespace softdelta::cuda
