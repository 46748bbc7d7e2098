// Where the sequences of a call lie: their tokens, and their entries of a pool of states.
#pragma once

#include <algorithm>

#include "core/sequence.h"
#include "engines/cuda/device/view.h"

namespace softdelta::cuda {

constexpr int chunk_rows = 64;  // of a chunk of the delta rules

struct Sequence {
    Index batch, begin, count;
    Index state;  // −1: none is read or written

    __device__ int chunks() const { return static_cast<int>((count + chunk_rows - 1) / chunk_rows); }
    // Of chunk c; 0 and less: there is no such chunk.
    __device__ int rows(Index c) const { return static_cast<int>(min(count - c * chunk_rows, Index(chunk_rows))); }

    // Where token t of a head lies in [B, T, heads, ..].
    __device__ Index row(const View& v, Index t, Index head) const {
        return batch * v.stride[0] + (begin + t) * v.stride[1] + head * v.stride[2];
    }
};

// Some consecutive sequences of a call: a launch takes so many. Host lengths travel with the launch; lengths on the
// device are read there, and what they say beyond the tensors is cut off.
struct Sequences {
    static constexpr int most = 256;

    int first = 0, count = 0;
    bool packed = false, begins_on_host = true, states_on_host = true;
    Index tokens = 0, pool = 0;      // T; entries of the pool of states
    View cu_seqlens, state_indices;  // on the device
    Index begin[most + 1];           // packed
    Index state[most];

    // Sequence first + i.
    __device__ Sequence operator[](int i) const {
        const Index n = first + i;
        Sequence s{packed ? 0 : n, 0, tokens, n};
        if (packed && begins_on_host) {
            s.begin = begin[i];
            s.count = begin[i + 1] - begin[i];
        } else if (packed) {
            const Index from = load_index(cu_seqlens, n * cu_seqlens.stride[0]);
            const Index to = load_index(cu_seqlens, (n + 1) * cu_seqlens.stride[0]);
            s.begin = min(max(from, Index(0)), tokens);
            s.count = min(max(to, s.begin), tokens) - s.begin;
        }
        if (states_on_host)
            s.state = state[i];
        else
            s.state = load_index(state_indices, n * state_indices.stride[0]);
        if (s.state < 0 || s.state >= pool) s.state = -1;
        return s;
    }
};

// Entries of the pool of states.
inline Index pool_size(const core::Tensor& initial_state, const core::Tensor& final_state, Index sequences) {
    return initial_state ? initial_state.shape[0] : final_state ? final_state.shape[0] : sequences;
}

// Sequences [first, first + count) of inputs with cu_seqlens and state_indices; in batch rows of so many tokens.
template <class Inputs>
Sequences sequences_of(const Inputs& in, Index tokens, Index pool, Index first, Index count) {
    Sequences s;
    s.first = static_cast<int>(first);
    s.count = static_cast<int>(count);
    s.tokens = tokens;
    s.pool = pool;
    s.packed = static_cast<bool>(in.cu_seqlens);
    s.begins_on_host = !s.packed || in.cu_seqlens.device.is_cpu();
    s.states_on_host = !in.state_indices || in.state_indices.device.is_cpu();
    s.cu_seqlens = view_of(in.cu_seqlens);
    s.state_indices = view_of(in.state_indices);
    for (Index i = 0; i < count; ++i) {
        const core::Tensor none;
        const core::TokenSequence at = core::token_sequence(
            s.begins_on_host ? in.cu_seqlens : none, s.states_on_host ? in.state_indices : none, tokens, first + i);
        s.begin[i] = at.begin;
        s.begin[i + 1] = at.begin + at.count;
        s.state[i] = at.state;
    }
    return s;
}

}  // namespace softdelta::cuda
