#include "io/call/results.h"

#include <stdexcept>

#include "io/file/stored_type.h"

namespace softdelta::io {
namespace {

using Shape = std::vector<std::int64_t>;

Shape shape_of(const Tensor& t) {
    return {t.shape().begin(), t.shape().end()};
}

Shape state_shape(const Call& call) {
    const DeltaInputs& in = call.delta;
    const std::int64_t sequences = in.cu_seqlens ? in.cu_seqlens.shape(0) - 1 : in.q.shape(0);
    const std::int64_t key_size = in.q.shape(3), value_size = in.v.shape(3);
    const bool v_first = call.delta_options.state_v_first;
    return {sequences, in.v.shape(2), v_first ? value_size : key_size, v_first ? key_size : value_size};
}

Shape attention_shape(const AttentionInputs& in, std::string_view name) {
    const std::int64_t batch = in.q.shape(0), queries = in.q.shape(1), heads = in.q.shape(2);
    if (name == "o") return {batch, queries, heads, in.v.shape(3)};
    return {batch, heads, queries};  // lse
}

// A gradient's input, o as v; nothing for what is a state or a logarithm.
Tensor model_of(const Call& call, const std::string& name) {
    if (name == "o") return input_of(call, "v");
    return name[0] == 'd' ? input_of(call, name.substr(1)) : Tensor{};
}

void expect_result(const Call& call, const std::string& name) {
    const Operation& op = operation_of(call);
    if (!lists(op.outputs, name) && !is_gradient(op, name))
        throw std::invalid_argument(name + ": not a result of " + call.op);
}

}  // namespace

const Operation& operation_of(const Call& call) {
    for (const Operation& op : operations)
        if (op.name == call.op) return op;
    throw std::invalid_argument("no operation is called " + call.op);
}

Tensor input_of(const Call& call, std::string_view name) {
    if (call.is_attention) {
        const auto* operand = find(attention_inputs, name);
        return operand == nullptr ? Tensor{} : call.attention.*operand->field;
    }
    const auto* operand = find(delta_inputs, name);
    return operand == nullptr ? Tensor{} : call.delta.*operand->field;
}

std::vector<std::string> output_names(const Call& call) {
    std::vector<std::string> names;
    const auto add_outputs = [&](const auto& operands) {
        for (const auto& operand : operands) names.emplace_back(operand.name);
    };
    const auto add_gradients = [&](const auto& operands) {
        for (const auto& operand : operands)
            if (operand.name == "dinitial_state" || input_of(call, operand.name.substr(1)))
                names.emplace_back(operand.name);
    };
    if (call.is_attention) {
        add_outputs(attention_outputs);
        if (call.d_o && !call.attention.block_table) add_gradients(attention_gradients);
    } else {
        add_outputs(delta_outputs);
        if (call.d_o || call.dfinal_state) add_gradients(delta_gradients);
    }
    return names;
}

std::vector<std::int64_t> output_shape(const Call& call, const std::string& name) {
    expect_result(call, name);
    if (name == "dA_log") return call.A_log_shape;
    if (name == "ddt_bias") return call.dt_bias_shape;
    if (name == "final_state" || name == "dinitial_state") return state_shape(call);
    if (name[0] == 'd') return shape_of(model_of(call, name));
    if (call.is_attention) return attention_shape(call.attention, name);
    return shape_of(call.delta.v);  // o
}

DType output_dtype(const Call& call, const std::string& name) {
    expect_result(call, name);
    const Tensor model = model_of(call, name);
    return model ? model.dtype() : DType::f32;
}

}  // namespace softdelta::io
