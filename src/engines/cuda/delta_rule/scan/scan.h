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
// Gates that all channels share multiply the products of plain q, k and p, with the factors of the l2 norm. Gates of
// channels are in the keys of the record.
#pragma once

#include "engines/cuda/delta_rule/scan/state.h"

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

// What a kernel does when a chunk's q and solve were read, and its values and scores.
struct NoSteps {
    __device__ void have_read() const {}
    __device__ void have_outputs() const {}
};

// keeps: S before each chunk and U go to out.kept.
template <class T, int K, int slab, bool channel, bool erases, bool keeps>
struct ChunkScan {
    static constexpr int C = chunk_rows;
    using Tiles = ChunkTiles<T, K, slab>;

    ScanState<T, K> my;

    // kept: where this chunk's lie in out.kept.
    template <class Steps = NoSteps>
    __device__ void take(int c, const Tiles& tiles, const Steps& steps = {}, Index kept = 0) {
        if (my.out.states) my.store_saved(c);
        const bool nonfinite = is_nonfinite(tiles);
        if constexpr (keeps) my.keep_state(tiles.factors->by_token, nonfinite, kept);
        if (tiles.factors->by_token != 0 || nonfinite) {
            my.take_chunk_by_token(c);
            steps.have_read();
            steps.have_outputs();
        } else {
            take_chunk(c, tiles, steps, kept);
        }
    }

    template <class Steps>
    __device__ void take_chunk(int c, const Tiles& tiles, const Steps& steps, Index kept) {
        constexpr bool reads_first = sizeof(T) == 4;  // so that the next q comes early
        const ChunkFactors& f = *tiles.factors;
        const int pair = 2 * (my.lane % 4);
        std::uint32_t state[K / 16][operand_words<T>], u[C / 16][operand_words<T>], written[C / 16][operand_words<T>];
        float x[C / 8][4] = {}, o[C / 8][4] = {};
        to_left<T>(state, my.state);
        if (reads_first && my.out.o) add_transposed<T>(o, state, tiles.read, false, my.lane);
        if constexpr (erases) add_transposed<T>(x, state, tiles.erase, false, my.lane);
        unrolled<C / 16>([&](int n) {
            Operand<T> value;
            tiles.values.load_transposed_result(value, 16 * n, 16 * my.warp, my.lane);
            unrolled<4>([&](int m) {
                float(&to)[4] = x[2 * n + m / 2];
                const float* erase = f.erase + 16 * n + 8 * (m / 2) + pair;
                const float2 both = pair_of<T>(value, m);
                to[2 * (m % 2)] = rest<channel>(both.x, erase[0], to[2 * (m % 2)]);
                to[2 * (m % 2) + 1] = rest<channel>(both.y, erase[1], to[2 * (m % 2) + 1]);
            });
        });
        if constexpr (erases) {
            to_left<T>(u, x);
            clear(x);
            add_transposed<T>(x, u, tiles.solve, true, my.lane);
        }
        to_left<T>(u, x);
        if constexpr (keeps && sizeof(T) == 4) my.keep_values(tiles.values, x, kept);
        unrolled<C / 8, 4>([&](int n, int i) {
            if (!channel) x[n][i] *= f.write[8 * n + pair + i % 2];
        });
        to_left<T>(written, x);
        if (!reads_first && my.out.o) add_transposed<T>(o, state, tiles.read, false, my.lane);
        steps.have_read();
        if constexpr (keeps && sizeof(T) == 2) my.keep_values(tiles.values, u, kept);
        unrolled<K / 8, 4>(
            [&](int n, int i) { my.state[n][i] *= channel ? tiles.last[8 * n + pair + i % 2] : f.last; });
        unrolled<C / 8, 4>([&](int n, int i) {
            if (!channel) o[n][i] *= f.read[8 * n + pair + i % 2];
        });
        if (my.out.o) {
            add_transposed<T>(o, u, tiles.score, true, my.lane);
            store_outputs(c, tiles, o);
        }
        steps.have_outputs();
        add_columns<T>(my.state, written, tiles.write, false, my.lane);
    }

    // oᵀ through the tile of values, whose columns of this warp nobody else reads, to whole rows of memory.
    __device__ void store_outputs(int c, const Tiles& tiles, const float (&x)[C / 8][4]) const {
        store_transposed<T>(tiles.values, my.warp, my.lane, x,
                            RowsToTensor<T>(my.out.o, my.s, c, my.hv, my.first_column, my.call.value_size));
    }

    // Inf or NaN in the values of the warp: they stay in their row when it goes token by token.
    __device__ bool is_nonfinite(const Tiles& tiles) const {
        const bool nonfinite = has_nonfinite_values<T>(tiles.values, my.warp, my.lane) || my.is_too_large();
        return __any_sync(0xffffffffu, nonfinite);
    }
};

}  // namespace softdelta::cuda
