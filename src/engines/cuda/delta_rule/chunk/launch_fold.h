// The fold kernels by kind of gate.
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

}  // namespace softdelta::cuda
