// Products of packed operands: C[m][n] = start + Σ_k A[m][k]·B[k][n] with f32 sums, microkernel by microkernel. See
// micropanel.h for how operands lie.
#pragma once

#include "engines/cpu/kernels/gemm/block_microkernel.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

struct NoPrefetch {
    void operator()() const {}
};

// A's rows lie column by column: by matrix tiles they are transposed once for all columns, up to so many pairs.
inline constexpr Index most_transposed = 64;

// product() below by matrix tiles.
template <class P, class Fetch>
void product_by_tiles(Index rows, Index columns, MatrixA<P> a, PackedB<P> b, MatrixC c, const Range* column_ranges,
                      const Range* depth_ranges, Fetch& fetch) {
    using Tiles = typename P::Tiles;
    alignas(64) Element<P> by_rows[row_tile<P> * most_transposed];
    const float one = 1.0F;
    for (Index m = 0, t = 0; m < rows; m += row_tile<P>, ++t) {
        const Index height = min(rows - m, row_tile<P>);
        const Range range = depth_ranges ? depth_ranges[t] : Range{0, b.depth};
        if (range.empty() && c.start != Start::zero) continue;
        const Index depth = range.empty() ? 0 : range.end - range.begin;
        MatrixA<P> tile{a.data + m * a.row + range.begin * a.step, a.row, a.step};
        Index readable = height;
        if (a.step != 1 && depth <= most_transposed && columns > NR) {
            const Index row = round_up(depth, tile_size);
            for (Index k = 0; k < depth; k += tile_size)
                copy_a(tile.data + k * a.step, 1, a.step, height, min(depth - k, tile_size), by_rows + k, row);
            tile = {by_rows, row, 1};
            readable = tile_size;
        }
        const float* factor = c.start == Start::zero ? nullptr : c.start == Start::add ? &one : c.factor + m;
        const Index factor_step = c.start == Start::scale ? 1 : 0;
        for (Index n = 0; n < columns; n += NR) {
            const Index width = micropanel_width(n, columns);
            if (column_ranges && (column_ranges[t].end <= n || column_ranges[t].begin >= n + width)) continue;
            fetch();
            const auto multiply = [&](auto kernel) {
                kernel(tile.data, tile.row, tile.step, readable, b.data + n * b.depth + range.begin * width, depth,
                       c.data + m * c.row + n, c.row, height, factor, factor_step);
            };
            if (width == W)
                multiply(tile_microkernel<Tiles, 1>);
            else
                multiply(tile_microkernel<Tiles, 2>);
        }
    }
}

// product() below of bf16 pairs by blocks, the depth in parts of block_depth words.
template <class P, class Fetch>
void product_by_blocks(Index rows, Index columns, MatrixA<P> a, PackedB<P> b, MatrixC c, const Range* column_ranges,
                       const Range* depth_ranges, Fetch& fetch) {
    static constexpr auto wide = block_microkernels<P, 2>(std::make_index_sequence<MR>{});
    static constexpr auto narrow = block_microkernels<P, 1>(std::make_index_sequence<MR>{});
    alignas(64) Element<P> joined[block_depth / 2 * block_pairs * W];
    for (Index m = 0, t = 0; m < rows; m += MR, ++t) {
        const Index height = min(rows - m, MR);
        const Range range = depth_ranges ? depth_ranges[t] : Range{0, b.depth};
        if (range.empty() && c.start != Start::zero) continue;
        const Index end = range.empty() ? range.begin : range.end;
        Start start = c.start;
        Index k = range.begin;
        do {
            const Index depth = min(end - k, block_depth);
            join_rows<P>(a.data + m * a.row + k * a.step, a.row, a.step, height, depth, joined);
            for (Index n = 0; n < columns; n += NR) {
                const Index width = micropanel_width(n, columns);
                if (column_ranges && (column_ranges[t].end <= n || column_ranges[t].begin >= n + width)) continue;
                fetch();
                (width == W ? narrow : wide)[static_cast<std::size_t>(height) - 1](
                    joined, b.data + n * b.depth + k * width, depth, c.data + m * c.row + n, c.row, start,
                    c.factor ? c.factor + m : nullptr);
            }
            k += depth;
            start = Start::add;
        } while (k < end);
    }
}

// C of `rows` rows and `columns` columns, a multiple of W. Row tile t, of row_tile<P> rows, computes the columns of
// column_ranges[t] over the depth of depth_ranges[t]; null: all. Columns are computed by whole micropanels, so that
// neighbours of the range are written too. An empty range of the depth adds nothing: C stays, or becomes zero with
// Start::zero. `fetch` is called before every microkernel: it prefetches memory that is needed later.
template <class P, class Fetch = NoPrefetch>
void product(Index rows, Index columns, MatrixA<P> a, PackedB<P> b, MatrixC c, const Range* column_ranges = nullptr,
             const Range* depth_ranges = nullptr, Fetch&& fetch = {}) {
    if constexpr (P::Tiles::exist) {
        product_by_tiles(rows, columns, a, b, c, column_ranges, depth_ranges, fetch);
    } else if constexpr (P::Blocks::exist) {
        product_by_blocks(rows, columns, a, b, c, column_ranges, depth_ranges, fetch);
    } else {
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
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
