// The tensors of each call as data: name, member, type, and whether they are lengths or indices, which may lie on the
// host beside tensors on another device. Whoever visits all tensors of a call does it by these tables.
#pragma once

#include <array>

#include "core/attention.h"
#include "core/delta_rule.h"

namespace softdelta::core {

enum class Kind { floating, boolean, integer };

template <class Struct>
struct Operand {
    const char* name;
    Tensor Struct::*tensor;
    Kind kind = Kind::floating;
    bool written = false;  // a result
};

// operands_of<AttentionInputs> and so on.
template <class Struct>
inline constexpr auto operands_of = nullptr;

template <>
inline constexpr auto operands_of<AttentionInputs> = std::to_array<Operand<AttentionInputs>>({
    {"q", &AttentionInputs::q},
    {"k", &AttentionInputs::k},
    {"v", &AttentionInputs::v},
    {"mask", &AttentionInputs::mask, Kind::boolean},
    {"bias", &AttentionInputs::bias},
    {"sink", &AttentionInputs::sink},
    {"cu_seqlens_q", &AttentionInputs::cu_seqlens_q, Kind::integer},
    {"cu_seqlens_k", &AttentionInputs::cu_seqlens_k, Kind::integer},
    {"cache_seqlens", &AttentionInputs::cache_seqlens, Kind::integer},
    {"block_table", &AttentionInputs::block_table, Kind::integer},
});
template <>
inline constexpr auto operands_of<AttentionOutputs> = std::to_array<Operand<AttentionOutputs>>({
    {"o", &AttentionOutputs::o, Kind::floating, true},
    {"lse", &AttentionOutputs::lse, Kind::floating, true},
});
template <>
inline constexpr auto operands_of<AttentionGradients> = std::to_array<Operand<AttentionGradients>>({
    {"o", &AttentionGradients::o},
    {"lse", &AttentionGradients::lse},
    {"d_o", &AttentionGradients::d_o},
    {"dlse", &AttentionGradients::dlse},
    {"dq", &AttentionGradients::dq, Kind::floating, true},
    {"dk", &AttentionGradients::dk, Kind::floating, true},
    {"dv", &AttentionGradients::dv, Kind::floating, true},
    {"dbias", &AttentionGradients::dbias, Kind::floating, true},
    {"dsink", &AttentionGradients::dsink, Kind::floating, true},
});

template <>
inline constexpr auto operands_of<DeltaInputs> = std::to_array<Operand<DeltaInputs>>({
    {"q", &DeltaInputs::q},
    {"k", &DeltaInputs::k},
    {"p", &DeltaInputs::p},
    {"v", &DeltaInputs::v},
    {"g", &DeltaInputs::g},
    {"g_gamma", &DeltaInputs::g_gamma},
    {"beta", &DeltaInputs::beta},
    {"initial_state", &DeltaInputs::initial_state},
    {"A_log", &DeltaInputs::A_log},
    {"dt_bias", &DeltaInputs::dt_bias},
    {"cu_seqlens", &DeltaInputs::cu_seqlens, Kind::integer},
    {"state_indices", &DeltaInputs::state_indices, Kind::integer},
});
template <>
inline constexpr auto operands_of<DeltaOutputs> = std::to_array<Operand<DeltaOutputs>>({
    {"o", &DeltaOutputs::o, Kind::floating, true},
    {"final_state", &DeltaOutputs::final_state, Kind::floating, true},
    {"states", &DeltaOutputs::states, Kind::floating, true},
});
template <>
inline constexpr auto operands_of<DeltaGradients> = std::to_array<Operand<DeltaGradients>>({
    {"d_o", &DeltaGradients::d_o},
    {"dfinal_state", &DeltaGradients::dfinal_state},
    {"dq", &DeltaGradients::dq, Kind::floating, true},
    {"dk", &DeltaGradients::dk, Kind::floating, true},
    {"dp", &DeltaGradients::dp, Kind::floating, true},
    {"dv", &DeltaGradients::dv, Kind::floating, true},
    {"dg", &DeltaGradients::dg, Kind::floating, true},
    {"dg_gamma", &DeltaGradients::dg_gamma, Kind::floating, true},
    {"dbeta", &DeltaGradients::dbeta, Kind::floating, true},
    {"dinitial_state", &DeltaGradients::dinitial_state, Kind::floating, true},
    {"dA_log", &DeltaGradients::dA_log, Kind::floating, true},
    {"ddt_bias", &DeltaGradients::ddt_bias, Kind::floating, true},
});

// visit(operand, tensor) for every tensor that is given.
template <class Struct, class Visit>
void for_each_given(const Struct& of, const Visit& visit) {
    for (const Operand<Struct>& operand : operands_of<Struct>)
        if (of.*operand.tensor) visit(operand, of.*operand.tensor);
}

}  // namespace softdelta::core
