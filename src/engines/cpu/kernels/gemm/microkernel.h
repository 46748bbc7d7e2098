// The microkernel: a register tile of up to MR rows and NR_vectors vectors of C. For every k it loads a row of a
// micropanel of B and broadcasts an element of each row of A:
//
//               B[k][0 … NR)      one load for each vector
//     A[0][k] ─ C[0][0 … NR) += A[0][k]·B[k][0 … NR)
//     A[1][k] ─ C[1][0 … NR) += A[1][k]·B[k][0 … NR)
//        …
#pragma once

#include <array>
#include <utility>

#include "engines/cpu/kernels/gemm/tile_microkernel.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// sums += A·B by matrix tiles. Of A `readable` rows may be read.
template <class P, int rows, int vectors>
SOFTDELTA_INLINE void accumulate_by_tiles(F (&sums)[rows][vectors], MatrixA<P> a, Index readable, const Element<P>* b,
                                          Index depth) {
    alignas(64) float c[tile_size * vectors * W];  // nothing is known of rows that sums does not have
    for (int m = 0; m < rows; ++m)
        for (int n = 0; n < vectors; ++n) store(c + (m * vectors + n) * W, sums[m][n]);
    const float one = 1.0F;
    tile_microkernel<typename P::Tiles, vectors>(a.data, a.row, a.step, readable, b, depth, c, vectors * W, tile_size,
                                                 &one, 0);
    for (int m = 0; m < rows; ++m)
        for (int n = 0; n < vectors; ++n) sums[m][n] = load(c + (m * vectors + n) * W);
}

// body(0) … body(W − 1), of constants.
template <class Body>
SOFTDELTA_INLINE void for_each_lane(const Body& body) {
    [&]<int... lane>(std::integer_sequence<int, lane...> /*lanes*/) __attribute__((always_inline)) {
        (body(std::integral_constant<int, lane>{}), ...);
    }
    (std::make_integer_sequence<int, static_cast<int>(W)>{});
}

// sums += A·B over whole vectors of the depth where A lies by rows: every W factors of a row are one load. Returns how
// far. Of B no more than a row is held, and read again for the next six rows of A: registers are full of sums.
template <class P, int rows, int vectors>
SOFTDELTA_INLINE Index accumulate_by_lanes(F (&sums)[rows][vectors], MatrixA<P> a, const Element<P>* b, Index depth) {
    constexpr int group = 6;
    const Index whole = depth / W * W;
    const auto* column = reinterpret_cast<const float*>(a.data);
    const auto* b_row = reinterpret_cast<const float*>(b);
    for (const float* end = b_row + whole * vectors * W; b_row != end; b_row += W * vectors * W, column += W) {
#pragma GCC unroll 2
        for (int m = 0; m < rows; m += group) {
            F factors[group];
            const int height = min(group, rows - m);
#pragma GCC unroll 6
            for (int i = 0; i < height; ++i) factors[i] = load(column + (m + i) * a.row);
            const auto step = [&]<int lane>(std::integral_constant<int, lane> /*lane*/) __attribute__((always_inline)) {
                F operand[vectors];
                keep_loads_below();
                load_neighbours<lane * vectors * W>(b_row, operand);
#pragma GCC unroll 6
                for (int i = 0; i < height; ++i)
#pragma GCC unroll 2
                    for (int n = 0; n < vectors; ++n)
                        sums[m + i][n] =
                            P::template multiply_add_by_factor<lane>(factors[i], operand[n], sums[m + i][n]);
            };
            for_each_lane(step);
        }
    }
    return whole;
}

// sums += A·B where A lies by columns: factors of W rows are one load.
template <class P, int rows, int vectors>
SOFTDELTA_INLINE void accumulate_by_columns(F (&sums)[rows][vectors], MatrixA<P> a, const Element<P>* b, Index depth) {
    const auto* column = reinterpret_cast<const float*>(a.data);
    const auto* b_row = reinterpret_cast<const float*>(b);
#pragma GCC unroll 4
    for (Index k = 0; k < depth; ++k, b_row += vectors * W, column = advance_pointer(column, a.step)) {
        F operand[vectors];
        keep_loads_below();
        load_neighbours<0>(b_row, operand);
#pragma GCC unroll 3
        for (int m = 0; m < rows; m += static_cast<int>(W)) {
            F factors;
            if (m + W <= rows)
                factors = load(column + m);
            else
                factors = as_floats(load_partial(reinterpret_cast<const std::uint32_t*>(column + m), rows - m));
            const auto multiply = [&]<int lane>(std::integral_constant<int, lane> /*lane*/)
                __attribute__((always_inline)) {
                if (m + lane < rows) {
#pragma GCC unroll 2
                    for (int n = 0; n < vectors; ++n)
                        sums[m + lane][n] =
                            P::template multiply_add_by_factor<lane>(factors, operand[n], sums[m + lane][n]);
                }
            };
            for_each_lane(multiply);
        }
    }
}

// sums += A·B. padded: behind its rows A has memory for those of a tile. Every third row of A has a pointer, from which
// the two after it are reached: all addresses stay in registers.
template <class P, int rows, int vectors, bool padded = false>
SOFTDELTA_INLINE void accumulate_product(F (&sums)[rows][vectors], MatrixA<P> a, const Element<P>* b, Index depth) {
    if constexpr (P::Tiles::exist) {
        accumulate_by_tiles<P, rows, vectors>(sums, a, padded ? tile_size : rows, b, depth);
        return;
    }
    if constexpr (multiplies_by_lane) {
        if (a.step == 1) {
            const Index done = accumulate_by_lanes<P>(sums, a, b, depth);
            a.data += done;
            b += done * vectors * W;
            depth -= done;
        }
        if (a.row == 1) return accumulate_by_columns<P>(sums, a, b, depth);
    }
    constexpr int bases = (rows + 2) / 3;
    const float* a_rows[bases];
#pragma GCC unroll 4
    for (int i = 0; i < bases; ++i) a_rows[i] = reinterpret_cast<const float*>(a.data) + 3 * i * a.row;
    const auto* b_row = reinterpret_cast<const float*>(b);
#pragma GCC unroll 1
    for (Index k = 0; k < depth; ++k, b_row += vectors * W) {
        F operand[vectors];
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) operand[n] = load(b_row + n * W);
#pragma GCC unroll 12
        for (int m = 0; m < rows; ++m) {
            const F factor = load_factor(a_rows[m / 3] + m % 3 * a.row);
#pragma GCC unroll 2
            for (int n = 0; n < vectors; ++n) sums[m][n] = P::multiply_add_by_factor(factor, operand[n], sums[m][n]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < bases; ++i) a_rows[i] = advance_pointer(a_rows[i], a.step);
    }
}

// C is fetched while the sums are computed.
template <int rows, int vectors>
SOFTDELTA_INLINE void fetch_sums(const float* c, Index c_row, Start start) {
    if (start != Start::zero) {
        const float* ahead = c;
        for (int m = 0; m < rows; ++m, ahead += c_row)
            for (Index i = 0; i < vectors * W; i += 16) prefetch_for_write(ahead + i);
    }
}

// C = start + sums, the first `rows` of them.
template <int rows, int vectors, int all>
SOFTDELTA_INLINE void store_sums_of(F (&sums)[all][vectors], float* c, Index c_row, Start start, const float* factor) {
    const float one = 1.0F;
    const Index factor_step = start == Start::scale ? 1 : 0;
    if (start != Start::scale) factor = &one;
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m, c = advance_pointer(c, c_row)) {
        if (start != Start::zero) {
            const F scale = splat(factor[m * factor_step]);
#pragma GCC unroll 2
            for (int n = 0; n < vectors; ++n) sums[m][n] = fma(scale, load(c + n * W), sums[m][n]);
        }
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) store(c + n * W, sums[m][n]);
    }
}

// C = start + A·B.
template <class P, int rows, int vectors>
[[gnu::noinline]] void microkernel(const Element<P>* a, Index a_row, Index a_step, const Element<P>* b, Index depth,
                                   float* c, Index c_row, Start start, const float* factor) {
    F sums[rows][vectors];
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) sums[m][n] = splat(0.0F);
    fetch_sums<rows, vectors>(c, c_row, start);
    accumulate_product<P, rows, vectors>(sums, {a, a_row, a_step}, b, depth);
    store_sums_of<rows>(sums, c, c_row, start, factor);
}

template <class P>
using Microkernel = void (*)(const Element<P>*, Index, Index, const Element<P>*, Index, float*, Index, Start,
                             const float*);

template <class P, int vectors, std::size_t... rows>
constexpr std::array<Microkernel<P>, MR> microkernels(std::index_sequence<rows...>) {
    return {microkernel<P, static_cast<int>(rows) + 1, vectors>...};
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
