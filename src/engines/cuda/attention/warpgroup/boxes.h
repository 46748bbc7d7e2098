// Operands of attention as boxes that the copy engine takes, for calls whose sequences are whole rows of the tensors:
// zeros lie beyond their ends.
#pragma once

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/warpgroup/pipeline.h"
#include "engines/cuda/copy_engine.h"

namespace softdelta::cuda::warpgroup {

inline bool are_whole(const AttentionCall& call, const AttentionSequences& s) {
    return !s.of_queries.given && !s.of_keys.given && !s.in_use.given && call.block_rows == 0;
}

// Dimensions of a view, from columns to batches; one that all share has a single element.
inline Boxes boxes_of(const View& v, const int (&order)[4], const Index (&size)[4], int rows, int columns) {
    BoxShape shape;
    shape.data = v.data;
    shape.rows = static_cast<unsigned>(rows), shape.columns = static_cast<unsigned>(columns);
    for (int i = 0; i < 4; ++i) {
        const Index stride = v.stride[order[i]];
        shape.size[i] = stride == 0 ? 1 : static_cast<std::uint64_t>(size[i]);
        shape.stride[i] = stride == 0 ? 8 : static_cast<std::uint64_t>(stride);
        if (size[i] == 0 || stride < 0) return {};
    }
    return cuda::boxes_of(shape);
}
// Of q, k, v or do [B, L, H, D].
inline Boxes row_boxes(const View& v, const AttentionCall& call, Index length, Index heads, int channels, int rows) {
    const Index batches = call.total_queries / std::max(call.queries, Index(1));
    return boxes_of(v, {3, 1, 2, 0}, {channels, length, heads, batches}, rows, 64);
}
// Of a bias or its gradient [B, H, Lq, Lk].
inline Boxes bias_boxes(const View& v, const AttentionCall& call, int rows, int columns) {
    const Index batches = call.total_queries / std::max(call.queries, Index(1));
    return boxes_of(v, {3, 2, 1, 0}, {call.keys, call.queries, call.heads / call.bias_group, batches}, rows, columns);
}
// Of ds, for tiles of so many queries.
inline Boxes score_boxes(const StoredScores& ds, int rows) {
    return boxes_of(ds.view, {3, 2, 1, 0}, {ds.keys, ds.queries, ds.heads, ds.sequences}, rows, 64);
}

__device__ inline int coordinate(const View& v, int dimension, Index i) {
    return v.stride[dimension] == 0 ? 0 : static_cast<int>(i);
}
// All panels of a tile, by one thread.
template <class Tile>
__device__ inline void copy_panels(const Tile& tile, const Boxes& boxes, int column, int row, int i2, int i3,
                                   std::uint32_t counter) {
#pragma unroll
    for (int p = 0; p < Tile::bytes / Tile::panel_bytes; ++p)
        copy_box(tile.base + static_cast<std::uint32_t>(p * Tile::panel_bytes), boxes, column + 64 * p, row, i2, i3,
                 counter);
}
template <class Tile>
__device__ inline void copy_rows(const Tile& tile, const Boxes& boxes, const View& v, int row, int head, Index batch,
                                 std::uint32_t counter) {
    copy_panels(tile, boxes, 0, row, coordinate(v, 2, head), coordinate(v, 0, batch), counter);
}
template <class Tile>
__device__ inline void copy_bias(const Tile& tile, const Boxes& boxes, const AttentionCall& call, int query, int key,
                                 int head, Index batch, std::uint32_t counter) {
    copy_panels(tile, boxes, key, query, coordinate(call.bias, 1, head / call.bias_group),
                coordinate(call.bias, 0, batch), counter);
}

}  // namespace softdelta::cuda::warpgroup
