// Blocks of rows of a head that the fast kernels leave to those of planes, because a number in them is not finite: the
// latter multiply no Inf or NaN by a weight of 0. Without flags they take all.
#pragma once

#include <algorithm>

#include "engines/cuda/attention/call.h"
#include "engines/cuda/device/workspace.h"
#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

inline constexpr int warpgroup_rows = tile_rows;
inline constexpr Index most_warpgroup_rows = Index(65535) * warpgroup_rows;  // a grid has so many blocks along y
struct Redo {
    int *blocks = nullptr, *any = nullptr;  // [groups, heads, tiles]: a group is a sequence, or all packed ones
    Index count = 0, size = 0;              // tiles of a head; all flags. any: whether a row of queries is far in the
                                            // call, and for keys in each [sequence, key head]
    bool early = false;  // on Hopper: kernels that repeat blocks begin while the one before ends, and wait for it

    int* of_group(int group, int heads) const { return blocks + Index(group) * heads * count; }
    __device__ int* at(const RowTile& tile, int heads, int head) const {
        return blocks + (Index(tile.group) * heads + head) * count + tile.tile;
    }
    // Of the block's tile (AttentionSequences::tile_of_block), by one thread.
    __device__ void mark(const RowTile& tile, int heads, int head, bool nonfinite) const {
        *at(tile, heads, head) = nonfinite ? 1 : 0;
    }
    __device__ bool takes(const RowTile& tile, int heads, int head) const {
        return blocks == nullptr || *at(tile, heads, head) != 0;
    }
    // Whether it takes any rows of a head; for all threads of a block.
    __device__ bool takes_any(int group, int heads, int head) const {
        if (blocks == nullptr) return true;
        bool any = false;
        const int* flags = blocks + (Index(group) * heads + head) * count;
        for (Index i = threadIdx.x; i < count; i += blockDim.x) any = any || flags[i] != 0;
        return ptx::any(1, static_cast<int>(blockDim.x), any);
    }
    // An entry of a list without a tile.
    __device__ void clear(const RowTile& tile, int heads, int head) const {
        if (tile.tile >= 0 && threadIdx.x == 0) *at(tile, heads, head) = 0;
    }
    __host__ __device__ bool may_take_none() const { return blocks != nullptr; }
};

// Kernels that may have nothing to do are launched with few blocks. Each reads the flags of its head, and takes several
// blocks of rows where it must. So many for each of `heads` heads.
inline Index few_blocks(Index blocks_of_rows, Index heads) {
    return std::min(blocks_of_rows, std::max(2 * multiprocessors() / heads, Index(1)));
}
// use.template operator()<few>(): a loop over blocks takes registers that kernels of all rows do not have.
template <class Use>
void with_few(const Redo& redo, const Use& use) {
    if (redo.may_take_none()) return use.template operator()<true>();
    use.template operator()<false>();
}
// Blocks of `step` rows, which tiles have whole: of so many rows of a sequence, or of the list.
__host__ __device__ inline Index row_blocks(const TileList& list, Index rows, int step) {
    return list ? Index(list.most) * (tile_rows / step) : (rows + step - 1) / step;
}
// A grid of these blocks, or of few; heads; and sequences.
template <bool few>
Blocks row_block_grid(Index blocks, Index heads, const TileList& list, const AttentionSequences& sequences) {
    const int z = list ? 1 : sequences.count;
    return {few ? few_blocks(blocks, heads * z) : blocks, heads, z};
}
// take(rows) for each of these blocks that a block of threads has; none where few blocks find no flag. Few blocks may
// be launched early: the caller waits for the launch before.
template <bool few, class Take>
__device__ void for_each_block(const Redo& redo, const AttentionSequences& sequences, const TileList& list, int heads,
                               int head, Index rows, int step, const Take& take) {
    const auto take_block = [&](Index block) {
        RowTile at = sequences.tile(list, static_cast<int>(block * step / tile_rows));
        at.first += block * step % tile_rows;
        if (at) take(at);
    };
    if constexpr (few) {
        if (!redo.takes_any(list ? 0 : sequences.first + static_cast<int>(blockIdx.z), heads, head)) return;
        for (Index block = blockIdx.x; block < row_blocks(list, rows, step); block += gridDim.x) {
            take_block(block);
            __syncthreads();  // its tiles are read
        }
    } else {
        take_block(blockIdx.x);
    }
}

// Flags of tiles of a call's queries, or of its keys.
Redo redo_of_queries(const core::AttentionInputs& in, MemoryParts& parts);
Redo redo_of_keys(const core::AttentionInputs& in, MemoryParts& parts);

}  // namespace softdelta::cuda
