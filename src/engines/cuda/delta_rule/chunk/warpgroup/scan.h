// The scan over folded chunks by warpgroups, sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include "engines/cuda/delta_rule/chunk/folded.h"

namespace softdelta::cuda {

void launch_group_scan(const DeltaCall& call, core::DType type, const DeltaSequences& sequences,
                       const FoldedChunks& folded, const ChunkOutputs& out, cudaStream_t stream);

}  // namespace softdelta::cuda
