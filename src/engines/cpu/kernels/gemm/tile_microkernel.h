// A register tile of products of pairs by matrix tiles: up to MR rows of C, and a panel of B.
#pragma once

#include "engines/cpu/kernels/gemm/pairs.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Rows of A, or of C, that fill no tile are copied to one that is filled up with zeros.
struct TileCopy {
    alignas(64) std::uint32_t left[MR * tile_pairs];
    alignas(64) std::uint32_t right[tile_pairs * NR];
    alignas(64) float sums[MR * NR];
};

// A[rows, pairs], which lies row by row, or column by column (a_row is 1).
SOFTDELTA_INLINE void copy_left(const std::uint32_t* a, Index a_row, Index a_step, Index rows, Index pairs,
                                std::uint32_t* out) {
    if (a_step == 1) {
        for (Index m = 0; m < MR; ++m)
            store(out + m * tile_pairs, m < rows ? load_partial(a + m * a_row, pairs) : U(0));
        return;
    }
    U block[W];
    for (Index k = 0; k < W; ++k) block[k] = k < pairs ? load_partial(a + k * a_step, rows) : U(0);
    transpose(block);
    for (Index m = 0; m < MR; ++m) store(out + m * tile_pairs, block[m]);
}

// C[m][n] (+)= Σ_k A[m][k]·B[k][n] with k over `depth` pairs, on top of the sums in tiles 0 and 1.
template <class Tiles, int vectors>
SOFTDELTA_INLINE void add_matrix_products(const std::uint32_t* a, Index a_row, Index a_step, Index rows,
                                          const std::uint32_t* b, Index depth, TileCopy& copy) {
    for (Index k = 0; k < depth; k += tile_pairs, a += tile_pairs * a_step, b += tile_pairs * vectors * W) {
        const Index pairs = depth - k < tile_pairs ? depth - k : tile_pairs;
        const std::uint32_t* right = b;
        if (pairs < tile_pairs) {
            for (Index i = 0; i < tile_pairs * vectors; ++i)
                store(copy.right + i * W, i < pairs * vectors ? load(b + i * W) : U(0));
            right = copy.right;
        }
        if (rows < MR || pairs < tile_pairs || a_step != 1) {
            copy_left(a, a_row, a_step, rows, pairs, copy.left);
            Tiles::template read<2>(copy.left, tile_pairs);
        } else {
            Tiles::template read<2>(a, a_row);
        }
        Tiles::template read<3>(right, vectors * W);
        Tiles::template multiply_add<0, 2, 3>();
        if constexpr (vectors == 2) {
            Tiles::template read<4>(right + W, vectors * W);
            Tiles::template multiply_add<1, 2, 4>();
        }
    }
}

// C of `rows` rows and `vectors` vectors. Sums begin at factor[m·factor_step]·C, or at 0 when there is no factor.
template <class Tiles, int vectors>
[[gnu::noinline]] void matrix_tile(const std::uint32_t* a, Index a_row, Index a_step, Index rows,
                                   const std::uint32_t* b, Index depth, float* c, Index c_row, const float* factor,
                                   Index factor_step) {
    TileCopy copy;
    const bool whole = rows == MR;
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
    add_matrix_products<Tiles, vectors>(a, a_row, a_step, rows, b, depth, copy);
    Tiles::template write<0>(sums, row);
    if constexpr (vectors == 2) Tiles::template write<1>(sums + W, row);
    if (!whole)
        for (Index m = 0; m < rows; ++m)
            for (Index n = 0; n < vectors; ++n) store(c + m * c_row + n * W, load(sums + m * row + n * W));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
