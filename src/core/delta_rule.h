// The delta-rule family: operands and options of one call.
#pragma once

#include "core/operands.h"
#include "core/rule.h"
#include "core/sequence.h"

namespace softdelta::core {

struct DeltaInputs {
    Tensor q, k, p;        // [B, T, H, K], of k and p nT rows; p only of rules that erase along it
    Tensor v;              // [B, nT, HV, V]
    Tensor g;              // scalar [B, T, HV]; channel [B, T, HV, K]; absent: none
    Tensor g_gamma;        // [HV] a constant gate, instead of g
    Tensor beta;           // [B, nT, HV]; absent: 1
    Tensor initial_state;  // [N, HV, K, V] or [N, HV, V, K]; absent: 0
    Tensor A_log;          // [HV]; absent: 0 (lower bound only)
    Tensor dt_bias;        // [HV], channel gates [HV·K]; absent: 0
    Tensor cu_seqlens;     // [N+1] i32|i64; then B = 1
    Tensor state_indices;  // [N] i32|i64: initial and final state of sequence n are entry state_indices[n] of a pool;
                           // −1: padding, no sequence
    Tensor final_state_indices;  // [N] the final state's entry instead; −1: it is not written
    Tensor has_initial_state;    // [N] bool; false: sequence n begins from 0; absent: none does
    Tensor snapshot_indices;     // [B, NT] the entry of the final states' pool for each of `states`; −1: none
};

// Which key head a value head reads, of H key heads and G value heads for each: h / G or h mod H.
enum class HeadOrder { grouped, tiled };

struct DeltaOptions {
    Rule rule{};
    double scale = 0;
    bool l2norm = false;  // q, k, p ← x / √(Σx² + 1e-6)
    RawGate raw_gate = RawGate::none;
    double lower_bound = 0;
    RawBeta raw_beta = RawBeta::none;
    bool state_v_first = false;  // every state is [.., V, K]
    Index state_interval = 64;   // rows between the states that `states` returns
    HeadOrder head_order = HeadOrder::grouped;
    Index steps = 1;  // n: rank-one updates of a token. It is gated before the first, and read after the last
};

struct DeltaOutputs {
    Tensor o;            // [B, T, HV, V]
    Tensor final_state;  // as initial_state
    Tensor states;  // [B, NT, HV, K, V] the state at every chunk start; NT = Σ_n ceil(T_n / state_interval), B = 1 if
                    // packed
    Tensor u;       // [B, T, HV, V] what each token writes: S ← decayed S + k uᵀ
};

struct DeltaGradients {
    Tensor d_o;           // [B, T, HV, V]
    Tensor dfinal_state;  // as final_state; absent: 0
    Tensor dq, dk, dp, dv, dg, dbeta, dinitial_state, dA_log, ddt_bias,
        dg_gamma;      // each as its input; absent: not computed
    Tensor states, u;  // of the forward pass, both or none: they need not be made again
};

// What raw gates are made with, g = −e^A_log·softplus(x + bias) and so on; or the gradients of both.
struct GateParameters {
    Tensor A_log, bias;
};
inline GateParameters gate_parameters(const DeltaInputs& in) {
    return {in.A_log, in.dt_bias};
}
inline GateParameters gate_parameters(const DeltaGradients& grad) {
    return {grad.dA_log, grad.ddt_bias};
}

template <>
struct InputsOf<DeltaGradients> {
    using type = DeltaInputs;
};

// Operands that not every rule takes.
namespace needs {

constexpr Need gate(const Rule& rule) {
    if (rule.gate == Gate::none) return {Use::none, "has no gate"};
    return {rule.gate_optional ? Use::optional : Use::required, "has a gate"};
}
constexpr Need constant_gate(const Rule& rule) {
    return rule.maps_by_number() && rule.gate != Gate::none ? Need{} : Need{Use::none, "has no constant gate"};
}
constexpr Need raw_gate(const Rule& rule) {
    return rule.gate == Gate::none ? Need{Use::none, "has no gate"} : Need{};
}
constexpr Need own_p(const Rule& rule) {
    return rule.own_p ? Need{Use::required, "erases along it"} : Need{Use::none, "erases along k"};
}
constexpr Need beta(const Rule& rule) {
    return rule.erases() ? Need{} : Need{Use::none, "has no beta"};
}

}  // namespace needs

// A state is that of a sequence, or with state_indices an entry of a pool of any size.
template <>
inline constexpr auto operands_of<DeltaInputs> = std::to_array<Operand<DeltaInputs>>({
    {.name = "q", .tensor = &DeltaInputs::q, .shape = "B T H K", .need = needs::required},
    {.name = "k", .tensor = &DeltaInputs::k, .shape = "B nT H K", .need = needs::required},
    {.name = "v", .tensor = &DeltaInputs::v, .shape = "B nT HV V", .need = needs::required},
    {.name = "g", .tensor = &DeltaInputs::g, .shape = "B T HV", .need = needs::gate, .channel_shape = "B T HV K"},
    {.name = "g_gamma", .tensor = &DeltaInputs::g_gamma, .shape = "HV", .need = needs::constant_gate},
    {.name = "beta", .tensor = &DeltaInputs::beta, .shape = "B nT HV", .need = needs::beta},
    {.name = "p", .tensor = &DeltaInputs::p, .shape = "B nT H K", .need = needs::own_p},
    {.name = "initial_state", .tensor = &DeltaInputs::initial_state, .shape = "N HV K V", .v_first_shape = "N HV V K"},
    {.name = "A_log", .tensor = &DeltaInputs::A_log, .shape = "HV", .need = needs::raw_gate},
    {.name = "dt_bias",
     .tensor = &DeltaInputs::dt_bias,
     .shape = "HV",
     .need = needs::raw_gate,
     .channel_shape = "HV*K"},
    {.name = "cu_seqlens", .tensor = &DeltaInputs::cu_seqlens, .shape = "N+1", .kind = Kind::integer},
    {.name = "state_indices", .tensor = &DeltaInputs::state_indices, .shape = "N", .kind = Kind::integer},
    {.name = "final_state_indices", .tensor = &DeltaInputs::final_state_indices, .shape = "N", .kind = Kind::integer},
    {.name = "has_initial_state", .tensor = &DeltaInputs::has_initial_state, .shape = "N", .kind = Kind::boolean},
    {.name = "snapshot_indices", .tensor = &DeltaInputs::snapshot_indices, .shape = "B NT", .kind = Kind::integer},
});
template <>
inline constexpr auto operands_of<DeltaOutputs> = std::to_array<Operand<DeltaOutputs>>({
    {.name = "o", .tensor = &DeltaOutputs::o, .shape = "B T HV V", .written = true},
    {.name = "final_state",
     .tensor = &DeltaOutputs::final_state,
     .shape = "N HV K V",
     .v_first_shape = "N HV V K",
     .written = true},
    {.name = "states",
     .tensor = &DeltaOutputs::states,
     .shape = "B NT HV K V",
     .v_first_shape = "B NT HV V K",
     .written = true},
    {.name = "u", .tensor = &DeltaOutputs::u, .shape = "B nT HV V", .written = true},
});
template <>
inline constexpr auto operands_of<DeltaGradients> = std::to_array<Operand<DeltaGradients>>({
    {.name = "d_o", .tensor = &DeltaGradients::d_o, .shape = "B T HV V"},
    {.name = "dfinal_state", .tensor = &DeltaGradients::dfinal_state, .shape = "N HV K V", .v_first_shape = "N HV V K"},
    {.name = "dq", .tensor = &DeltaGradients::dq, .written = true, .input = &DeltaInputs::q},
    {.name = "dk", .tensor = &DeltaGradients::dk, .written = true, .input = &DeltaInputs::k},
    {.name = "dv", .tensor = &DeltaGradients::dv, .written = true, .input = &DeltaInputs::v},
    {.name = "dg", .tensor = &DeltaGradients::dg, .written = true, .input = &DeltaInputs::g},
    {.name = "dg_gamma", .tensor = &DeltaGradients::dg_gamma, .written = true, .input = &DeltaInputs::g_gamma},
    {.name = "dbeta", .tensor = &DeltaGradients::dbeta, .written = true, .input = &DeltaInputs::beta},
    {.name = "dp", .tensor = &DeltaGradients::dp, .written = true, .input = &DeltaInputs::p},
    {.name = "dinitial_state",  // also without an initial_state, and therefore with a shape of its own
     .tensor = &DeltaGradients::dinitial_state,
     .shape = "N HV K V",
     .v_first_shape = "N HV V K",
     .written = true},
    {.name = "dA_log", .tensor = &DeltaGradients::dA_log, .written = true, .input = &DeltaInputs::A_log},
    {.name = "ddt_bias", .tensor = &DeltaGradients::ddt_bias, .written = true, .input = &DeltaInputs::dt_bias},
    {.name = "states", .tensor = &DeltaGradients::states, .shape = "B NT HV K V", .v_first_shape = "B NT HV V K"},
    {.name = "u", .tensor = &DeltaGradients::u, .shape = "B nT HV V"},
});

// The shape of an operand of this call.
template <class Struct>
const Shape& shape_of(const Operand<Struct>& operand, const DeltaOptions& options) {
    if (options.rule.maps_by_number() && operand.number_shape.rank > 0) return operand.number_shape;
    if (options.state_v_first && operand.v_first_shape.rank > 0) return operand.v_first_shape;
    if (options.rule.has_channel_gate() && operand.channel_shape.rank > 0) return operand.channel_shape;
    return operand.shape;
}

using DeltaSequence = TokenSequence;

// The key head that value head hv reads; value head i of those that read key head h.
inline Index key_head_of(const DeltaInputs& in, const DeltaOptions& options, Index hv) {
    const Index heads = in.q.shape[2], group = in.v.shape[2] / heads;
    return options.head_order == HeadOrder::tiled ? hv % heads : hv / group;
}
inline Index value_head_of(const DeltaInputs& in, const DeltaOptions& options, Index h, Index i) {
    const Index heads = in.q.shape[2], group = in.v.shape[2] / heads;
    return options.head_order == HeadOrder::tiled ? i * heads + h : h * group + i;
}

inline Index sequence_count(const DeltaInputs& in) {
    return in.cu_seqlens ? in.cu_seqlens.shape[0] - 1 : in.q.shape[0];
}

inline DeltaSequence sequence(const DeltaInputs& in, Index n) {
    return pool_sequence(in, in.q.shape[1], n);
}

// The same in rows of steps; and the token that such a row begins or ends, or −1.
inline DeltaSequence step_sequence(const DeltaInputs& in, const DeltaOptions& options, Index n) {
    DeltaSequence s = sequence(in, n);
    s.begin *= options.steps, s.count *= options.steps;
    return s;
}
inline Index token_begun(Index row, Index steps) {
    return row % steps == 0 ? row / steps : -1;
}
inline Index token_ended(Index row, Index steps) {
    return row % steps == steps - 1 ? row / steps : -1;
}

}  // namespace softdelta::core
