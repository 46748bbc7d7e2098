// A sequence of tokens with a state: where it lies among those of a call.
#pragma once

#include "core/tensor.h"

namespace softdelta::core {

struct TokenSequence {
    Index batch;         // index into the batch dimension
    Index begin, count;  // tokens
    Index state;         // entry of the initial states; −1: it begins from 0
    Index final_state;   // entry of the final states; −1: none is written
    bool is_padding;     // there is no such sequence: results are 0, states are left alone
};

// Sequence n: of cu_seqlens [N+1], otherwise row n of the batch with `tokens` of them; its state is entry
// state_indices[n] of a pool, otherwise n.
inline TokenSequence token_sequence(const Tensor& cu_seqlens, const Tensor& state_indices, Index tokens, Index n) {
    const Index state = state_indices ? load_index(state_indices, n * state_indices.stride[0]) : n;
    if (!cu_seqlens) return {n, 0, tokens, state, state, state < 0};
    const Index begin = load_index(cu_seqlens, n * cu_seqlens.stride[0]);
    return {0, begin, load_index(cu_seqlens, (n + 1) * cu_seqlens.stride[0]) - begin, state, state, state < 0};
}

// The same of a call whose states may come from one entry of a pool and go to another.
template <class Inputs>
TokenSequence pool_sequence(const Inputs& in, Index tokens, Index n) {
    TokenSequence s = token_sequence(in.cu_seqlens, in.state_indices, tokens, n);
    if (const Tensor& t = in.final_state_indices; t && !s.is_padding) s.final_state = load_index(t, n * t.stride[0]);
    if (const Tensor& t = in.has_initial_state; t && load(t, n * t.stride[0]) == 0) s.state = -1;
    return s;
}

}  // namespace softdelta::core
