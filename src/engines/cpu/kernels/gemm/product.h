// Products of packed operands: C[m][n] = start + Σ_k A[m][k]·B[k][n] with f32 sums, microkernel by microkernel. See
// micropanel.h for how operands lie.
#pragma once

#include "engines/cpu/kernels/gemm/microkernel.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

struct NoPrefetch {
    void operator()() const {}
};

// C of `rows` rows and `columns` columns, a multiple of W. Row tile t, of MR rows, computes the columns of
// column_ranges[t] over the depth of depth_ranges[t]; null: all. Columns are computed by whole micropanels, so that
// neighbours of the range are written too. An empty range of the depth adds nothing: C stays, or becomes zero with
// Start::zero. `fetch` is called before every microkernel: it prefetches memory that is needed later.
template <class P, class Fetch = NoPrefetch>
void product(Index rows, Index columns, MatrixA<P> a, PackedB<P> b, MatrixC c, const Range* column_ranges = nullptr,
             const Range* depth_ranges = nullptr, Fetch&& fetch = {}) {
    static constexpr auto wide = microkernels<P, 2>(std::make_index_sequence<MR>{});
    static constexpr auto narrow = microkernels<P, 1>(std::make_index_sequence<MR>{});
    for (Index n = 0; n < columns; n += NR) {
        const Index width = micropanel_width(n, columns);
        const Element<P>* panel = b.data + n * b.depth;
        for (Index m = 0, t = 0; m < rows; m += MR, ++t) {
            if (column_ranges && (column_ranges[t].end <= n || column_ranges[t].begin >= n + width)) continue;
            fetch();
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
