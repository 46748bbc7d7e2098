// The microkernel of bf16 pairs by blocks: an instruction multiplies two rows of A by two columns of B over two words
// of the depth and adds 2 × 2 sums.
//
//               B[k][0 … 3]  ─┐ interleaved: columns 0, 1 and 2, 3
//               B[k+1][0 … 3] ┘
//     A[0][k, k+1]  ┐ C[0 … 1][0 … 1] += …
//     A[1][k, k+1]  ┘
//
// Rows of A are joined two by two once for all columns. Two rows of B are interleaved where they are used: that takes
// one instruction a block of B beside as many products as A has pairs of rows.
#pragma once

#include "engines/cpu/kernels/gemm/microkernel.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr Index block_depth = 128;           // words of the depth that are joined at a time
inline constexpr Index block_pairs = (MR + 1) / 2;  // of rows

// Words k, k + 1 of rows 2p, 2p + 1 of A, one behind the other: out[k/2][p]. Zeros where A has neither.
template <class P>
SOFTDELTA_INLINE void join_rows(const Element<P>* a, Index a_row, Index a_step, Index rows, Index depth,
                                Element<P>* out) {
    constexpr Index step = block_pairs * W;  // of out, for two words of the depth
    const auto part = [](const Element<P>* from, Index n) {
        return n >= W ? load(from) : load_partial(from, n > 0 ? n : 0);
    };
    if (a_row == 1) {
        for (Index k = 0; k < depth; k += 2, out += step)
            for (Index m = 0; m < rows; m += W) {
                const U second = k + 1 < depth ? part(a + (k + 1) * a_step + m, rows - m) : U(0U);
                const auto joined = P::Blocks::interleave(part(a + k * a_step + m, rows - m), second);
                store(out + m / 2 * W, joined.low);
                if (m + 2 < rows) store(out + (m / 2 + 1) * W, joined.high);
            }
        return;
    }
    for (Index m = 0; m < rows; m += 2) {
        const bool two = m + 1 < rows;
        Element<P>* to = out + m / 2 * W;
        for (Index k = 0; k < depth; k += W, to += 2 * step) {
            const Element<P>* first = a + m * a_row + k * a_step;
            U x, y(0U);
            if (a_step == 1) {
                x = part(first, depth - k);
                if (two) y = part(first + a_row, depth - k);
            } else {
                Element<P> words[2][W] = {};
                for (Index i = 0; i < W && k + i < depth; ++i) {
                    words[0][i] = first[i * a_step];
                    if (two) words[1][i] = first[a_row + i * a_step];
                }
                x = load(words[0]);
                y = load(words[1]);
            }
            const auto joined = P::Blocks::join(x, y);
            store(to, joined.low);
            if (k + 2 < depth) store(to + step, joined.high);
        }
    }
}

// C = start + A·B, A's rows joined.
template <class P, int rows, int vectors>
[[gnu::noinline]] void block_microkernel(const Element<P>* a, const Element<P>* b, Index depth, float* c, Index c_row,
                                         Start start, const float* factor) {
    constexpr int pairs = (rows + 1) / 2;
    F blocks[pairs][2 * vectors];
#pragma GCC unroll 6
    for (int p = 0; p < pairs; ++p)
#pragma GCC unroll 4
        for (int n = 0; n < 2 * vectors; ++n) blocks[p][n] = splat(0.0F);
    fetch_sums<rows, vectors>(c, c_row, start);
    const auto multiply = [&](auto second) __attribute__((always_inline)) {
        U operand[2 * vectors];
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) {
            const auto columns = P::Blocks::interleave(load(b + n * W), second(b + (vectors + n) * W));
            operand[2 * n] = columns.low;
            operand[2 * n + 1] = columns.high;
        }
#pragma GCC unroll 6
        for (int p = 0; p < pairs; ++p) {
            keep_loads_below();  // registers are full of sums
            const U two_rows = load(a + p * W);
#pragma GCC unroll 4
            for (int n = 0; n < 2 * vectors; ++n)
                blocks[p][n] = P::Blocks::multiply_add(two_rows, operand[n], blocks[p][n]);
        }
        a += block_pairs * W;
        b += 2 * vectors * W;
    };
#pragma GCC unroll 1
    for (Index k = 0; k + 2 <= depth; k += 2) multiply([](const Element<P>* row) { return load(row); });
    if (depth % 2 == 1) multiply([](const Element<P>* /*row*/) { return U(0U); });
    F sums[2 * pairs][vectors];
#pragma GCC unroll 6
    for (int p = 0; p < pairs; ++p)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) {
            const auto joined = P::Blocks::join(as_words(blocks[p][2 * n]), as_words(blocks[p][2 * n + 1]));
            sums[2 * p][n] = as_floats(joined.low);
            sums[2 * p + 1][n] = as_floats(joined.high);
        }
    store_sums_of<rows>(sums, c, c_row, start, factor);
}

template <class P>
using BlockMicrokernel = void (*)(const Element<P>*, const Element<P>*, Index, float*, Index, Start, const float*);

template <class P, int vectors, std::size_t... rows>
constexpr std::array<BlockMicrokernel<P>, MR> block_microkernels(std::index_sequence<rows...>) {
    return {block_microkernel<P, static_cast<int>(rows) + 1, vectors>...};
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
