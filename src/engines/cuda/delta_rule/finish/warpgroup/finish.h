// The gradients of shared.cu on warpgroups.
#pragma once

#include "engines/cuda/delta_rule/chunk_backward/saved.h"

namespace softdelta::cuda {

// On sm_90a, without a p of its own, K and V filled up to 128.
template <class T>
void launch_finish_warpgroups(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                              const SavedChunks& saved, cudaStream_t stream);

}  // namespace softdelta::cuda
