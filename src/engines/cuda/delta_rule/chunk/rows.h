// Rows of tokens between memory and tiles.
#pragma once

#include "engines/cuda/delta_rule/chunk/folded.h"

namespace softdelta::cuda {

// Rows of chunk c of a head, a multiple of the row's units in threads, columns from `first` on, in the background;
// zeros where there are none.
template <class T, int columns, int panel_rows>
__device__ void copy_rows(const Tile<T, columns, panel_rows>& tile, const View& from, const DeltaSequence& s, Index c,
                          int head, int first, int size, int thread, int threads) {
    using Rows = Tile<T, columns, panel_rows>;
    const int count = static_cast<int>(min(s.count - c * chunk_rows, Index(chunk_rows)));
    const int u = thread % Rows::units, rows_at_once = threads / Rows::units;
    const bool inside = first + 8 * u < size;
    const auto* data = static_cast<const T*>(from.data);
    const auto* row_data = data + s.batch * from.stride[0] + (s.begin + c * chunk_rows) * from.stride[1] +
                           head * from.stride[2] + first + 8 * u;
    const Index step = rows_at_once * from.stride[1];
    row_data += thread / Rows::units * from.stride[1];
    for (int row = thread / Rows::units; row < chunk_rows; row += rows_at_once) {
        const bool take = inside && row < count;
        ptx::copy_async(tile.unit(row, u), take ? row_data : data, take);
        row_data += step;
    }
}

// Bytes as they lie.
__device__ inline void copy_bytes(std::uint32_t to, const char* from, int bytes, int thread, int threads) {
    for (int i = 16 * thread; i < bytes; i += 16 * threads)
        ptx::copy_async(to + static_cast<std::uint32_t>(i), from + i, true);
}

}  // namespace softdelta::cuda
