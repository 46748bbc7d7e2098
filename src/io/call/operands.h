// Which tensors an operation takes and yields, and where the library wants them. Names are those of a case file.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "io/call/call.h"

namespace softdelta::io {

template <class Struct>
struct Operand {
    std::string_view name;
    Tensor Struct::*field;
};

inline constexpr Operand<AttentionInputs> attention_inputs[] = {
    {"q", &AttentionInputs::q},
    {"k", &AttentionInputs::k},
    {"v", &AttentionInputs::v},
    {"mask", &AttentionInputs::mask},
    {"bias", &AttentionInputs::bias},
    {"sink", &AttentionInputs::sink},
    {"cu_seqlens_q", &AttentionInputs::cu_seqlens_q},
    {"cu_seqlens_k", &AttentionInputs::cu_seqlens_k},
    {"cache_seqlens", &AttentionInputs::cache_seqlens},
    {"block_table", &AttentionInputs::block_table},
};
inline constexpr Operand<AttentionOutputs> attention_outputs[] = {
    {"o", &AttentionOutputs::o},
    {"lse", &AttentionOutputs::lse},
};
inline constexpr Operand<AttentionGradients> attention_gradients[] = {
    {"dq", &AttentionGradients::dq},       {"dk", &AttentionGradients::dk},       {"dv", &AttentionGradients::dv},
    {"dbias", &AttentionGradients::dbias}, {"dsink", &AttentionGradients::dsink},
};

inline constexpr Operand<DeltaInputs> delta_inputs[] = {
    {"q", &DeltaInputs::q},
    {"k", &DeltaInputs::k},
    {"v", &DeltaInputs::v},
    {"g", &DeltaInputs::g},
    {"g_gamma", &DeltaInputs::g_gamma},
    {"beta", &DeltaInputs::beta},
    {"p", &DeltaInputs::p},
    {"initial_state", &DeltaInputs::initial_state},
    {"A_log", &DeltaInputs::A_log},
    {"dt_bias", &DeltaInputs::dt_bias},
    {"cu_seqlens", &DeltaInputs::cu_seqlens},
};
inline constexpr Operand<DeltaOutputs> delta_outputs[] = {
    {"o", &DeltaOutputs::o},
    {"final_state", &DeltaOutputs::final_state},
};
inline constexpr Operand<DeltaGradients> delta_gradients[] = {
    {"dq", &DeltaGradients::dq},
    {"dk", &DeltaGradients::dk},
    {"dv", &DeltaGradients::dv},
    {"dg", &DeltaGradients::dg},
    {"dg_gamma", &DeltaGradients::dg_gamma},
    {"dbeta", &DeltaGradients::dbeta},
    {"dp", &DeltaGradients::dp},
    {"dinitial_state", &DeltaGradients::dinitial_state},
    {"dA_log", &DeltaGradients::dA_log},
    {"ddt_bias", &DeltaGradients::ddt_bias},
};

// The operations; lists of names are separated by blanks.
struct Operation {
    std::string_view name;
    std::string_view required;
    std::string_view optional;
    std::string_view outputs;
    Rule rule = Rule::delta_rule;  // not of attention
};

inline constexpr std::array<Operation, 6> operations{{
    {"attention", "q k v", "mask bias sink cu_seqlens cu_seqlens_q cu_seqlens_k cache_seqlens block_table do dlse",
     "o lse"},
    {"delta_rule", "q k v", "beta initial_state cu_seqlens do dfinal_state", "o final_state", Rule::delta_rule},
    {"gated_delta_rule", "q k v g", "beta initial_state A_log dt_bias cu_seqlens do dfinal_state", "o final_state",
     Rule::gated_delta_rule},
    {"kda", "q k v g", "beta initial_state A_log dt_bias cu_seqlens do dfinal_state", "o final_state", Rule::kda},
    {"comba", "q k v g p", "beta initial_state A_log dt_bias cu_seqlens do dfinal_state", "o final_state", Rule::comba},
    {"simple_gla", "q k v", "g g_gamma initial_state A_log dt_bias cu_seqlens do dfinal_state", "o final_state",
     Rule::simple_gla},
}};

// What kernels keep on the way, under their names for it (docs/stages.md).
inline constexpr std::string_view attention_stages = "delta ds dbias_tiles";
inline constexpr std::string_view delta_stages =
    "A L Aqk w u qg kg h v_new dv_local du dh dw dA dL dL_solve dAqk dq_state dq_intra dk_state dk_intra dg_q dg_k "
    "dg_p dg_terms dg_local dg_difference dg_spans";

inline bool lists(std::string_view names, std::string_view name) {
    for (std::size_t at = names.find(name); at != names.npos; at = names.find(name, at + 1)) {
        const std::size_t end = at + name.size();
        if ((at == 0 || names[at - 1] == ' ') && (end == names.size() || names[end] == ' ')) return !name.empty();
    }
    return false;
}

inline bool takes(const Operation& op, std::string_view name) {
    return lists(op.required, name) || lists(op.optional, name);
}

template <class Struct, std::size_t n>
const Operand<Struct>* find(const Operand<Struct> (&operands)[n], std::string_view name) {
    for (const Operand<Struct>& operand : operands)
        if (operand.name == name) return &operand;
    return nullptr;
}

// Whether `name` is the gradient of an input that `op` takes.
inline bool is_gradient(const Operation& op, std::string_view name) {
    const bool known =
        &op == &operations[0] ? find(attention_gradients, name) != nullptr : find(delta_gradients, name) != nullptr;
    return known && takes(op, name.substr(1));
}

}  // namespace softdelta::io
