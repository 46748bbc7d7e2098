// What the copy engine brings: tiles of full chunks, of tensors and of what the passes before have saved. And dq, which
// it takes away, 16 rows at a time.
#pragma once

#include "engines/cuda/delta_rule/saved.h"
#include "engines/cuda/delta_rule/scan/warpgroup/kept.h"
#include "engines/cuda/tile/copy.h"

namespace softdelta::cuda {

// Of the memory of tiles [rows, 128], panel by panel: it has swizzled units already.
struct UnfoldBoxes {
    static constexpr int stored_rows = 16;
    Boxes q, k, d_o, u, d_r, state, dstate, dq;
};

// So many rows of q, k or d_o [B, T, heads, channels]: 64 channels at a time.
inline Boxes boxes_of_rows(const View& v, Index batches, Index tokens, Index heads, Index channels,
                           int rows = chunk_rows) {
    return boxes_of(v, {3, 1, 2, 0}, {channels, tokens, heads, batches}, rows);
}
inline UnfoldBoxes unfold_boxes(const ChunkGradients& of) {
    const auto& [call, sequences, saved, grad] = of;
    const Index batches = sequences.packed ? 1 : sequences.first + sequences.count, tiles = saved.slots * saved.heads;
    const auto rows = [&, tokens = call.tokens](const View& v, Index heads, int channels) {
        return boxes_of_rows(v, batches, tokens, heads, channels);
    };
    UnfoldBoxes boxes;
    boxes.q = rows(call.q, call.key_heads(), call.key_size);
    boxes.k = rows(call.k, call.key_heads(), call.key_size);
    boxes.d_o = rows(grad.d_o, call.heads, call.value_size);
    boxes.dq = boxes_of_rows(grad.dq, batches, call.tokens, call.key_heads(), call.key_size, UnfoldBoxes::stored_rows);
    boxes.u = boxes_of_tiles(saved.U, tiles, chunk_rows, chunk_rows);
    boxes.d_r = boxes_of_tiles(saved.dR, tiles, chunk_rows, chunk_rows);
    boxes.state = boxes_of_tiles(saved.states, tiles, 128, 128);
    boxes.dstate = boxes_of_tiles(saved.dstates, tiles, 128, 128);
    return boxes;
}

}  // namespace softdelta::cuda
