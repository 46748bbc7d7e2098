// What the backward passes hand to each other, and the tensors that they write in the end.
#pragma once

#include <cuda_runtime_api.h>

#include "engines/cuda/delta_rule/call.h"

namespace softdelta::cuda {

// S: states, w = βe: what tokens write, dw: its gradient. Memory [.., HV, ..] of the workspace; rows are those of
// [B·T]. "Slots" are chunks of 64 tokens of each sequence.
struct GradientMemory {
    static constexpr Index chunk = 64;

    double* erased = nullptr;    // [rows, HV, V]        e
    double* dwritten = nullptr;  // [rows, HV, V]        dw
    float* dq = nullptr;         // [slabs, rows, HV, K] gradients of folded keys, over the columns of a slab
    float* dk = nullptr;
    float* dp = nullptr;

    // Of gates; null: their gradients are not wanted.
    double* written = nullptr;  // [slabs, rows, HV, channels]   q∘dq − k∘dk
    double* erase = nullptr;    // [slabs, rows, HV, channels]   p∘dp
    double* dstates = nullptr;  // [slots, HV, slabs, a block's lanes' parts]   dS at the ends of chunks
    double* ends = nullptr;     // [slabs, slots, HV, channels]  rowsum(S∘dS) there
    double* shares = nullptr;   // [2, slots, HV, channels]      a chunk's part of ddt_bias or dg_gamma, of dA_log
    std::size_t shares_bytes = 0;

    Index rows = 0, slots = 0, row_slots = 0;  // row_slots: of a batch row
    int slabs = 0, channels = 1;               // channels: K, or 1

    // Of chunk c of a sequence.
    __host__ __device__ Index slot(const DeltaSequence& s, Index n, Index c, bool packed) const {
        return (packed ? s.begin / chunk + n : s.batch * row_slots) + c;
    }
};

struct GradientViews {
    View d_o, dfinal_state, dq, dk, dp, dv, dg, dg_gamma, dbeta, dinitial_state, dA_log, ddt_bias;
};

inline GradientViews gradient_views(const core::DeltaGradients& grad) {
    return {
        .d_o = view_of(grad.d_o),
        .dfinal_state = view_of(grad.dfinal_state),
        .dq = view_of(grad.dq),
        .dk = view_of(grad.dk),
        .dp = view_of(grad.dp),
        .dv = view_of(grad.dv),
        .dg = view_of(grad.dg),
        .dg_gamma = view_of(grad.dg_gamma),
        .dbeta = view_of(grad.dbeta),
        .dinitial_state = view_of(grad.dinitial_state),
        .dA_log = view_of(grad.dA_log),
        .ddt_bias = view_of(grad.ddt_bias),
    };
}

// The walk forward: results, or what the backward pass needs.
struct WalkOutputs {
    View o, final_state, states;
    double* erased;  // [B·T, HV, V] v − Eᵀp of each token, or v; null: not wanted
};
int walk_slabs(const DeltaCall& call);         // of value columns
Index walk_state_size(const DeltaCall& call);  // elements of the state of a slab
void launch_walk(const DeltaCall& call, const DeltaSequences& sequences, const WalkOutputs& out, cudaStream_t stream);

// The three walks over the tokens: e; dS backwards, with dw and dk; S once more, with dq and dp.
void launch_walk_back(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                      const GradientMemory& memory, cudaStream_t stream);
// What has no state: from gradients of folded keys, values and gates to those of the operands. Of all sequences.
void launch_unfold_tokens(const DeltaCall& call, Index rows, const GradientViews& grad, const GradientMemory& memory,
                          cudaStream_t stream);
void launch_unfold_token_gates(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                               const GradientMemory& memory, cudaStream_t stream);
void launch_sum_shares(const DeltaCall& call, const GradientViews& grad, const GradientMemory& memory,
                       cudaStream_t stream);

}  // namespace softdelta::cuda
