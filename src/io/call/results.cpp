#include "io/call/results.h"

#include <stdexcept>
#include <type_traits>

#include "io/call/tensors.h"

namespace softdelta::io {
namespace {

using Shape = std::vector<std::int64_t>;

// Of values in blocks too.
std::int64_t row_size(const Tensor& t) {
    return t.rank() == 5 ? t.shape(3) * core::quantised_block : t.shape(3);
}

// A size of the call, of those that the shapes of results are made from.
std::int64_t size_of(const Call& call, core::Symbol symbol) {
    using enum core::Symbol;
    const Tensor &q = call.is_attention ? call.attention.q : call.delta.q,
                 &v = call.is_attention ? call.attention.v : call.delta.v;
    switch (symbol) {
        case B:
            return q.shape(0);
        case N:
            return call.delta.cu_seqlens ? call.delta.cu_seqlens.shape(0) - 1 : q.shape(0);
        case T:
        case Lq:
            return q.shape(1);
        case nT:
            return q.shape(1) * call.delta_options.steps;
        case H:
            return q.shape(2);
        case HV:
            return v.shape(2);
        case K:
        case D:
            return q.shape(3);
        case V:
        case Dv:
            return row_size(v);
        default:
            throw std::logic_error("no result has this size");
    }
}

Shape sizes_of(const Call& call, const core::Shape& symbols) {
    Shape shape;
    for (int i = 0; i < symbols.rank; ++i)
        shape.push_back(size_of(call, symbols.dims.at(static_cast<std::size_t>(i)).alternatives[0]));
    return shape;
}

template <class Inputs, class Outputs, class Gradients>
const core::Shape* find_shape_in(const Call& call, std::string_view name) {
    if (const auto* input = find_in_file<Inputs>(name)) return &shape_of(*input, call);
    if (const auto* output = find_in_file<Outputs>(name)) return &shape_of(*output, call);
    const auto* gradient = find_in_file<Gradients>(name);
    if (gradient == nullptr) return nullptr;
    return gradient->input != nullptr ? find_shape_in<Inputs, Outputs, Gradients>(call, name.substr(1))
                                      : &shape_of(*gradient, call);
}

// A gradient's input, o as v; nothing for what is a state or a logarithm.
Tensor model_of(const Call& call, const std::string& name) {
    if (name == "o") return input_of(call, has_quantised_numbers(call) ? "q" : "v");
    return name[0] == 'd' ? input_of(call, name.substr(1)) : Tensor{};
}

Shape shape_of_result(const Call& call, const std::string& name) {
    if (const Tensor input = name[0] == 'd' ? input_of(call, name.substr(1)) : Tensor{}) {
        const auto given = call.parameter_shapes.find(name.substr(1));
        return given != call.parameter_shapes.end() ? given->second : shape_of(input);
    }
    return sizes_of(call, *find_shape(call, name));
}

void expect_result(const Call& call, const std::string& name) {
    if (!is_result(operation_of(call), name)) throw std::invalid_argument(name + ": not a result of " + call.op);
}

}  // namespace

const Operation& operation_of(const Call& call) {
    return call.is_attention ? operations.front() : *find_operation(rule_of(call).name);
}

Tensor input_of(const Call& call, std::string_view name) {
    const auto find = [name](const auto& inputs) {
        for (const auto& field : fields_of<std::decay_t<decltype(inputs)>>)
            if (name == field.name) return inputs.*field.tensor;
        return Tensor{};
    };
    return call.is_attention ? find(call.attention) : find(call.delta);
}

bool has_quantised_numbers(const Call& call) {
    return call.is_attention && (call.attention.k_scale || call.attention.v_scale);
}

std::vector<std::string> output_names(const Call& call) {
    std::vector<std::string> names;
    const auto add = [&](const auto& fields, const auto& can_be) {
        for (const auto& field : fields)
            if (field.wanted != nullptr && in_files(field.name) && can_be(std::string(field.name)))
                names.emplace_back(field.name);
    };
    const auto always = [](const std::string&) { return true; };
    const auto of_given = [&](const std::string& name) {
        return name == "dinitial_state" || input_of(call, name.substr(1));
    };
    if (call.is_attention) {
        add(fields_of<AttentionOutputs>, always);
        if (call.d_o && !call.attention.block_table && !has_quantised_numbers(call))
            add(fields_of<AttentionGradients>, of_given);
    } else {
        add(fields_of<DeltaOutputs>, always);
        if (call.d_o || call.dfinal_state) add(fields_of<DeltaGradients>, of_given);
    }
    return names;
}

std::vector<Result> results_of(const Call& call) {
    std::vector<Result> results;
    for (const std::string& name : output_names(call))
        results.push_back({name, shape_of_result(call, name), find_shape(call, name)});
    return results;
}

std::vector<std::int64_t> output_shape(const Call& call, const std::string& name) {
    expect_result(call, name);
    return shape_of_result(call, name);
}

const core::Shape* find_shape(const Call& call, std::string_view name) {
    return call.is_attention
               ? find_shape_in<core::AttentionInputs, core::AttentionOutputs, core::AttentionGradients>(call, name)
               : find_shape_in<core::DeltaInputs, core::DeltaOutputs, core::DeltaGradients>(call, name);
}

DType output_dtype(const Call& call, const std::string& name) {
    expect_result(call, name);
    const Tensor model = model_of(call, name);
    return model ? model.dtype() : DType::f32;
}

}  // namespace softdelta::io
