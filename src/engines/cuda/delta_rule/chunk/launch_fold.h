// The fold kernels by kind of gate, and what they share.
#pragma once

#include <cuda_runtime_api.h>

#include "engines/cuda/delta_rule/chunk/folded.h"

namespace softdelta::cuda {

// Bounds from shapes: a packed call's sequences may lie on the device.
inline dim3 fold_blocks(const DeltaCall& call, const DeltaSequences& sequences) {
    return {static_cast<unsigned>((call.tokens + chunk_rows - 1) / chunk_rows), static_cast<unsigned>(call.heads),
            static_cast<unsigned>(sequences.count)};
}

void launch_fold_shared(Level level, const DeltaCall& call, core::DType type, const DeltaSequences& sequences,
                        const FoldedChunks& folded, cudaStream_t stream);
void launch_fold_channel(Level level, const DeltaCall& call, core::DType type, const DeltaSequences& sequences,
                         const FoldedChunks& folded, cudaStream_t stream);

constexpr float highest_rise = 1;  // e^rise multiplies the rounding errors of what erasing cancels

// A tile of 16-bit elements, two neighbours of rows r and r + 8 of each accumulator.
template <class T>
__device__ inline void store_packed(const SquareTile<T>& to, int row, int n, int lane, std::uint32_t low,
                                    std::uint32_t high) {
    *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(row + lane / 4, n) + 4 * (lane % 4))) = low;
    *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(row + lane / 4 + 8, n) + 4 * (lane % 4))) = high;
}

}  // namespace softdelta::cuda
