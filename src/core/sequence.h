// A sequence of tokens with a state: where it lies among those of a call.
#pragma once

#include "core/tensor.h"

namespace softdelta::core {

struct TokenSequence {
    Index batch;                                   // index into the batch dimension
    Index begin, count;                            // tokens
    Index state;                                   // index into the first dimension of the states
    bool is_padding() const { return state < 0; }  // results are 0, states are left alone
};

// Sequence n: of cu_seqlens [N+1], otherwise row n of the batch with `tokens` of them; its state is entry
// state_indices[n] of a pool, otherwise n.
inline TokenSequence token_sequence(const Tensor& cu_seqlens, const Tensor& state_indices, Index tokens, Index n) {
    const Index state = state_indices ? load_index(state_indices, n * state_indices.stride[0]) : n;
    if (!cu_seqlens) return {n, 0, tokens, state};
    const Index begin = load_index(cu_seqlens, n * cu_seqlens.stride[0]);
    return {0, begin, load_index(cu_seqlens, (n + 1) * cu_seqlens.stride[0]) - begin, state};
}

}  // namespace softdelta::core
