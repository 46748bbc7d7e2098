// Products of 32 rows and 32 columns by matrix tiles, whose operands are packed as whole tiles: 16 rows of 16 words,
// one after the other. Two tiles of A, one above the other, and two of B, side by side, make a step of the depth.
#pragma once

#include "engines/cpu/kernels/gemm/pairs.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr Index tile_words = tile_size * tile_size;
inline constexpr Index square = 2 * tile_size;  // rows and columns of such a product, and numbers along a step

struct SquareProduct {
    const std::uint32_t* a;
    Index a_step;  // words from one step to the next
    const std::uint32_t* b;
    Index b_step;
    Index depth;  // steps
    float* c;
    Index c_row;
    bool add;  // to C
};

template <class Tiles>
SOFTDELTA_INLINE void begin_square(const SquareProduct& x) {
    if (x.add) {
        float* lower = x.c + tile_size * x.c_row;
        Tiles::template read<0>(x.c, x.c_row);
        Tiles::template read<1>(x.c + W, x.c_row);
        Tiles::template read<2>(lower, x.c_row);
        Tiles::template read<3>(lower + W, x.c_row);
    } else {
        Tiles::template clear<0>();
        Tiles::template clear<1>();
        Tiles::template clear<2>();
        Tiles::template clear<3>();
    }
}

template <class Tiles>
SOFTDELTA_INLINE void step_square(const std::uint32_t* a, const std::uint32_t* b) {
    Tiles::template read<4>(a, tile_size);
    Tiles::template read<6>(b, tile_size);
    Tiles::template multiply_add<0, 4, 6>();
    Tiles::template read<7>(b + tile_words, tile_size);
    Tiles::template multiply_add<1, 4, 7>();
    Tiles::template read<5>(a + tile_words, tile_size);
    Tiles::template multiply_add<2, 5, 6>();
    Tiles::template multiply_add<3, 5, 7>();
}

template <class Tiles>
SOFTDELTA_INLINE void end_square(const SquareProduct& x) {
    float* lower = x.c + tile_size * x.c_row;
    Tiles::template write<0>(x.c, x.c_row);
    Tiles::template write<1>(x.c + W, x.c_row);
    Tiles::template write<2>(lower, x.c_row);
    Tiles::template write<3>(lower + W, x.c_row);
}

template <class Tiles>
[[gnu::noinline]] void multiply_square(const SquareProduct& x) {
    begin_square<Tiles>(x);
    const std::uint32_t *a = x.a, *b = x.b;
    for (Index k = 0; k < x.depth; ++k, a += x.a_step, b += x.b_step) step_square<Tiles>(a, b);
    end_square<Tiles>(x);
}

// C of 32 rows and 16 columns, two tiles one above the other: of A [depth, 2 tiles] and B [depth tiles]. Four live
// tiles leave more of the processor's own for reading ahead, which makes a product faster than with eight
// (softdelta bench --loops).
template <class Tiles>
SOFTDELTA_INLINE void multiply_column(const std::uint32_t* a, const std::uint32_t* b, Index depth, float* c, bool add) {
    if (add) {
        Tiles::template read_whole<0, 0>(c);
        Tiles::template read_whole<1, 1>(c);
    } else {
        Tiles::template clear<0>();
        Tiles::template clear<1>();
    }
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

// `columns` such products, side by side; B's of one lie b_step words apart.
template <class Tiles>
[[gnu::noinline]] void multiply_columns(const std::uint32_t* a, const std::uint32_t* b, Index b_step, Index depth,
                                        float* c, Index columns, bool add) {
    for (Index n = 0; n < columns; ++n) multiply_column<Tiles>(a, b + n * b_step, depth, c + n * 2 * tile_words, add);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
