// Sums over many rows in a fixed order: of 64 rows each, then of 64 of these, until one is left.
#pragma once

#include "engines/cuda/device/launch.h"
#include "engines/cuda/device/view.h"

namespace softdelta::cuda {

// Rows of f32, [rows, columns], with room for the sums of each step.
struct PartialSums {
    Index rows, columns;

    Index floats() const;
    // Sums them in place, and returns where the sums [columns] lie; they are 0 without rows.
    const float* add(float* memory, cudaStream_t stream) const;
};

// sums[first + i + n·j] to element (i, j) of a tensor [n, m] or [n].
void store_sums(const float* sums, Index first, const core::Tensor& out, cudaStream_t stream);

}  // namespace softdelta::cuda
