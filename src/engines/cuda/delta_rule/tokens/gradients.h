// What the backward passes hand to each other, and the tensors that they write in the end.
#pragma once

#include <cuda_runtime_api.h>

#include "engines/cuda/delta_rule/chunk_list.h"

namespace softdelta::cuda {

// Where a value head's tokens and chunks of 64 lie in memory of the workspace, in [rows, heads] and [slots, heads].
struct TokenRows {
    Index first = 0, first_chunk = 0;
    int heads = 1;

    __device__ Index token(Index t) const { return first + t * heads; }
    __device__ Index chunk_of(Index t) const { return first_chunk + t / chunk_rows * heads; }
};

// S: states, w = βe: what rows write, dw: its gradient. Memory [.., heads, ..] of the workspace; rows are those of
// [B·T·steps], or of a chunk and head alone. "Slots" are chunks of 64 rows of each sequence.
struct GradientMemory {
    double* erased = nullptr;    // [rows, heads, V]        e
    double* dwritten = nullptr;  // [rows, heads, V]        dw
    float* dq = nullptr;         // [slabs, rows, heads, K] gradients of folded keys, over the columns of a slab
    float* dk = nullptr;
    float* dp = nullptr;

    // Of gates; null: their gradients are not wanted.
    double* written = nullptr;  // [slabs, rows, heads, channels]   q∘dq − k∘dk
    double* erase = nullptr;    // [slabs, rows, heads, channels]   p∘dp
    double* dstates = nullptr;  // [slots, heads, slabs, a block's lanes' parts]   dS at the ends of chunks
    double* ends = nullptr;     // [slabs, slots, heads, channels]  rowsum(S∘dS) there
    double* shares =
        nullptr;  // [2, slots, heads, channels]      a chunk's part of d_raw.bias or dg_gamma, of d_raw.A_log
    std::size_t shares_bytes = 0;

    Index rows = 0, slots = 0, row_slots = 0;  // row_slots: of a batch row
    int heads = 0, slabs = 0, channels = 1;    // channels: K, or 1

    // Of a value head of a call's n-th sequence.
    __device__ TokenRows rows_of(const DeltaCall& call, const DeltaSequence& s, Index n, bool packed, int hv) const {
        const Index begin = s.begin * call.steps;
        return {(s.batch * call.tokens * call.steps + begin) * call.heads + hv,
                (packed ? begin / chunk_rows + n : s.batch * row_slots) * call.heads + hv, call.heads};
    }
};

struct GradientViews {
    View d_o, dfinal_state, dq, dk, dp, dv, dg, dg_gamma, dbeta, dinitial_state;
    GateViews d_raw;
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
        .d_raw = views_of(core::gate_parameters(grad)),
    };
}

// The walk forward: results, or what the backward pass needs.
struct WalkOutputs {
    View o, final_state, states;
    double* erased;  // [rows, heads, V] v − Eᵀp of each token, or v; null: not wanted
};
int walk_slabs(const DeltaCall& call);  // of value columns
void launch_walk(const DeltaCall& call, const DeltaSequences& sequences, const WalkOutputs& out, cudaStream_t stream);

// Sums of the shares of all chunks, to the gradients of a gate's parameters.
void launch_sum_shares(const DeltaCall& call, const GradientViews& grad, const GradientMemory& memory,
                       cudaStream_t stream);

}  // namespace softdelta::cuda
