// Which tensors an operation of a case file takes and yields: the tables of core, under the names of a file. There a
// gradient is d and the name of what it belongs to; core writes d_o for do, which is a word of C++.
#pragma once

#include <array>
#include <string_view>

#include "core/attention.h"
#include "core/delta_rule.h"
#include "core/rule_facts.h"
#include "io/call/call.h"

namespace softdelta::io {

// Attention, and each rule: those of the table, and those by their facts.
struct Operation {
    std::string_view name = "attention";
    const core::Rule* rule = nullptr;

    bool is_attention() const { return rule == nullptr; }
};

inline constexpr auto operations = [] {
    std::array<Operation, 1 + core::rules.size() + core::rules_of_facts.size()> all{};
    std::size_t next = 1;
    for (const core::Rule& rule : core::rules) all.at(next++) = {rule.name, &rule};
    for (const core::Rule& rule : core::rules_of_facts) all.at(next++) = {rule.name, &rule};
    return all;
}();

// Null when none has this name.
inline const Operation* find_operation(std::string_view name) {
    for (const Operation& op : operations)
        if (op.name == name) return &op;
    return nullptr;
}

// The rule of a call that is not attention.
inline const core::Rule& rule_of(const Call& call) {
    return *core::find_rule(static_cast<std::int32_t>(call.delta_options.rule));
}

// Those around the delta rules, whose calls are in layer.h.
inline constexpr std::string_view convolution_name = "causal_convolution", norm_name = "gated_norm";

inline bool is_layer(std::string_view name) {
    return name == convolution_name || name == norm_name;
}

inline std::string_view file_name(std::string_view name) {
    return name == "d_o" ? "do" : name;
}

// A file has no pool of states, and holds nothing that a backward pass keeps of the forward pass.
inline bool in_files(std::string_view name) {
    return !core::is_of_pools(name) && name != "states" && name != "u";
}

// The row of an input, null when the operation has none of this name.
template <class Struct>
const core::Operand<Struct>* find_in_file(std::string_view name) {
    for (const core::Operand<Struct>& operand : core::operands_of<Struct>)
        if (file_name(operand.name) == name && in_files(name)) return &operand;
    return nullptr;
}

// Whether a file of this operation holds a tensor as an input, or as a gradient that a backward pass starts from.
template <class Inputs, class Gradients>
core::Use use_of(const core::Rule& rule, std::string_view name) {
    if (const auto* input = find_in_file<Inputs>(name)) return input->need(rule).use;
    const auto* gradient = find_in_file<Gradients>(name);
    return gradient != nullptr && !gradient->written && name[0] == 'd' ? core::Use::optional : core::Use::none;
}
inline core::Use use_of(const Operation& op, std::string_view name) {
    if (!op.is_attention()) return use_of<core::DeltaInputs, core::DeltaGradients>(*op.rule, name);
    if (name == "cu_seqlens") return core::Use::optional;  // for cu_seqlens_q and cu_seqlens_k
    return use_of<core::AttentionInputs, core::AttentionGradients>({}, name);
}
inline bool takes(const Operation& op, std::string_view name) {
    return use_of(op, name) != core::Use::none;
}

inline bool is_output(const Operation& op, std::string_view name) {
    return op.is_attention() ? find_in_file<core::AttentionOutputs>(name) != nullptr
                             : find_in_file<core::DeltaOutputs>(name) != nullptr;
}

// Whether `name` is the gradient of an input that `op` takes.
inline bool is_gradient(const Operation& op, std::string_view name) {
    const auto written = [](const auto* row) { return row != nullptr && row->written; };
    const bool known = op.is_attention() ? written(find_in_file<core::AttentionGradients>(name))
                                         : written(find_in_file<core::DeltaGradients>(name));
    return known && takes(op, name.substr(1));
}

inline bool is_result(const Operation& op, std::string_view name) {
    return is_output(op, name) || is_gradient(op, name);
}

// Whether a tensor of this name has a place in a file of `op`.
inline bool belongs(const Operation& op, std::string_view name) {
    return takes(op, name) || is_result(op, name);
}

// Parameters of a gate, one for each value head or for its channels: files shape them as they like, the library takes
// vectors.
inline bool is_gate_parameter(std::string_view name) {
    const auto* operand = core::find_operand<core::DeltaInputs>(name);
    return operand != nullptr && operand->shape.rank == 1 && operand->shape.has(core::Symbol::HV);
}

// The shape of an operand of this call, in symbols.
template <class Struct>
const core::Shape& shape_of(const core::Operand<Struct>& operand, const Call& call) {
    core::DeltaOptions options;  // attention's operands have one shape
    options.rule = rule_of(call);
    options.state_v_first = call.delta_options.state_v_first;
    return core::shape_of(operand, options);
}

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

}  // namespace softdelta::io
