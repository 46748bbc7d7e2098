// The walk forward for those who have a call of kernels: results, or what the backward pass needs.
#pragma once

#include <cuda_runtime_api.h>

#include "engines/cuda/delta_rule/call.h"

namespace softdelta::cuda {

struct WalkOutputs {
    View o, final_state, states;
    double* erased;  // [B·T, HV, V] v − Eᵀp of each token, or v; null: not wanted
};

int walk_slabs(const DeltaCall& call);         // of value columns
Index walk_state_size(const DeltaCall& call);  // elements of the state of a slab
void launch_walk(const DeltaCall& call, const DeltaSequences& sequences, const WalkOutputs& out, cudaStream_t stream);

}  // namespace softdelta::cuda
