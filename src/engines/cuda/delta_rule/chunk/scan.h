// The scan over folded chunks, gate-blind: what a consumer warp does. A block has a value head of a sequence and a slab
// of value columns. Everything that depends on the state is transposed, so that it stays in registers: a warp holds 16
// rows of Sᵀ [V, K] as accumulators, and what one product yields is the left operand of the next. Right operands, which
// all warps read, lie in shared memory.
//
//     Rᵀ = vᵀ − (Sᵀ pᵀ)∘e^E               [16, 64] = [16, K]·[K, 64]; gates of channels: β∘(vᵀ − Sᵀ pᵀ)
//     Uᵀ = Rᵀ solveᵀ                      [16, 64] = [16, 64]·[64, 64]
//     oᵀ = (Sᵀ qᵀ)∘scale·e^G + Uᵀ scoreᵀ
//     Sᵀ = e^G_last·Sᵀ + (Uᵀ∘e^(G_last − G)) k
//
// Gates that all channels share multiply the products of plain q, k and p, with the factors of the l2 norm; gates of
// channels are in the keys of the record. Grouped: four warps multiply together (sm_90a).
#pragma once

#include <type_traits>

#include "engines/cuda/delta_rule/chunk/folded.h"
#include "engines/cuda/delta_rule/chunk/lane_state.h"
#include "engines/cuda/delta_rule/chunk/rows.h"
#include "engines/cuda/delta_rule/chunk/tokens.h"

namespace softdelta::cuda {

// A chunk in shared memory. last: gates of channels alone.
template <class T, int K, int slab>
struct ChunkTiles {
    KeyTile<T, K> read, erase, write;
    Tile<T, slab> values;
    SquareTile<T> score, solve;
    const ChunkFactors* factors;
    const float* last;
};

// keeps: S before each chunk and U go to out.kept.
template <class T, int K, int slab, bool channel, bool erases, bool grouped, bool keeps>
class ChunkScan {
    static constexpr int C = chunk_rows, group_barrier = 2;

  public:
    using Tiles = ChunkTiles<T, K, slab>;

    __device__ ChunkScan(const DeltaCall& call, const DeltaSequences& sequences, const DeltaSequence& s,
                         const ChunkOutputs& out, int hv, int first_column)
        : call_(call),
          sequences_(sequences),
          s_(s),
          out_(out),
          hv_(hv),
          first_column_(first_column),
          warp_(static_cast<int>(threadIdx.x) / 32),
          lane_(static_cast<int>(threadIdx.x) % 32) {}

    // kept: where this chunk's lie in out.kept.
    __device__ void take(int c, const Tiles& tiles, Index kept = 0) {
        if (out_.states) store_saved(c);
        const bool odd = is_odd(tiles);
        if constexpr (keeps) keep_state(tiles, odd, kept);
        if (tiles.factors->by_token != 0 || odd)
            take_chunk_by_token(c);
        else if constexpr (grouped)
            take_chunk_in_group(c, tiles, kept);
        else
            take_chunk(c, tiles, kept);
    }
    __device__ void load_state() {
        const View v = s_.state >= 0 ? call_.initial_state : View();
        LaneState<K> state;
        load_lane_state<K>(&v, s_.state * v.stride[0] + hv_ * v.stride[1], v.stride[call_.state_row],
                           v.stride[call_.state_column], call_.key_size, call_.value_size, own_column(), lane_, state);
        for_each_in(state, [](float from, float& x) { x = from; });
    }
    __device__ void store_final_state() {
        if (!out_.final_state || s_.state < 0) return;
        const View& v = out_.final_state;
        store_state(v, s_.state * v.stride[0] + hv_ * v.stride[1], v.stride[call_.state_row],
                    v.stride[call_.state_column]);
    }

  private:
    __device__ int rows(int c) const { return static_cast<int>(min(s_.count - Index(c) * C, Index(C))); }

    // --- states

    __device__ int own_column() const { return first_column_ + 16 * warp_ + lane_ / 4; }
    __device__ void store_state(const View& to, Index offset, Index row, Index column_step) {
        const View v = to;
        LaneState<K> state;
        for_each_in(state, [](float& x, float from) { x = from; });
        store_lane_state<K>(&v, offset, row, column_step, call_.key_size, call_.value_size, own_column(), lane_, state);
    }
    __device__ void store_saved(int c) {
        const View& v = out_.states;
        const Index token = Index(c) * C;
        if (token % sequences_.interval != 0) return;
        store_state(
            v,
            s_.batch * v.stride[0] + (s_.first_saved + token / sequences_.interval) * v.stride[1] + hv_ * v.stride[2],
            v.stride[call_.state_row + 1], v.stride[call_.state_column + 1]);
    }

    __device__ void keep_state(const Tiles& tiles, bool odd, Index kept) const {
        std::uint32_t state[K / 16][4];
        to_left<T>(state, state_);
        save_state<T, K>(out_.kept.states + kept * KeptChunks::state_bytes, own_column(), lane_, state);
        const int reason = tiles.factors->by_token;
        if (lane_ == 0 && (reason != 0 || odd)) out_.kept.by_token[kept] = reason | (odd ? 2 : 0);
    }
    __device__ void keep_values(const Tiles& tiles, const std::uint32_t (&u)[C / 16][4], Index kept) const {
        save_rows(tiles.values, warp_, lane_, u, first_column_, KeptChunks::size,
                  out_.kept.U + kept * KeptChunks::value_bytes);
    }

    // --- a chunk

    // Of a value, what the state does not hold yet. factor: e^E, or β of gates of channels.
    __device__ static float rest(float value, float factor, float held) {
        return channel ? factor * (value - held) : value - factor * held;
    }

    // x [16, 64] = left [16, 16·depths] rightᵀ, right [64, 16·depths]
    template <int depths, class Right>
    __device__ void multiply_transposed(const std::uint32_t (&left)[depths][4], const Right& right, bool triangular,
                                        float (&x)[C / 8][4]) const {
#pragma unroll
        for (int depth = 0; depth < depths; ++depth)
#pragma unroll
            for (int n = 0; n < C / 16; ++n) {
                if (triangular && n < depth) continue;  // a lower triangle: nothing before the diagonal's rows
                std::uint32_t b[4];
                right.load_right(b, 16 * n, depth, lane_);
                ptx::multiply(x[2 * n], left[depth], b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], left[depth], b[2], b[3], T());
            }
    }

    __device__ void take_chunk(int c, const Tiles& tiles, Index kept) {
        const ChunkFactors& f = *tiles.factors;
        const int pair = 2 * (lane_ % 4);
        std::uint32_t state[K / 16][4], u[C / 16][4];
        to_left<T>(state, state_);

        float x[C / 8][4] = {};
        if (erases) multiply_transposed(state, tiles.erase, false, x);
#pragma unroll
        for (int n = 0; n < C / 16; ++n) {
            std::uint32_t value[4];
            tiles.values.load_transposed_result(value, 16 * n, warp_, lane_);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                float(&to)[4] = x[2 * n + m / 2];
                const int token = 16 * n + 8 * (m / 2) + pair;
                const float2 both = ptx::unpack(value[m], T());
                to[2 * (m % 2)] = rest(both.x, f.erase[token], to[2 * (m % 2)]);
                to[2 * (m % 2) + 1] = rest(both.y, f.erase[token + 1], to[2 * (m % 2) + 1]);
            }
        }
        float U[C / 8][4] = {};
        if (erases) {
            to_left<T>(u, x);
            multiply_transposed(u, tiles.solve, true, U);
        } else {
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) U[n][i] = x[n][i];
        }
        if constexpr (keeps) {
            to_left<T>(u, U);
            keep_values(tiles, u, kept);
        }
        if (out_.o) {
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) x[n][i] = 0;
            multiply_transposed(state, tiles.read, false, x);
            if constexpr (!channel) {
#pragma unroll
                for (int n = 0; n < C / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) x[n][i] *= f.read[8 * n + pair + i % 2];
            }
            to_left<T>(u, U);
            multiply_transposed(u, tiles.score, true, x);
            store_outputs(c, tiles, x);
        }
        if constexpr (channel) {
#pragma unroll
            for (int n = 0; n < K / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) state_[n][i] *= tiles.last[8 * n + pair + i % 2];
        } else {
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) U[n][i] *= f.write[8 * n + pair + i % 2];
#pragma unroll
            for (int n = 0; n < K / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) state_[n][i] *= f.last;
        }
        to_left<T>(u, U);
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth)
#pragma unroll
            for (int n = 0; n < K / 16; ++n) {
                std::uint32_t b[4];
                tiles.write.load_right_mn_major(b, 16 * depth, n, lane_);
                ptx::multiply(state_[2 * n], u[depth], b[0], b[1], T());
                ptx::multiply(state_[2 * n + 1], u[depth], b[2], b[3], T());
            }
    }

    // The same, by a warpgroup whose products run in the background.
    __device__ void take_chunk_in_group(int c, const Tiles& tiles, Index kept) {
        const ChunkFactors& f = *tiles.factors;
        const int pair = 2 * (lane_ % 4);
        std::uint32_t state[K / 16][4], u[C / 16][4];
        float x[C / 8][4] = {};
        to_left<T>(state, state_);
        if constexpr (erases) {
            ptx::begin_products(state, x);
            multiply_rows(state, tiles.erase, x);
            ptx::commit_products();
            ptx::wait_for_products<0>(x);
        }
#pragma unroll
        for (int n = 0; n < C / 16; ++n) {
            std::uint32_t value[4];
            tiles.values.load_transposed_result(value, 16 * n, warp_, lane_);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                float(&to)[4] = x[2 * n + m / 2];
                const float* erase = f.erase + 16 * n + 8 * (m / 2) + pair;
                const float2 both = ptx::unpack(value[m], T());
                to[2 * (m % 2)] = rest(both.x, erase[0], to[2 * (m % 2)]);
                to[2 * (m % 2) + 1] = rest(both.y, erase[1], to[2 * (m % 2) + 1]);
            }
        }
        if constexpr (erases) {
            to_left<T>(u, x);
            clear(x);
            ptx::begin_products(u, x);
            multiply_rows(u, tiles.solve, x);
            ptx::commit_products();
            ptx::wait_for_products<0>(x);
        }
        std::uint32_t written[C / 16][4];
        to_left<T>(u, x);
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!channel) x[n][i] *= f.write[8 * n + pair + i % 2];
        to_left<T>(written, x);
        float o[C / 8][4] = {};
        ptx::begin_products(state, o, written);
        multiply_rows(state, tiles.read, o);
        ptx::commit_products();
        if constexpr (keeps) keep_values(tiles, u, kept);
#pragma unroll
        for (int n = 0; n < K / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) state_[n][i] *= channel ? tiles.last[8 * n + pair + i % 2] : f.last;
        ptx::wait_for_products<0>(o);
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!channel) o[n][i] *= f.read[8 * n + pair + i % 2];
        ptx::begin_products(u, o, written, state_);
        multiply_rows(u, tiles.score, o);
        ptx::commit_products();
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth)
            ptx::warpgroup_multiply_mn_major(state_, written[depth], tiles.write.mn_major_operand(depth), true, T());
        ptx::commit_products();
        ptx::wait_for_products<1>(o);
        if (out_.o) store_outputs(c, tiles, o);
        ptx::wait_for_products<0>(state_);
    }
    __device__ static void clear(float (&x)[C / 8][4]) {
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] = 0;
    }
    // x [64, 64] += left [64, 16·depths] rightᵀ
    template <int depths, class Right>
    __device__ void multiply_rows(const std::uint32_t (&left)[depths][4], const Right& right,
                                  float (&x)[C / 8][4]) const {
#pragma unroll
        for (int depth = 0; depth < depths; ++depth)
            ptx::warpgroup_multiply(x, left[depth], right.rows_operand(depth), true, T());
    }

    // oᵀ through the tile of values, whose columns of this warp_ nobody else reads, to whole rows of memory.
    __device__ void store_outputs(int c, const Tiles& tiles, const float (&x)[C / 8][4]) const {
        const View& o = out_.o;
        auto* data = static_cast<T*>(o.data) + s_.batch * o.stride[0] + hv_ * o.stride[2] + first_column_;
        store_transposed<T>(tiles.values, warp_, lane_, x, [&](int row, int u, const uint4& eight) {
            if (row < rows(c) && first_column_ + 8 * u < call_.value_size)
                *reinterpret_cast<uint4*>(data + (s_.begin + Index(c) * C + row) * o.stride[1] + 8 * u) = eight;
        });
    }

    // Inf or NaN in the values of the warp, or warpgroup: they stay in their row when it goes token by token. So does a
    // state near the largest number of f16, 65504: the products read it, and what it makes of keys, as f16.
    __device__ bool is_odd(const Tiles& tiles) const {
        bool odd = has_nonfinite_values<T>(tiles.values, warp_, lane_);
        if constexpr (std::is_same_v<T, __half>) {
            constexpr float largest_state = 4096;
#pragma unroll
            for (int n = 0; n < K / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) odd = odd || !(fabsf(state_[n][i]) <= largest_state);
        }
        return grouped ? ptx::any(group_barrier + warp_ / 4, 128, odd) : __any_sync(0xffffffffu, odd);
    }

    __device__ void take_chunk_by_token(int c) {
        WideState<K> wide;
        for_each_in(wide, [](double& to, float& x) { to = static_cast<double>(x); });
        const View o = out_.o;
        take_tokens<K>(&call_, s_, hv_, Index(c) * C, rows(c), own_column(), lane_, &o, wide);
        for_each_in(wide, [](double& from, float& x) { x = static_cast<float>(from); });
    }
    template <class Number, class Visit>
    __device__ void for_each_in(Number (&wide)[K / 8][4], Visit&& visit) {
#pragma unroll
        for (int n = 0; n < K / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) visit(wide[n][i], state_[n][i]);
    }

    const DeltaCall& call_;
    const DeltaSequences& sequences_;
    const DeltaSequence& s_;
    const ChunkOutputs& out_;
    const int hv_, first_column_, warp_, lane_;
    float state_[K / 8][4];
};

}  // namespace softdelta::cuda
