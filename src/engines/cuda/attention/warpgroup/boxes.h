// Operands of attention as boxes that the copy engine takes, for calls whose sequences are whole rows of the tensors:
// zeros lie beyond their ends.
#pragma once

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/warpgroup/pipeline.h"
#include "engines/cuda/tile/copy.h"

namespace softdelta::cuda::warpgroup {

inline bool are_whole(const AttentionCall& call, const AttentionSequences& s) {
    return !s.of_queries.given && !s.of_keys.given && !s.in_use.given && call.block_rows == 0;
}

// Of q, k, v or do [B, L, H, D].
inline Boxes row_boxes(const View& v, const AttentionCall& call, Index length, Index heads, int channels, int rows) {
    const Index batches = call.total_queries / std::max(call.queries, Index(1));
    return boxes_of(v, {3, 1, 2, 0}, {channels, length, heads, batches}, rows);
}
// Of a bias or its gradient [B, H, Lq, Lk].
inline Boxes bias_boxes(const View& v, const AttentionCall& call, int rows, int columns) {
    const Index batches = call.total_queries / std::max(call.queries, Index(1));
    return boxes_of(v, {3, 2, 1, 0}, {call.keys, call.queries, call.heads / call.bias_group, batches}, rows, columns);
}
// Of ds, for tiles of so many queries.
inline Boxes score_boxes(const StoredScores& ds, int rows) {
    return boxes_of(ds.view, {3, 2, 1, 0}, {ds.keys, ds.queries, ds.heads, ds.sequences}, rows);
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
