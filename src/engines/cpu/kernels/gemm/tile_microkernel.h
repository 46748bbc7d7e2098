// The microkernel of bf16 pairs by matrix tiles: up to MR rows of C and a micropanel of B.
#pragma once

#include "engines/cpu/kernels/gemm/pairs.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Where A, B or C does not fill a tile it is copied here, with zeros in the rest.
struct TileCopy {
    alignas(64) std::uint32_t a[MR * tile_pairs];
    alignas(64) std::uint32_t b[tile_pairs * NR];
    alignas(64) float sums[MR * NR];
};

// A[rows, pairs], which lies row by row, or column by column (a_row is 1).
SOFTDELTA_INLINE void copy_a(const std::uint32_t* a, Index a_row, Index a_step, Index rows, Index pairs,
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
SOFTDELTA_INLINE void accumulate_tiles(const std::uint32_t* a, Index a_row, Index a_step, Index rows,
                                       const std::uint32_t* b, Index depth, TileCopy& copy) {
    for (Index k = 0; k < depth; k += tile_pairs, a += tile_pairs * a_step, b += tile_pairs * vectors * W) {
        const Index pairs = depth - k < tile_pairs ? depth - k : tile_pairs;
        const std::uint32_t* b_tile = b;
        if (pairs < tile_pairs) {
            for (Index i = 0; i < tile_pairs * vectors; ++i)
                store(copy.b + i * W, i < pairs * vectors ? load(b + i * W) : U(0));
            b_tile = copy.b;
        }
        if (rows < MR || pairs < tile_pairs || a_step != 1) {
            copy_a(a, a_row, a_step, rows, pairs, copy.a);
            Tiles::template read<2>(copy.a, tile_pairs);
        } else {
            Tiles::template read<2>(a, a_row);
        }
        Tiles::template read<3>(b_tile, vectors * W);
        Tiles::template multiply_add<0, 2, 3>();
        if constexpr (vectors == 2) {
            Tiles::template read<4>(b_tile + W, vectors * W);
            Tiles::template multiply_add<1, 2, 4>();
        }
    }
}

// C of `rows` rows and `vectors` vectors. Sums begin at factor[m·factor_step]·C, or at 0 when there is no factor.
template <class Tiles, int vectors>
[[gnu::noinline]] void tile_microkernel(const std::uint32_t* a, Index a_row, Index a_step, Index rows,
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
    accumulate_tiles<Tiles, vectors>(a, a_row, a_step, rows, b, depth, copy);
    Tiles::template write<0>(sums, row);
    if constexpr (vectors == 2) Tiles::template write<1>(sums + W, row);
    if (!whole)
        for (Index m = 0; m < rows; ++m)
            for (Index n = 0; n < vectors; ++n) store(c + m * c_row + n * W, load(sums + m * row + n * W));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
