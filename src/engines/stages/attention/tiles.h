// Tiles of attention: row-major Eigen views of scratch memory, and the exponential.
#pragma once

#include <Eigen/Core>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/attention.h"
#include "engines/stages/products.h"

namespace softdelta::stages::attention {

using core::Index;
using core::Tensor;

template <class T>
using Tile = Eigen::Map<Matrix<T>>;

// Scratch memory. Always aligned alike: how Eigen splits a row into packets and rest, and so the last bits, then
// depend on shapes alone.
template <class T>
using Buffer = std::vector<T, Eigen::aligned_allocator<T>>;

// A dense view [rows, cols] of the front of a buffer, which grows when it must.
template <class T>
Tile<T> tile_in(Buffer<T>& buffer, Index rows, Index cols) {
    const auto size = static_cast<std::size_t>(rows * cols);
    if (buffer.size() < size) buffer.resize(size);
    return {buffer.data(), rows, cols};
}

// row ← e^row for numbers ≤ 0, or a little above by rounding, which count as 0. A result below the smallest normal
// number becomes 0; NaN stays NaN.
template <class Row>
void exponentiate(Row&& row) {
    using T = typename std::decay_t<Row>::Scalar;
    T* const x = row.data();
    for (Index j = 0; j < row.size(); ++j) x[j] = x[j] > T(0) ? T(0) : x[j];
    row = row.exp();
    for (Index j = 0; j < row.size(); ++j) x[j] = x[j] < std::numeric_limits<T>::min() ? T(0) : x[j];
}

}  // namespace softdelta::stages::attention
