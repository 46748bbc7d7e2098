// Rows of tokens between memory and tiles.
#pragma once

#include "engines/cuda/delta_rule/chunk/folded.h"

namespace softdelta::cuda {

// Rows of chunk c of a head, columns from `first` on, in the background; zeros where there are none.
template <class T, int columns>
__device__ void copy_rows(const Tile<T, columns>& tile, const View& from, const DeltaSequence& s, Index c, int head,
                          int first, int size, int thread, int threads) {
    using Rows = Tile<T, columns>;
    const auto* data = static_cast<const T*>(from.data) + s.batch * from.stride[0] + head * from.stride[2] + first;
    const int count = static_cast<int>(min(s.count - c * chunk_rows, Index(chunk_rows)));
    for (int i = thread; i < chunk_rows * Rows::units; i += threads) {
        const int row = i / Rows::units, u = i % Rows::units;
        const bool take = row < count && first + 8 * u < size;
        const Index token = s.begin + c * chunk_rows + row;
        ptx::copy_async(tile.unit(row, u), take ? data + token * from.stride[1] + 8 * u : data, take);
    }
}

// Bytes as they lie.
__device__ inline void copy_bytes(std::uint32_t to, const char* from, int bytes, int thread, int threads) {
    for (int i = 16 * thread; i < bytes; i += 16 * threads)
        ptx::copy_async(to + static_cast<std::uint32_t>(i), from + i, true);
}

}  // namespace softdelta::cuda
