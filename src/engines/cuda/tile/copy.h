// Copies of a tensor's rows into tiles: boxes that the copy engine (TMA) takes, and units of 16 bytes by threads
// (cp.async).
#pragma once

#include "engines/cuda/device/view.h"
#include "engines/cuda/tile/shared.h"
#include "engines/cuda/tile/tma.h"

namespace softdelta::cuda {

// Boxes of so many rows of a view, whose dimensions go from columns and rows to what lies farthest apart. A dimension
// that all share has a single element (coordinate()); but a box's columns lie side by side, and its rows apart: the
// engine knows no stride of 0. Not given: it takes no such view.
inline Boxes boxes_of(const View& v, const int (&order)[4], const Index (&size)[4], int rows, int columns = 64) {
    BoxShape shape;
    if (!v) return {};
    shape.data = v.data;
    shape.rows = static_cast<unsigned>(rows), shape.columns = static_cast<unsigned>(columns);
    for (int i = 0; i < 4; ++i) {
        const Index stride = v.stride[order[i]];
        const bool spans = i == 0 || (i == 1 && rows > 1);
        if (stride < 0 || size[i] <= 0 || (spans && stride == 0 && size[i] > 1)) return {};
        shape.size[i] = stride == 0 ? 1 : static_cast<std::uint64_t>(size[i]);
        shape.stride[i] = stride == 0 ? 8 : static_cast<std::uint64_t>(stride);
    }
    return boxes_of(shape);
}

__device__ inline int coordinate(const View& v, int dimension, Index i) {
    return v.stride[dimension] == 0 ? 0 : static_cast<int>(i);
}

// All panels of a tile, by one thread.
template <class Tile>
__device__ inline void copy_panels(const Tile& tile, const Boxes& boxes, int column, int row, int i2, int i3,
                                   std::uint32_t counter) {
    unrolled<Tile::units / 8>([&](int p) {
        copy_box(tile.base + static_cast<std::uint32_t>(p * Tile::panel_bytes), boxes, column + 64 * p, row, i2, i3,
                 counter);
    });
}

// The same unit of every step-th row of a tile with panels, in the background: rows that lie `distance` elements
// apart, zeros from row `left` on. `step` is a multiple of 8: a thread's units lie alike.
template <int rows, int step, class T>
__device__ inline void copy_unit_of_rows(std::uint32_t to, const T* from, Index distance, int left,
                                         const T* elsewhere) {
#pragma unroll
    for (int r = 0; r < rows; r += step) {
        ptx::copy_async(to + static_cast<std::uint32_t>(r * 128), r < left ? from : elsewhere, r < left);
        from += distance;
    }
}

}  // namespace softdelta::cuda
