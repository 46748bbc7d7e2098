// Matrix products of packed operands: C[m][n] = start + Σ_k A[m][k]·B[k][n], f32 sums, in register tiles.
// A is read one element at a time and broadcast; B lies in panels, as pack.h makes them. With pairs of bf16
// (PairProduct) an element is two neighbours along the depth, and every depth and step below counts pairs.
#pragma once

#include <array>
#include <utility>

#include "engines/cpu/kernels/gemm/matrix_product.h"
#include "engines/cpu/kernels/simd/simd.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

template <class P>
using Element = typename P::Element;

// Elements that n neighbours along the depth fill.
template <class P>
constexpr Index depth_of(Index n) {
    return (n + P::depth - 1) / P::depth;
}

// Calls call(PairProduct{}) where pairs of bf16 are wanted and the level multiplies them, else call(FloatProduct{}).
template <class Call>
SOFTDELTA_INLINE auto with_product(bool bf16_products, const Call& call) {
    if constexpr (has_bf16_products)
        if (bf16_products) return call(PairProduct{});
    return call(FloatProduct{});
}

template <class P>
struct MatrixA {
    const Element<P>* data;
    Index row, step;  // A[m][k] = data[m·row + k·step]
};

// B of `depth` rows: panel p holds columns [p·NR, …) as [depth][NR]; the last panel may be one vector
// wide.
template <class P>
struct PackedB {
    const Element<P>* data;
    Index depth;
};

enum class Start { zero, add, scale };  // sums begin at 0, at C, at factor[m]·C

struct MatrixC {
    float* data;
    Index row;  // C[m][n] = data[m·row + n]
    Start start = Start::zero;
    const float* factor = nullptr;  // [m]
};

struct Range {
    Index begin, end;
    bool empty() const { return begin >= end; }
};

// sums += A·B by matrix tiles.
template <class P, int rows, int vectors>
SOFTDELTA_INLINE void multiply_into_tiles(F (&sums)[rows][vectors], MatrixA<P> a, const Element<P>* b, Index depth) {
    alignas(64) float c[rows * vectors * W];
    for (int m = 0; m < rows; ++m)
        for (int n = 0; n < vectors; ++n) store(c + (m * vectors + n) * W, sums[m][n]);
    const float one = 1.0F;
    matrix_tile<typename P::Tiles, vectors>(a.data, a.row, a.step, rows, b, depth, c, vectors * W, &one, 0);
    for (int m = 0; m < rows; ++m)
        for (int n = 0; n < vectors; ++n) sums[m][n] = load(c + (m * vectors + n) * W);
}

// sums += A·B. Rows of A are reached from every third one, so that all addresses stay in registers.
template <class P, int rows, int vectors>
SOFTDELTA_INLINE void accumulate_product(F (&sums)[rows][vectors], MatrixA<P> a, const Element<P>* b, Index depth) {
    if constexpr (P::Tiles::exist) {
        multiply_into_tiles<P, rows, vectors>(sums, a, b, depth);
        return;
    }
    constexpr int bases = (rows + 2) / 3;
    const float* left[bases];
#pragma GCC unroll 4
    for (int i = 0; i < bases; ++i) left[i] = reinterpret_cast<const float*>(a.data) + 3 * i * a.row;
    const auto* right = reinterpret_cast<const float*>(b);
#pragma GCC unroll 1
    for (Index k = 0; k < depth; ++k, right += vectors * W) {
        F operand[vectors];
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) operand[n] = load(right + n * W);
#pragma GCC unroll 12
        for (int m = 0; m < rows; ++m) {
            const F broadcast = splat(left[m / 3][m % 3 * a.row]);
#pragma GCC unroll 2
            for (int n = 0; n < vectors; ++n) sums[m][n] = P::multiply_add(broadcast, operand[n], sums[m][n]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < bases; ++i) left[i] = advance_pointer(left[i], a.step);
    }
}

// What is added to is fetched while the sums are made.
template <class P, int rows, int vectors>
[[gnu::noinline]] void microkernel(const Element<P>* a, Index a_row, Index a_step, const Element<P>* b, Index depth,
                                   float* c, Index c_row, Start start, const float* factor) {
    if constexpr (P::Tiles::exist) {
        const float one = 1.0F;
        const float* times = start == Start::zero ? nullptr : start == Start::add ? &one : factor;
        matrix_tile<typename P::Tiles, vectors>(a, a_row, a_step, rows, b, depth, c, c_row, times,
                                                start == Start::scale ? 1 : 0);
        return;
    }
    F sums[rows][vectors];
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) sums[m][n] = splat(0.0F);
    if (start != Start::zero) {
        const float* ahead = c;
        for (int m = 0; m < rows; ++m, ahead += c_row)
            for (Index i = 0; i < vectors * W; i += 16) __builtin_prefetch(ahead + i, 1);
    }
    accumulate_product<P, rows, vectors>(sums, {a, a_row, a_step}, b, depth);
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

template <class P>
using Microkernel = void (*)(const Element<P>*, Index, Index, const Element<P>*, Index, float*, Index, Start,
                             const float*);

template <class P, int vectors, std::size_t... rows>
constexpr std::array<Microkernel<P>, MR> microkernels(std::index_sequence<rows...>) {
    return {microkernel<P, static_cast<int>(rows) + 1, vectors>...};
}

struct Nothing {
    void operator()() const {}
};

// C of `rows` rows and `columns` columns (a multiple of W). Row tile t (MR rows) computes the columns of
// columns[t] (whole panels, so that others around them are written too) over the depth of depth_ranges[t]; null: all.
// Without depth there is nothing to add: C stays, or becomes zero with Start::zero.
// `between` is called before every register tile: time to ask for memory that is needed later.
template <class P, class Between = Nothing>
void product(Index rows, Index columns, MatrixA<P> a, PackedB<P> b, MatrixC c, const Range* column_ranges = nullptr,
             const Range* depth_ranges = nullptr, Between&& between = {}) {
    static constexpr auto wide = microkernels<P, 2>(std::make_index_sequence<MR>{});
    static constexpr auto narrow = microkernels<P, 1>(std::make_index_sequence<MR>{});
    for (Index n = 0; n < columns; n += NR) {
        const Index width = columns - n < NR ? W : NR;
        const Element<P>* panel = b.data + n * b.depth;
        for (Index m = 0, t = 0; m < rows; m += MR, ++t) {
            if (column_ranges && (column_ranges[t].end <= n || column_ranges[t].begin >= n + width)) continue;
            between();
            const Range depth = depth_ranges ? depth_ranges[t] : Range{0, b.depth};
            if (depth.empty() && c.start != Start::zero) continue;
            const auto tile_height = static_cast<std::size_t>(rows - m < MR ? rows - m : MR);
            (width == W ? narrow : wide)[tile_height - 1](
                a.data + m * a.row + depth.begin * a.step, a.row, a.step, panel + depth.begin * width,
                depth.empty() ? 0 : depth.end - depth.begin, c.data + m * c.row + n, c.row, c.start,
                c.factor ? c.factor + m : nullptr);
        }
    }
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
