// A call of the delta rules as kernels see it: views, options, and where each sequence lies.
#pragma once

#include <algorithm>

#include "core/delta_rule.h"
#include "engines/cuda/view.h"

namespace softdelta::cuda {

struct DeltaCall {
    View q, k, p, v, g, g_gamma, beta, A_log, dt_bias, initial_state;
    Index tokens = 0;          // T
    int heads = 0, group = 1;  // HV; value heads of a key head
    bool tiled = false;        // value head hv reads key head hv mod H, and not hv / group
    int key_size = 0, value_size = 0;
    core::Gate gate{};
    core::Erase erase{};
    core::RawGate raw_gate{};
    core::RawBeta raw_beta{};
    bool own_p = false, l2norm = false;
    int state_row = 2, state_column = 3;  // dimensions of a state: k, v
    float scale = 1;
    double lower_bound = 0;

    __host__ __device__ int key_heads() const { return heads / group; }
    __device__ int key_head(int hv) const { return tiled ? hv % key_heads() : hv / group; }
    __device__ int value_head(int h, int i) const { return tiled ? i * key_heads() + h : h * group + i; }
};

inline DeltaCall delta_call(const core::DeltaInputs& in, const core::DeltaOptions& options) {
    DeltaCall c;
    c.q = view_of(in.q), c.k = view_of(in.k), c.p = view_of(in.p), c.v = view_of(in.v);
    c.g = view_of(in.g), c.g_gamma = view_of(in.g_gamma), c.beta = view_of(in.beta);
    c.A_log = view_of(in.A_log), c.dt_bias = view_of(in.dt_bias), c.initial_state = view_of(in.initial_state);
    c.tokens = in.q.shape[1];
    c.heads = static_cast<int>(in.v.shape[2]);
    c.group = static_cast<int>(in.v.shape[2] / in.q.shape[2]);
    c.tiled = options.head_order == core::HeadOrder::tiled;
    c.key_size = static_cast<int>(in.q.shape[3]);
    c.value_size = static_cast<int>(in.v.shape[3]);
    c.gate = options.rule.gate;
    c.erase = options.rule.erase;
    c.raw_gate = options.raw_gate;
    c.raw_beta = options.raw_beta;
    c.own_p = options.rule.own_p;
    c.l2norm = options.l2norm;
    if (options.state_v_first) std::swap(c.state_row, c.state_column);
    c.scale = static_cast<float>(options.scale);
    c.lower_bound = options.lower_bound;
    return c;
}

struct DeltaSequence {
    Index batch, begin, count;
    Index state;        // −1: none is read or written
    Index first_saved;  // of the states at intervals, within the batch row
};

// Some consecutive sequences of a call: a launch takes so many. Host lengths travel with the launch; lengths on the
// device are read there, and what they say beyond the tensors is cut off.
struct DeltaSequences {
    static constexpr int most = 256;

    int first = 0, count = 0;
    bool packed = false, begins_on_host = true, states_on_host = true;
    Index tokens = 0, pool = 0;  // T; entries of the pool of states
    Index interval = 1;
    View cu_seqlens, state_indices;  // on the device
    Index begin[most + 1];           // packed
    Index state[most];
    Index saved[most];

    // Sequence first + i.
    __device__ DeltaSequence operator[](int i) const {
        const Index n = first + i;
        DeltaSequence s{packed ? 0 : n, 0, tokens, n, 0};
        if (packed && begins_on_host) {
            s.begin = begin[i];
            s.count = begin[i + 1] - begin[i];
            s.first_saved = saved[i];
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

inline DeltaSequences delta_sequences(const core::DeltaInputs& in, const core::DeltaOptions& options, Index pool,
                                      Index first, Index count) {
    DeltaSequences s;
    s.first = static_cast<int>(first);
    s.count = static_cast<int>(count);
    s.tokens = in.q.shape[1];
    s.pool = pool;
    s.interval = options.state_interval;
    s.packed = static_cast<bool>(in.cu_seqlens);
    s.begins_on_host = !s.packed || in.cu_seqlens.device.is_cpu();
    s.states_on_host = !in.state_indices || in.state_indices.device.is_cpu();
    s.cu_seqlens = view_of(in.cu_seqlens);
    s.state_indices = view_of(in.state_indices);
    const auto at = [](const core::Tensor& t, Index i) { return core::load_index(t, i * t.stride[0]); };
    Index saved = 0;
    for (Index n = 0; s.packed && s.begins_on_host && n < first + count; ++n) {
        const Index begin = at(in.cu_seqlens, n), end = at(in.cu_seqlens, n + 1);
        if (n >= first) {
            s.begin[n - first] = begin;
            s.begin[n - first + 1] = end;
            s.saved[n - first] = saved;
        }
        saved += (end - begin + s.interval - 1) / s.interval;
    }
    for (Index i = 0; s.states_on_host && i < count; ++i)
        s.state[i] = in.state_indices ? at(in.state_indices, first + i) : first + i;
    return s;
}

// Rows that kernels of chunks read by units of 16 bytes; what is absent has none.
inline bool has_whole_rows(const core::Tensor& t) {
    return !t || t.count() == 0 || has_whole_rows(view_of(t), static_cast<int>(t.shape[3]));
}

// use(sequences) for all of a call, DeltaSequences::most at a time. states: the final ones, if there are.
template <class Use>
void for_each_sequences(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Tensor& states,
                        const Use& use) {
    const Index sequences = core::sequence_count(in);
    const Index pool = in.initial_state ? in.initial_state.shape[0] : states ? states.shape[0] : sequences;
    for (Index first = 0; first < sequences; first += DeltaSequences::most)
        use(delta_sequences(in, options, pool, first, std::min<Index>(DeltaSequences::most, sequences - first)));
}

}  // namespace softdelta::cuda
