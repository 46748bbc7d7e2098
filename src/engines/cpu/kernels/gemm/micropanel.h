// The operands of a product C[m][n] = start + Σ_k A[m][k]·B[k][n] and how they lie in memory.
//
// B is packed in micropanels of NR columns, one after the other. Within a micropanel, row k is NR neighbours. Columns
// are filled up with zeros to a multiple of W; the last micropanel may be one vector wide.
// Example with depth 4, W = 8, NR = 16 and 24 columns; the numbers are positions in memory:
//
//                 n = 0 …           15      n = 16 …     23
//               ┌────┬────┬─   ─┬────┐     ┌────┬─   ─┬────┐
//         k = 0 │  0 │  1 │  …  │ 15 │     │ 64 │  …  │ 71 │
//             1 │ 16 │ 17 │  …  │ 31 │     │ 72 │  …  │ 79 │
//             2 │ 32 │ 33 │  …  │ 47 │     │ 80 │  …  │ 87 │
//             3 │ 48 │ 49 │  …  │ 63 │     │ 88 │  …  │ 95 │
//               └────┴────┴─   ─┴────┘     └────┴─   ─┴────┘
//                 micropanel, width NR       the last one, width W
//
//     B[k][n] is at n'·depth + k·width + (n − n'), n' = n rounded down to a multiple of NR
//
// A is not packed in micropanels: the microkernel broadcasts one element of each of MR rows, so that rows may lie where
// they are, by rows or by columns: A[m][k] is at m·row + k·step.
//
// Of bf16 pairs (P::depth is 2) every cell above is a word of two neighbours along the depth, the first in the lower
// half: B[2k][n] and B[2k + 1][n], A[m][2k] and A[m][2k + 1]. An odd depth is filled up with a zero.
//
//     level            W    MR × NR    of vector_registers: sums + operands of B + one broadcast
//     x86-64-v2        4     6 ×  8    6·2 + 2 + 1 = 15 of 16
//     avx2             8     6 × 16    6·2 + 2 + 1 = 15 of 16
//     avx512 …        16    12 × 32    12·2 + 2 + 1 = 27 of 32
//     neon …           4    12 ×  8    12·2 + 2 + 1 = 27 of 32
#pragma once

#include "engines/cpu/kernels/range.h"
#include "engines/cpu/kernels/simd/simd.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// The register tile of a product: MR rows of A times NR columns of B.
inline constexpr int NR_vectors = 2;
inline constexpr Index NR = NR_vectors * W;
inline constexpr int MR = vector_registers == 32 ? 12 : 6;
static_assert(MR * NR_vectors + NR_vectors + 1 <= vector_registers);

template <class P>
using Element = typename P::Element;

// Elements that n numbers along the depth fill.
template <class P>
constexpr Index depth_of(Index n) {
    return (n + P::depth - 1) / P::depth;
}

// The width of the micropanel of B that begins at column n.
constexpr Index micropanel_width(Index n, Index columns) {
    return columns - n < NR ? W : NR;
}

template <class P>
struct MatrixA {
    const Element<P>* data;
    Index row, step;  // A[m][k] = data[m·row + k·step]
};

// B of `depth` rows in micropanels.
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

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
