// A tensor's rows as boxes that the copy engine takes.
#pragma once

#include "engines/cuda/device/view.h"
#include "engines/cuda/tile/copy.h"

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

}  // namespace softdelta::cuda
