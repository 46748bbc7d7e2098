// The microkernel of bf16 pairs by matrix tiles: up to 16 rows of C and a micropanel of B. Tiles 0 and 1 hold the sums,
// 2 the rows of A, 3 the columns of B, first one half and then the other:
//
//                       B: 16 pairs of 16 columns   16 columns
//     A: 16 rows        sums 0                      sums 1
//
// With four sums, of two tiles of A and two of B, each product reads fewer tiles. Yet it takes twice as long where both
// threads of a core multiply: the more of the eight tiles are in use, the fewer are left to read ahead.
#pragma once

#include "engines/cpu/kernels/gemm/pairs.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Where A, B or C does not fill its tiles it is copied here, with zeros in the rest of A and B.
struct TileCopy {
    alignas(64) std::uint32_t a[tile_size * tile_size];
    alignas(64) std::uint32_t b[tile_size * NR];
    alignas(64) float sums[tile_size * NR];
};

// A[rows, pairs], at most 16 each, with zeros in the rest of a tile. It lies row by row, or column by column (a_row is
// 1).
SOFTDELTA_INLINE void copy_a(const std::uint32_t* a, Index a_row, Index a_step, Index rows, Index pairs,
                             std::uint32_t* out, Index out_row = tile_size) {
    U block[W];
    for (Index i = 0; i < W; ++i) {
        if (a_step == 1)
            block[i] = i < rows ? load_partial(a + i * a_row, pairs) : U(0);
        else
            block[i] = i < pairs ? load_partial(a + i * a_step, rows) : U(0);
    }
    if (a_step != 1) transpose(block);
    for (Index i = 0; i < W; ++i) store(out + i * out_row, block[i]);
}

// On top of the sums in tiles 0 and 1: C[m][n] += Σ_k A[m][k]·B[k][n] with k over `depth` pairs. Of A `rows` rows may
// be read. `between` is called after each 16 pairs: what it does runs beside the products.
template <class Tiles, int vectors, class Between>
SOFTDELTA_INLINE void accumulate_tiles(const std::uint32_t* a, Index a_row, Index a_step, Index rows,
                                       const std::uint32_t* b, Index depth, TileCopy& copy, Between&& between) {
    for (Index k = 0; k < depth; k += tile_size, a += tile_size * a_step, b += tile_size * vectors * W) {
        const Index pairs = min(depth - k, tile_size);
        const std::uint32_t* b_tile = b;
        if (pairs < tile_size) {
            for (Index i = 0; i < tile_size * vectors; ++i)
                store(copy.b + i * W, i < pairs * vectors ? load(b + i * W) : U(0));
            b_tile = copy.b;
        }
        if (a_step != 1 || rows < tile_size || pairs < tile_size) {
            copy_a(a, a_row, a_step, rows, pairs, copy.a);
            Tiles::template read<2>(copy.a, tile_size);
        } else {
            Tiles::template read<2>(a, a_row);
        }
        Tiles::template read<3>(b_tile, vectors * W);
        Tiles::template multiply_add<0, 2, 3>();
        if constexpr (vectors == 2) {
            Tiles::template read<3>(b_tile + W, vectors * W);
            Tiles::template multiply_add<1, 2, 3>();
        }
        between();
    }
}

// C of `rows` rows and `vectors` vectors. Sums begin at factor[m·factor_step]·C, or at 0 when there is no factor; at C
// where factor_step is 0 and the factor 1. Of A a_rows rows may be read: `rows`, or all of a tile.
template <class Tiles, int vectors, class Between>
SOFTDELTA_INLINE void tile_block(const std::uint32_t* a, Index a_row, Index a_step, Index a_rows,
                                 const std::uint32_t* b, Index depth, float* c, Index c_row, Index rows,
                                 const float* factor, Index factor_step, Between&& between) {
    TileCopy copy;
    const bool whole = rows == tile_size;
    float* sums = whole ? c : copy.sums;
    const Index row = whole ? c_row : vectors * W;
    if (factor == nullptr) {
        Tiles::template clear<0>();
        Tiles::template clear<1>();
    } else {
        if (!whole || factor_step != 0)
            for (Index m = 0; m < rows; ++m) {
                const F scale = splat(factor[m * factor_step]);
                for (Index n = 0; n < vectors; ++n) store(sums + m * row + n * W, scale * load(c + m * c_row + n * W));
            }
        Tiles::template read<0>(sums, row);
        if constexpr (vectors == 2) Tiles::template read<1>(sums + W, row);
    }
    accumulate_tiles<Tiles, vectors>(a, a_row, a_step, a_rows, b, depth, copy, between);
    Tiles::template write<0>(sums, row);
    if constexpr (vectors == 2) Tiles::template write<1>(sums + W, row);
    if (!whole)
        for (Index m = 0; m < rows; ++m)
            for (Index n = 0; n < vectors; ++n) store(c + m * c_row + n * W, load(sums + m * row + n * W));
}

template <class Tiles, int vectors>
[[gnu::noinline]] void tile_microkernel(const std::uint32_t* a, Index a_row, Index a_step, Index a_rows,
                                        const std::uint32_t* b, Index depth, float* c, Index c_row, Index rows,
                                        const float* factor, Index factor_step) {
    tile_block<Tiles, vectors>(a, a_row, a_step, a_rows, b, depth, c, c_row, rows, factor, factor_step, [] {});
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
