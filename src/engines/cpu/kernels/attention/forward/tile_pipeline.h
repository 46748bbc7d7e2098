// Products of matrix tiles between other work. No vector instruction waits for the tile unit as long as few products
// stand between them. So a panel of 32 rows and 64 keys goes through three stages, of which each works on another panel
// at a time:
//
//     scores of panel t + 1   | a product or two after each
//     exponentials of panel t | step of the caller
//     sums of an older part   |
//
// Tiles 0 and 1 hold sums, 2 is read of A and 3 of B: see multiply_column().
#pragma once

#include <utility>

#include "engines/cpu/kernels/gemm/tile_products.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// chunks: how many 16 pairs a row of queries has; columns: how many 16 columns of o a panel adds to.
template <class Tiles, int chunks, int columns>
struct TilePanel {
    static constexpr int key_tiles = 4, part_steps = 4, steps = 32;  // a part: 128 keys
    using Word = std::uint32_t;

    const Word *q, *keys;    // [chunks, 2 tiles], [key_tiles, chunks]
    float* scores;           // [key_tiles, 2 tiles]
    const Word *p, *values;  // [part_steps, 2 tiles], [columns, part_steps]
    float* o;                // [columns, 2 tiles]

    // All products; step(i), i < steps, is called between.
    template <class Step>
    SOFTDELTA_INLINE void run(Step&& step) const {
        each(std::make_integer_sequence<int, steps>{}, step);
    }

  private:
    static constexpr int score_products = key_tiles * chunks * 2, products = score_products + columns * part_steps * 2;

    template <int... i, class Step>
    SOFTDELTA_INLINE void each(std::integer_sequence<int, i...> /*steps*/, Step& step) const {
        (one_step<i>(step), ...);
    }
    template <int i, class Step>
    SOFTDELTA_INLINE void one_step(Step& step) const {
        step(Index{i});
        constexpr int begin = products * i / steps, end = products * (i + 1) / steps;
        some<begin>(std::make_integer_sequence<int, end - begin>{});
    }
    template <int begin, int... i>
    SOFTDELTA_INLINE void some(std::integer_sequence<int, i...> /*products*/) const {
        (product<begin + i>(), ...);
    }
    template <int w>
    SOFTDELTA_INLINE void product() const {
        if constexpr (w < score_products)
            column<w / 2 / chunks, w / 2 % chunks, chunks, w % 2, false>(q, keys, scores);
        else
            column<(w - score_products) / 2 / part_steps, w / 2 % part_steps, part_steps, w % 2, true>(p, values, o);
    }

    // Product k of `depth` for the upper (half = 0) or lower tile of column n.
    template <int n, int k, int depth, int half, bool add>
    SOFTDELTA_INLINE static void column(const Word* a, const Word* b, float* c) {
        if constexpr (k == 0 && half == 0) {
            if constexpr (add) {
                Tiles::template read_whole<0, 2 * n>(c);
                Tiles::template read_whole<1, 2 * n + 1>(c);
            } else {
                Tiles::template clear<0>();
                Tiles::template clear<1>();
            }
        }
        if constexpr (half == 0) Tiles::template read_whole<3, n * depth + k>(b);
        Tiles::template read_whole<2, 2 * k + half>(a);
        Tiles::template multiply_add<half, 2, 3>();
        if constexpr (k == depth - 1) Tiles::template write_whole<half, 2 * n + half>(c);
    }
    static_assert(score_products / 2 % part_steps == 0);
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
