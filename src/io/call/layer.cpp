#include "io/call/layer.h"

#include <algorithm>
#include <stdexcept>

#include "core/layer/convolution.h"
#include "core/layer/norm.h"
#include "io/call/results.h"
#include "io/call/tensors.h"
#include "io/file/entry.h"

namespace softdelta::io {
namespace {

using Shape = std::vector<std::int64_t>;
using Results = std::map<std::string, Tensor>;

template <class Core, class Struct>
void read_inputs(const CaseFile& file, const LayerCall& call, Struct& in) {
    for (const auto& field : fields_of<Struct>) {
        const core::Operand<Core>& operand = *core::find_operand<Core>(field.name);
        Tensor& t = in.*field.tensor;
        if (in_files(field.name)) t = file.view(field.name);
        if (!t && operand.need == core::needs::required)
            fail(std::string(field.name) + ": missing, but " + call.op + " needs it");
        if (t && t.rank() != static_cast<std::size_t>(operand.shape.rank))
            fail(std::string(field.name) + ": shape " + shape_text(t.shape()) + ", expected " +
                 core::text_of(operand.shape));
    }
}

template <class Struct>
const Tensor* find_in(const Struct& inputs, std::string_view name) {
    for (const auto& field : fields_of<Struct>)
        if (name == field.name && inputs.*field.tensor) return &(inputs.*field.tensor);
    return nullptr;
}

const Tensor* find_input(const LayerCall& call, std::string_view name) {
    return call.is_convolution ? find_in(call.convolution, name) : find_in(call.norm, name);
}

const Tensor& x_of(const LayerCall& call) {
    return call.is_convolution ? call.convolution.x : call.norm.x;
}

template <class Outputs, class Gradients>
std::vector<std::string> names_of(const LayerCall& call) {
    std::vector<std::string> names;
    for (const auto& field : fields_of<Outputs>) names.emplace_back(field.name);
    if (!call.dy && !call.dfinal_state) return names;
    for (const auto& field : fields_of<Gradients>) {
        const std::string name = field.name;
        if (field.wanted != nullptr && (name == "dinitial_state" || find_input(call, name.substr(1)) != nullptr))
            names.push_back(name);
    }
    return names;
}

// [N, C, S]
Shape state_shape(const LayerCall& call) {
    const ConvolutionInputs& in = call.convolution;
    return {in.cu_seqlens ? in.cu_seqlens.shape(0) - 1 : in.x.shape(0), in.x.shape(2), call.state_tokens};
}

void read_options(const CaseFile& file, LayerCall& call) {
    if (!call.norm.z) call.norm_options.gate = Activation::none;
    for (const auto& [key, text] : file.metadata) {
        const Entry entry{key, text};
        if (key == "op" || key == "producer") continue;
        if (key == "activation" && call.is_convolution)
            call.convolution_options.activation =
                entry.choice<Activation>("none or silu", {{"none", Activation::none}, {"silu", Activation::silu}});
        else if (key == "gate" && !call.is_convolution)
            call.norm_options.gate = entry.choice<Activation>(
                "none, silu or sigmoid",
                {{"none", Activation::none}, {"silu", Activation::silu}, {"sigmoid", Activation::sigmoid}});
        else if (key == "epsilon" && !call.is_convolution)
            call.norm_options.epsilon = entry.number();
        else
            call.warnings.push_back("metadata " + quote(key) + " is no option of " + call.op + " and was ignored");
    }
}

// S of the states that a file holds; W − 1 where there are none.
std::int64_t state_tokens_of(const CaseFile& file, const LayerCall& call) {
    for (const char* state : {"initial_state", "final_state", "dfinal_state", "dinitial_state"})
        if (const Tensor t = file.view(state); t && t.rank() == 3) return t.shape(2);
    return std::max<std::int64_t>(call.convolution.weight.shape(1) - 1, 0);
}

struct Run {
    static constexpr auto convolution_forward = causal_convolution_forward;
    static constexpr auto convolution_backward = causal_convolution_backward;
    static constexpr auto norm_forward = gated_norm_forward;
    static constexpr auto norm_backward = gated_norm_backward;
};
// The same checks, and nothing computed.
struct Check {
    static constexpr auto convolution_forward = causal_convolution_forward_workspace;
    static constexpr auto convolution_backward = causal_convolution_backward_workspace;
    static constexpr auto norm_forward = gated_norm_forward_workspace;
    static constexpr auto norm_backward = gated_norm_backward_workspace;
};

template <class Functions>
std::size_t pass(const LayerCall& call, const Results& results, const Execution& execution) {
    std::size_t bytes = 0;
    const auto run = [&](auto function, const auto&... arguments) {
        bytes = std::max(bytes, bytes_of(function, arguments..., execution));
    };
    if (call.is_convolution) {
        ConvolutionOutputs outputs;
        if (assign(results, outputs)) {
            OwnedTensor unused;  // a state alone is no forward pass
            if (!outputs.y) outputs.y = (unused = OwnedTensor(output_dtype(call, "y"), output_shape(call, "y"))).view();
            run(Functions::convolution_forward, call.convolution, outputs, call.convolution_options);
        }
        ConvolutionGradients gradients;
        gradients.dy = call.dy, gradients.dfinal_state = call.dfinal_state;
        if (assign(results, gradients))
            run(Functions::convolution_backward, call.convolution, gradients, call.convolution_options);
    } else {
        NormOutputs outputs;
        if (assign(results, outputs)) run(Functions::norm_forward, call.norm, outputs, call.norm_options);
        NormGradients gradients;
        gradients.dy = call.dy;
        if (assign(results, gradients)) run(Functions::norm_backward, call.norm, gradients, call.norm_options);
    }
    return bytes;
}

}  // namespace

LayerCall call_of_layer(const CaseFile& file) try {
    LayerCall call;
    call.op = file.metadata.at("op");
    call.is_convolution = call.op == convolution_name;
    if (call.is_convolution)
        read_inputs<core::ConvolutionInputs>(file, call, call.convolution);
    else
        read_inputs<core::NormInputs>(file, call, call.norm);
    if (call.is_convolution && call.convolution.cu_seqlens && call.convolution.cu_seqlens.count() < 1)
        fail("cu_seqlens: shape [0], expected [N+1]");
    read_options(file, call);
    if (call.is_convolution) call.state_tokens = state_tokens_of(file, call);
    if (call.dy = file.view("dy"); call.dy) expect_float_of_shape("dy", call.dy, shape_of(x_of(call)));
    if (call.is_convolution) call.dfinal_state = file.view("dfinal_state");
    if (call.dfinal_state) expect_float_of_shape("dfinal_state", call.dfinal_state, state_shape(call));

    for (const std::string& output : output_names(call)) {
        const Tensor t = file.view(output);
        if (!t) continue;
        expect_float_of_shape(output, t, output_shape(call, output));
        call.outputs.push_back(output);
    }
    for (const auto& entry : file.tensors) {
        const std::string& tensor = entry.first;
        const bool known = find_input(call, tensor) != nullptr || tensor == "dy" ||
                           (tensor == "dfinal_state" && call.is_convolution) ||
                           std::ranges::find(call.outputs, tensor) != call.outputs.end();
        if (!known) call.warnings.push_back("tensor " + quote(tensor) + " is unknown and was ignored");
    }
    return call;
} catch (const CaseError& error) {
    fail(file.name, error.what());
}

std::variant<Call, LayerCall> any_call_of(const CaseFile& file) {
    const auto op = file.metadata.find("op");
    if (op != file.metadata.end() && is_layer(op->second)) return call_of_layer(file);
    return call_of(file);
}

std::vector<std::string> output_names(const LayerCall& call) {
    return call.is_convolution ? names_of<ConvolutionOutputs, ConvolutionGradients>(call)
                               : names_of<NormOutputs, NormGradients>(call);
}

std::vector<std::int64_t> output_shape(const LayerCall& call, const std::string& name) {
    if (name == "y") return shape_of(x_of(call));
    if (name == "final_state" || name == "dinitial_state") return state_shape(call);
    if (const Tensor* input = find_input(call, name.substr(1))) return shape_of(*input);
    throw std::invalid_argument(name + ": not a result of " + call.op);
}

DType output_dtype(const LayerCall& call, const std::string& name) {
    const bool state = name == "final_state" || name == "dinitial_state";
    const Tensor* model = find_input(call, state ? "initial_state" : name == "y" ? "x" : name.substr(1));
    return (model != nullptr ? *model : x_of(call)).dtype();
}

std::size_t check(const LayerCall& call, const Results& results, const Execution& execution) {
    return pass<Check>(call, results, execution);
}

void execute(const LayerCall& call, const Results& results, const Execution& execution) {
    pass<Run>(call, results, execution);
}

}  // namespace softdelta::io
