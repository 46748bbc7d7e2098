// Tiles of rows of packed sequences. A grid has a block for each entry, so that its size follows the rows there are,
// not their product with the sequences.
#pragma once

#include "core/tensor.h"

namespace softdelta::cuda {

struct TilePlace {
    int sequence = -1, first = 0;  // the tile's first row in its sequence; −1: no tile is here
};

// How many entries a list needs: sequences of so many rows together end in so many tiles that are not full.
inline core::Index most_tiles(core::Index rows, core::Index sequences, int tile_rows) {
    return rows / tile_rows + sequences;
}

// Tiles of tile_rows rows in the order of sequences and rows, then entries without a tile, [most]. By all threads of a
// block, `threads` of them, a multiple of 32. rows(n): those of sequence n. shared: threads / 32 + threads numbers in
// shared memory. What device memory says of lengths may be wrong: no more than `most` entries are written.
template <class Rows>
__device__ void list_tiles(const Rows& rows, int sequences, int tile_rows, TilePlace* places, int most, int* shared,
                           int thread, int threads) {
    const int warp = thread / 32, lane = thread % 32, warps = threads / 32;
    int *const ends = shared, *const of_warps = shared + threads;  // running sums of tiles
    core::Index before = 0;                                        // tiles of the sequences before these
    for (int first = 0; first < sequences; first += threads) {
        const int n = first + thread;
        const core::Index own = n < sequences ? (rows(n) + tile_rows - 1) / tile_rows : 0;
        const int tiles = static_cast<int>(own < most ? own : core::Index(most));
        int sum = tiles;
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            const int of_others = __shfl_up_sync(0xffffffffu, sum, lanes);
            if (lane >= lanes) sum += of_others;
        }
        if (lane == 31) of_warps[warp] = sum;
        __syncthreads();
        core::Index end = before + sum, all = before;
        for (int w = 0; w < warps; ++w) {
            if (w < warp) end += of_warps[w];
            all += of_warps[w];
        }
        ends[thread] = static_cast<int>(end < most ? end : core::Index(most));
        __syncthreads();
        for (int i = warp; i < threads; i += warps) {  // a warp lists a sequence
            const int begin = i == 0 ? static_cast<int>(before < most ? before : core::Index(most)) : ends[i - 1];
            for (int at = begin + lane; at < ends[i]; at += 32) places[at] = {first + i, (at - begin) * tile_rows};
        }
        before = all;
        __syncthreads();
    }
    for (core::Index at = before + thread; at < most; at += threads) places[at] = {};
}

}  // namespace softdelta::cuda
