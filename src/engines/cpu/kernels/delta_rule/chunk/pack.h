// Rows of floats made into the operands of products: A, a row at a time or transposed, and B in panels. Floats are read
// where they lie; for pairs of bf16 they are rounded to a copy.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/operands.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// A vector of each of two neighbours along the depth.
SOFTDELTA_INLINE void store_neighbours(float* p, F first, F /*second*/, FloatProduct /*of*/) {
    store(p, first);
}
SOFTDELTA_INLINE void store_neighbours(std::uint32_t* p, F first, F second, PairProduct /*of*/) {
    store(p, bf16_pairs(first, second));
}

// Rounded copies of rows [n, width] for products of pairs.
inline void round_to_pairs(Index n, Index width, const float* rows, std::uint32_t* out) {
    for (Index i = 0; i < n; i += 2)
        for (Index m = 0; m < width; m += W) {
            const float* row = rows + i * width + m;
            store(out + i / 2 * width + m, bf16_pairs(load(row), i + 1 < n ? load(row + width) : splat(0.0F)));
        }
}

// Rows [n, K] as A.
template <class P>
const Element<P>* as_a(const float* x, Index n, Index row, Element<P>* out) {
    if constexpr (P::depth == 1) {
        return x;
    } else {
        for (Index i = 0; i < n * row; i += W) store_a(out + i / P::depth, load(x + i), P{});
        return out;
    }
}

// Panels of floats, `depth` rows, as B.
inline const float* as_b(Index /*depth*/, Index /*columns*/, const float* panels, float* /*out*/) {
    return panels;
}
inline const std::uint32_t* as_b(Index depth, Index columns, const float* panels, std::uint32_t* out) {
    for (Index c = 0; c < columns; c += NR)
        round_to_pairs(depth, columns - c < NR ? W : NR, panels + c * depth, out + c * depth_of<PairProduct>(depth));
    return out;
}

// Rows [n, columns] as B: depth runs over rows.
template <class P>
void pack_rows_as_b(Index n, Index columns, const float* x, Index row, Element<P>* out) {
    for (Index c = 0; c < columns; c += NR) {
        const Index width = columns - c < NR ? W : NR;
        Element<P>* to = out + c * depth_of<P>(n);
        for (Index i = 0; i < n; i += P::depth)
            for (Index m = 0; m < width; m += W) {
                const float* from = x + i * row + c + m;
                store_neighbours(to + i / P::depth * width + m, load(from), i + 1 < n ? load(from + row) : splat(0.0F),
                                 P{});
            }
    }
}

// A matrix [n, n] of pairs of tokens (i, j) as A: as it is, depth along j; or its transpose, depth along i.
inline MatrixA<FloatProduct> pairs_as_a(Index /*n*/, const float* x, Index row, float* /*out*/) {
    return {x, row, 1};
}
inline MatrixA<FloatProduct> transposed_pairs_as_a(Index /*n*/, const float* x, Index row, float* /*out*/) {
    return {x, 1, row};
}
inline MatrixA<PairProduct> pairs_as_a(Index n, const float* x, Index row, std::uint32_t* out) {
    for (Index i = 0; i < n; ++i)
        for (Index j = 0; j < round_up(n, W); j += W)
            store_a(out + (i * row + j) / 2, load(x + i * row + j), PairProduct{});
    return {out, row / 2, 1};
}
inline MatrixA<PairProduct> transposed_pairs_as_a(Index n, const float* x, Index row, std::uint32_t* out) {
    round_to_pairs(n, row, x, out);
    return {out, 1, row};
}

// Rows of B, from the panel that begins at column c, as A.
inline void copy_rows_as_a(Index n, Index c, Index width, const float* rows, Index out_row, float* out) {
    for (Index i = 0; i < n; ++i)
        for (Index m = 0; m < width; m += W) store(out + i * out_row + c + m, load(rows + i * width + m));
}
inline void copy_rows_as_a(Index n, Index c, Index width, const std::uint32_t* pairs, Index out_row,
                           std::uint32_t* out) {
    for (Index i = 0; i < n; ++i)
        for (Index m = 0; m < width; m += W) {
            const U words = load(pairs + i / 2 * width + m);
            store_u16(reinterpret_cast<std::uint16_t*>(out + i * out_row) + c + m, i % 2 == 0 ? words : words >> 16);
        }
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
