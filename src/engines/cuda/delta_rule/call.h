// A call of the delta rules as kernels see it: views, options, and where each sequence lies.
#pragma once

#include <algorithm>

#include "core/delta_rule.h"
#include "engines/cuda/delta_rule/lengths.h"
#include "engines/cuda/device/sequences.h"

namespace softdelta::cuda {

// core::GateParameters, or their gradients.
struct GateViews {
    View A_log, bias;

    explicit operator bool() const { return A_log || bias; }
};
inline GateViews views_of(const core::GateParameters& p) {
    return {view_of(p.A_log), view_of(p.bias)};
}

struct DeltaCall {
    View q, k, p, v, g, g_gamma, beta;
    GateViews raw;  // what raw gates are made with
    View initial_state;
    Index tokens = 0;          // T
    int steps = 1;             // rows of k, v, p and β for each token
    int heads = 0, group = 1;  // HV; value heads of a key head
    bool tiled = false;        // value head hv reads key head hv mod H, and not hv / group
    int key_size = 0, value_size = 0;
    core::Gate gate{};
    core::Erase erase{};
    core::RawGate raw_gate{};
    core::RawBeta raw_beta{};
    bool own_p = false, l2norm = false;
    bool wide = false;                    // K is filled up to 128, whatever it is
    int state_row = 2, state_column = 3;  // dimensions of a state: k, v
    float scale = 1;
    double lower_bound = 0;

    // Of a row of k, v, p or β: a token's first decays, and its last is read.
    __device__ Index token(Index row) const { return steps == 1 ? row : row / steps; }
    __device__ bool begins_token(Index row) const { return steps == 1 || row % steps == 0; }
    __device__ bool ends_token(Index row) const { return begins_token(row + 1); }
    // A sequence of tokens in such rows.
    __device__ Sequence in_steps(const Sequence& s) const {
        return {s.batch, s.begin * steps, s.count * steps, s.state};
    }

    __host__ __device__ int key_heads() const { return heads / group; }
    __device__ int key_head(int hv) const { return tiled ? hv % key_heads() : hv / group; }
    __device__ int value_head(int h, int i) const { return tiled ? i * key_heads() + h : h * group + i; }
    // Erasing looks from the row itself, or from the one before: E_i = G_(i − erase_shift).
    __device__ int erase_shift() const { return erase == core::Erase::from_previous_state ? 1 : 0; }
};

inline DeltaCall delta_call(const core::DeltaInputs& in, const core::DeltaOptions& options) {
    DeltaCall c;
    c.q = view_of(in.q), c.k = view_of(in.k), c.p = view_of(in.p), c.v = view_of(in.v);
    c.g = view_of(in.g), c.g_gamma = view_of(in.g_gamma), c.beta = view_of(in.beta);
    c.raw = views_of(core::gate_parameters(in)), c.initial_state = view_of(in.initial_state);
    c.tokens = in.q.shape[1];
    c.steps = options.steps;
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

struct DeltaSequence : Sequence {
    Index first_saved;  // of the states at intervals, within the batch row
    Index first_slot;   // of its chunks in memory (chunk_list.h)
};

// Where the states at intervals of packed sequences lie is known where lengths are on the host.
struct DeltaSequences : Sequences {
    Index interval = 1;
    TokenRange taken;        // packed
    int searched = 0;        // lengths on the device: these are some of so many, those that are taken
    bool scattered = false;  // lengths on the device: most may be taken by others
    Index saved[most];

    // Sequence first + i, or the i-th that is taken; one that others take has neither tokens nor a state here.
    __device__ DeltaSequence operator[](int i) const {
        if (searched > 0 && (i = find(i)) < 0) return {{0, 0, 0, -1}, 0, 0};
        DeltaSequence s{Sequences::operator[](i), packed && begins_on_host ? saved[i] : 0, 0};
        if (packed && !takes(s.count)) s.count = 0, s.state = -1;
        return s;
    }

    __device__ bool takes(int i) const { return takes(Sequences::operator[](i).count); }

  private:
    __device__ bool takes(Index tokens_of) const { return taken.shortest <= tokens_of && tokens_of <= taken.longest; }
    __device__ int find(int which) const {
#pragma unroll 1
        for (int i = 0; i < searched; ++i)
            if (takes(Sequences::operator[](i).count) && which-- == 0) return i;
        return -1;
    }
};

inline DeltaSequences delta_sequences(const core::DeltaInputs& in, const core::DeltaOptions& options, Index pool,
                                      Index first, Index count) {
    DeltaSequences s;
    static_cast<Sequences&>(s) = sequences_of(in, in.q.shape[1], pool, first, count);
    s.interval = options.state_interval;
    const core::Tensor none;
    Index saved = 0;
    for (Index n = 0; s.packed && s.begins_on_host && n < first + count; ++n) {
        if (n >= first) s.saved[n - first] = saved;
        saved += (core::token_sequence(in.cu_seqlens, none, s.tokens, n).count + s.interval - 1) / s.interval;
    }
    return s;
}

// Rows that kernels of chunks read by units of 16 bytes; what is absent has none.
inline bool has_whole_rows(const core::Tensor& t) {
    return !t || t.count() == 0 || has_whole_rows(view_of(t), static_cast<int>(t.shape[3]));
}

// use(sequences) for all of a call that are of so many tokens, DeltaSequences::most at a time. states: the final ones,
// if there are.
template <class Use>
void for_each_sequences(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Tensor& states,
                        const TokenRange& taken, const Use& use) {
    const Index sequences = core::sequence_count(in);
    const Index pool = pool_size(in.initial_state, states, sequences);
    for (Index first = 0; first < sequences; first += DeltaSequences::most) {
        const Index count = std::min<Index>(DeltaSequences::most, sequences - first);
        DeltaSequences some = delta_sequences(in, options, pool, first, count);
        some.taken = taken;
        // Where few sequences can have so many tokens, blocks look for theirs; others would only find that they have
        // none.
        const Index fit = taken.shortest > 0 ? some.tokens / taken.shortest : count;
        if (!some.begins_on_host && 4 * fit < count) {
            some.searched = some.count;
            some.count = static_cast<int>(fit);
        }
        some.scattered = !some.begins_on_host && taken.longest < some.tokens / sequences;
        use(some);
    }
}

}  // namespace softdelta::cuda
