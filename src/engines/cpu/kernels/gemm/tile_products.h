// Products by matrix tiles whose operands and sums are packed as whole tiles: 16 rows of 16 words, one after the other.
#pragma once

#include <utility>

#include "engines/cpu/kernels/gemm/pairs.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr Index tile_words = tile_size * tile_size;
inline constexpr Index square = 2 * tile_size;  // rows and columns of such a product, and numbers along a step

template <class Tiles>
SOFTDELTA_INLINE void begin_sums(const float* c, bool add) {
    if (add) {
        Tiles::template read_whole<0, 0>(c);
        Tiles::template read_whole<1, 1>(c);
    } else {
        Tiles::template clear<0>();
        Tiles::template clear<1>();
    }
}

// C of 32 rows and 16 columns, two tiles one above the other: of A [depth, 2 tiles] and B [depth tiles]. Four live
// tiles leave more of the processor's own for reading ahead, which makes a product faster than with eight
// (softdelta bench --loops).
template <class Tiles>
SOFTDELTA_INLINE void multiply_column(const std::uint32_t* a, const std::uint32_t* b, Index depth, float* c, bool add) {
    begin_sums<Tiles>(c, add);
    for (Index k = 0; k < depth; ++k, a += 2 * tile_words, b += tile_words) {
        Tiles::template read_whole<3, 0>(b);
        Tiles::template read_whole<2, 0>(a);
        Tiles::template multiply_add<0, 2, 3>();
        Tiles::template read_whole<2, 1>(a);
        Tiles::template multiply_add<1, 2, 3>();
    }
    Tiles::template write_whole<0, 0>(c);
    Tiles::template write_whole<1, 1>(c);
}

// The same between `steps` other steps: step(first), step(first + 1), … Products and vectors then compute at a time.
template <class Tiles, int depth, int steps, bool add = false, class Step>
SOFTDELTA_INLINE void multiply_between(const std::uint32_t* a, const std::uint32_t* b, float* c, Index first,
                                       Step& step) {
    begin_sums<Tiles>(c, add);
    const auto product = [&]<int w>(std::integral_constant<int, w> /*w*/) __attribute__((always_inline)) {
        constexpr int k = w / 2, half = w % 2;
        if constexpr (half == 0) Tiles::template read_whole<3, k>(b);
        Tiles::template read_whole<2, w>(a);
        Tiles::template multiply_add<half, 2, 3>();
        if constexpr (k == depth - 1) Tiles::template write_whole<half, half>(c);
    };
    const auto some = [&]<int begin, int... i>(std::integral_constant<int, begin> /*begin*/,
                                               std::integer_sequence<int, i...> /*i*/) __attribute__((always_inline)) {
        (product(std::integral_constant<int, begin + i>{}), ...);
    };
    const auto each = [&]<int... s>(std::integer_sequence<int, s...> /*s*/) __attribute__((always_inline)) {
        ((step(first + s), some(std::integral_constant<int, 2 * depth * s / steps>{},
                                std::make_integer_sequence<int, 2 * depth*(s + 1) / steps - 2 * depth * s / steps>{})),
         ...);
    };
    each(std::make_integer_sequence<int, steps>{});
}

// C of 16 rows and 32 columns, two tiles side by side: of A [depth tiles] and B [depth, 2 tiles].
template <class Tiles>
[[gnu::noinline]] void multiply_row(const std::uint32_t* a, const std::uint32_t* b, Index depth, float* c, bool add) {
    begin_sums<Tiles>(c, add);
    for (Index k = 0; k < depth; ++k, a += tile_words, b += 2 * tile_words) {
        Tiles::template read_whole<2, 0>(a);
        Tiles::template read_whole<3, 0>(b);
        Tiles::template multiply_add<0, 2, 3>();
        Tiles::template read_whole<3, 1>(b);
        Tiles::template multiply_add<1, 2, 3>();
    }
    Tiles::template write_whole<0, 0>(c);
    Tiles::template write_whole<1, 1>(c);
}

// `columns` such products, side by side; B's of one lie b_step words apart.
template <class Tiles>
[[gnu::noinline]] void multiply_columns(const std::uint32_t* a, const std::uint32_t* b, Index b_step, Index depth,
                                        float* c, Index columns, bool add) {
    for (Index n = 0; n < columns; ++n) multiply_column<Tiles>(a, b + n * b_step, depth, c + n * 2 * tile_words, add);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
