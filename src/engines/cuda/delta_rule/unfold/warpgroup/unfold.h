// The gradients of shared_gate.cu on warpgroups.
#pragma once

#include "engines/cuda/delta_rule/saved.h"

namespace softdelta::cuda {

// On sm_90a, without a p of its own, K and V filled up to 128.
template <class T>
void launch_unfold_warpgroups(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                              const SavedChunks& saved, cudaStream_t stream);

}  // namespace softdelta::cuda
