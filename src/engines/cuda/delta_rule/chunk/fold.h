// What the folds share.
#pragma once

#include "engines/cuda/delta_rule/chunk/folded.h"

namespace softdelta::cuda {

constexpr float highest_rise = 1;  // e^rise multiplies the rounding errors of what erasing cancels

// A tile of 16-bit elements, two neighbours of rows r and r + 8 of each accumulator.
template <class T>
__device__ inline void store_packed(const SquareTile<T>& to, int row, int n, int lane, std::uint32_t low,
                                    std::uint32_t high) {
    *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(row + lane / 4, n) + 4 * (lane % 4))) = low;
    *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(row + lane / 4 + 8, n) + 4 * (lane % 4))) = high;
}

}  // namespace softdelta::cuda
