// What the scan by warpgroups keeps of chunks leaves by the copy engine, so that those who have it go on.
#pragma once

#include "engines/cuda/delta_rule/chunk.h"
#include "engines/cuda/tile/tma.h"

namespace softdelta::cuda {
// So many tiles [tile_rows, 128] side by side in memory, some rows of one at a time: panel by panel, whose units are
// swizzled there already.
inline Boxes boxes_of_tiles(char* data, Index tiles, int tile_rows, int rows) {
    constexpr std::uint64_t channels = 128;
    BoxShape shape;
    const auto all = static_cast<std::uint64_t>(tiles) * static_cast<unsigned>(tile_rows);
    if (data == nullptr || all == 0 || all >= (std::uint64_t{1} << 31)) return {};
    shape.data = data;
    shape.rows = static_cast<unsigned>(rows);
    shape.swizzled_there = true;
    const std::uint64_t size[4] = {channels, all, 1, 1}, stride[4] = {1, channels, channels, channels};
    for (int i = 0; i < 4; ++i) shape.size[i] = size[i], shape.stride[i] = stride[i];
    return boxes_of(shape);
}

// Rows of Sᵀ are value columns, of which a block has some.
struct KeptBoxes {
    Boxes state, U;
};
inline KeptBoxes kept_boxes(const ChunkForward& of, int columns) {
    const KeptChunks& kept = of.out.kept;
    if (kept.states == nullptr) return {};
    const Index tiles = of.sequences.end_slot() * of.folded.heads;
    const KeptBoxes boxes{boxes_of_tiles(kept.states, tiles, KeptChunks::size, columns),
                          boxes_of_tiles(kept.U, tiles, chunk_rows, chunk_rows)};
    if (!boxes.state.given || !boxes.U.given)
        throw core::Unsupported("execution.kept: this CUDA driver does not describe its tiles to the copy engine");
    return boxes;
}

}  // namespace softdelta::cuda
