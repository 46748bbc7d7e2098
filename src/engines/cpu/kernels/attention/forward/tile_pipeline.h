// Products of matrix tiles between other work. No vector instruction waits for the tile unit as long as few products
// stand between them. So a panel of 32 rows and some keys goes through three stages, of which each works on another
// panel at a time:
//
//     scores of panel t + 1   | a product or two after each
//     exponentials of panel t | step of the caller
//     sums of an older part   |
//
// Long rows loop over columns, which keeps the code short; short ones would lose 2 % by that.
#pragma once

#include "engines/cpu/kernels/gemm/tile_products.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// chunks: how many 16 pairs a row of queries has; columns: how many 16 columns of o a panel adds to. Beside long rows
// a panel has fewer keys, so that two threads of a core find all of theirs in its first-level cache.
template <class Tiles, int chunks, int columns>
struct TilePanel {
    static constexpr int key_tiles = chunks < 4 ? 4 : 2, part_steps = 4, steps = 32;  // a part: 128 keys
    using Word = std::uint32_t;

    const Word *q, *keys;    // [chunks, 2 tiles], [key_tiles, chunks]
    float* scores;           // [key_tiles, 2 tiles]
    const Word *p, *values;  // [part_steps, 2 tiles], [columns, part_steps]
    float* o;                // [columns, 2 tiles]

    // All products; step(i), i < steps, is called between.
    template <class Step>
    SOFTDELTA_INLINE void run(Step&& step) const {
        const auto score = [&](Index n) __attribute__((always_inline)) {
            multiply_between<Tiles, chunks, score_steps>(q, keys + n * chunks * tile_words, scores + n * 2 * tile_words,
                                                         n * score_steps, step);
        };
        const auto sum = [&](Index n) __attribute__((always_inline)) {
            multiply_between<Tiles, part_steps, sum_steps, true>(p, values + n * part_steps * tile_words,
                                                                 o + n * 2 * tile_words,
                                                                 key_tiles * score_steps + n * sum_steps, step);
        };
        if constexpr (columns <= 4) {
            score(0), score(1);
            if constexpr (key_tiles > 2) score(2), score(3);
            sum(0), sum(1);
            if constexpr (columns > 2) sum(2);
            if constexpr (columns > 3) sum(3);
        } else {
#pragma GCC unroll 1
            for (Index n = 0; n < key_tiles; ++n) score(n);
#pragma GCC unroll 1
            for (Index n = 0; n < columns; ++n) sum(n);
        }
    }

  private:
    // Steps beside a column, so that about as many products stand between any two.
    static constexpr int choose_sum_steps() {
        int n = steps * part_steps / (key_tiles * chunks + columns * part_steps);
        while ((steps - columns * n) % key_tiles != 0) --n;
        return n;
    }
    static constexpr int sum_steps = choose_sum_steps(), score_steps = (steps - columns * sum_steps) / key_tiles;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
