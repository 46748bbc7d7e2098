// The delta-rule family: five rules as data, operands and options of one call.
#pragma once

#include <array>
#include <string_view>

#include "core/tensor.h"

namespace softdelta::core {

enum class Gate { none, scalar, channel };
enum class Erase { from_decayed_state, from_previous_state, nothing };

struct Rule {
    std::string_view name;
    Gate gate;
    Erase erase;
    bool own_p;          // erases along p instead of k
    bool gate_optional;  // may be called without g
};

inline constexpr std::array<Rule, 5> rules{{
    {"delta_rule", Gate::none, Erase::from_decayed_state, false, true},
    {"gated_delta_rule", Gate::scalar, Erase::from_decayed_state, false, false},
    {"kda", Gate::channel, Erase::from_decayed_state, false, false},
    {"comba", Gate::scalar, Erase::from_previous_state, true, false},
    {"simple_gla", Gate::scalar, Erase::nothing, false, true},
}};

enum class RawGate {
    none,
    softplus,
    lower_bound
};  // g = −e^A_log·softplus(x + dt_bias); g = b·σ(e^A_log·(x + dt_bias))
enum class RawBeta { none, logits, doubled_logits };  // β = σ(x); β = 2σ(x)

struct DeltaInputs {
    Tensor q, k, p;        // [B, T, H, K]; p of comba only
    Tensor v;              // [B, T, HV, V]
    Tensor g;              // scalar [B, T, HV]; channel [B, T, HV, K]; absent: none
    Tensor g_gamma;        // [HV] a constant gate, instead of g
    Tensor beta;           // [B, T, HV]; absent: 1
    Tensor initial_state;  // [N, HV, K, V] or [N, HV, V, K]; absent: 0
    Tensor A_log;          // [HV]; absent: 0 (lower bound only)
    Tensor dt_bias;        // [HV], channel gates [HV·K]; absent: 0
    Tensor cu_seqlens;     // [N+1] i32|i64; then B = 1
    Tensor state_indices;  // [N] i32|i64: initial and final state of sequence n are entry state_indices[n] of a pool;
                           // −1: padding, no sequence
};

struct DeltaOptions {
    Rule rule{};
    double scale = 0;
    bool l2norm = false;  // q, k, p ← x / √(Σx² + 1e-6)
    RawGate raw_gate = RawGate::none;
    double lower_bound = 0;
    RawBeta raw_beta = RawBeta::none;
    bool state_v_first = false;  // every state is [.., V, K]
    Index state_interval = 64;   // rows between the states that `states` returns
};

struct DeltaOutputs {
    Tensor o;            // [B, T, HV, V]
    Tensor final_state;  // as initial_state
    Tensor states;  // [B, NT, HV, K, V] the state at every chunk start; NT = Σ_n ceil(T_n / state_interval), B = 1 if
                    // packed
};

struct DeltaGradients {
    Tensor d_o;           // [B, T, HV, V]
    Tensor dfinal_state;  // as final_state; absent: 0
    Tensor dq, dk, dp, dv, dg, dbeta, dinitial_state, dA_log, ddt_bias,
        dg_gamma;  // each as its input; absent: not computed
};

// Sequence n of a call.
struct DeltaSequence {
    Index batch;                                   // index into the batch dimension
    Index begin, count;                            // tokens
    Index state;                                   // index into the first dimension of initial_state and final_state
    bool is_padding() const { return state < 0; }  // o = 0, states are left alone
};

inline Index sequence_count(const DeltaInputs& in) {
    return in.cu_seqlens ? in.cu_seqlens.shape[0] - 1 : in.q.shape[0];
}

inline DeltaSequence sequence(const DeltaInputs& in, Index n) {
    const Index state = in.state_indices ? load_index(in.state_indices, n * in.state_indices.stride[0]) : n;
    if (!in.cu_seqlens) return {n, 0, in.q.shape[1], state};
    const Index begin = load_index(in.cu_seqlens, n * in.cu_seqlens.stride[0]);
    return {0, begin, load_index(in.cu_seqlens, (n + 1) * in.cu_seqlens.stride[0]) - begin, state};
}

}  // namespace softdelta::core
