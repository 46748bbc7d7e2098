// The causal convolution: the checks of one call, then the engine.

#include "api/check.h"
#include "api/engines/table.h"
#include "api/error.h"
#include "api/operands.h"

namespace softdelta::api {

namespace {

struct Call {
    core::ConvolutionInputs in;
    core::ConvolutionOptions options{};
    CheckedExecution how{};
    Sizes sizes{};
};

core::ConvolutionOptions check_options(const softdelta_causal_convolution_options* given) {
    const auto c = given != nullptr ? read_struct("options", given) : softdelta_causal_convolution_options_default();
    if (c.activation < SOFTDELTA_ACTIVATION_NONE || c.activation > SOFTDELTA_ACTIVATION_SILU)
        refuse("activation", std::to_string(c.activation), "0 (none) or 1 (silu)");
    return {static_cast<core::Activation>(c.activation)};
}

// Type, shape and whether results are writable, of every operand that is given. All states have the same tokens.
template <class Struct>
void check_operands(Call& c, const Struct& tensors) {
    core::for_each_given(tensors, [&](const core::Operand<Struct>& operand, const Tensor& t) {
        if (operand.input != nullptr) return;
        const bool is_state = operand.shape.has(core::Symbol::S);
        if (!is_state) return expect_operand(operand, t, operand.shape, c.sizes);
        Sizes sizes = c.sizes;
        if (is_pool(c.in, operand.written)) sizes[core::Symbol::N] = {};
        expect_operand(operand, t, operand.shape, sizes);
        const Index width = c.sizes[core::Symbol::W].value;
        if (t.shape[2] < width - 1)
            refuse(std::string(operand.name) + ": dimension 2", std::to_string(t.shape[2]),
                   std::to_string(width - 1) + " or more (the width of weight, less one)");
        c.sizes[core::Symbol::S] = {t.shape[2], "tokens of a state"};
    });
}

Call check_call(const softdelta_causal_convolution_inputs* inputs, const softdelta_causal_convolution_options* options,
                const softdelta_execution* execution) {
    using enum core::Symbol;
    Call c{.in = import_all<core::ConvolutionInputs>(read_struct("inputs", inputs))};
    const core::ConvolutionInputs& in = c.in;
    expect_required(in);
    expect_one_device(in, in.x.device, "x");
    c.sizes[B] = c.sizes[N] = {in.x.shape[0], "batch"};
    c.sizes[T] = {in.x.shape[1], "tokens"};
    c.sizes[C] = {in.x.shape[2], "channels"};
    c.sizes[W] = {in.weight.shape[1], "width"};
    if (c.sizes[C].value < 1) refuse("x: dimension 2", "0", "1 or more channels");
    if (c.sizes[W].value < 1) refuse("weight: dimension 1", "0", "1 or more");
    c.options = check_options(options);
    if (in.cu_seqlens) {
        expect_size("x", in.x, 0, {1, "packed sequences"});
        expect_cumulative("cu_seqlens", in.cu_seqlens, in.x.shape[1], "tokens");
        c.sizes[N] = {in.cu_seqlens.shape[0] - 1, "sequences"};
    }
    check_operands(c, in);
    c.how = check_execution(execution);
    return c;
}

// A step has its state in final_state.
core::ConvolutionOutputs check_outputs(Call& c, const softdelta_causal_convolution_outputs& given,
                                       bool is_step = false) {
    const auto out = import_all<core::ConvolutionOutputs>(given);
    expect_result("outputs", out, c.how.execution);
    expect_one_device(out, c.in.x.device, "x");
    check_operands(c, out);
    if (is_step) {
        expect_absent("initial_state", c.in.initial_state, "a step has its state in final_state");
        expect_present("final_state", out.final_state, "[N, C, S], the state of a step");
        c.in.initial_state = out.final_state;
    }
    expect_state_indices({c.in.state_indices, c.in.final_state_indices, c.in.has_initial_state, {}}, c.in.initial_state,
                         out.final_state);
    return out;
}

core::ConvolutionGradients check_gradients(Call& c, const softdelta_causal_convolution_gradients& given) {
    const auto g = import_all<core::ConvolutionGradients>(given);
    if (!g.dy && !g.dfinal_state) refuse("dy", "missing, and so is dfinal_state", "one of them: gradients start there");
    expect_result("gradients", g, c.how.execution);
    expect_no_pool(c.in);
    expect_one_device(g, c.in.x.device, "x");
    check_operands(c, g);
    for (const auto& operand : core::operands_of<core::ConvolutionGradients>)
        if (operand.input != nullptr) expect_gradient(operand.name, g.*operand.tensor, c.in.*operand.input);
    return g;
}

// Checked calls, for use(engine, call, pass).
template <class Use>
auto forward(const softdelta_causal_convolution_inputs* inputs, const softdelta_causal_convolution_outputs* outputs,
             const softdelta_causal_convolution_options* options, const softdelta_execution* execution,
             const Use& use) {
    Call call = check_call(inputs, options, execution);
    const auto out = check_outputs(call, read_struct("outputs", outputs));
    return use(call.how.engine, engines::ConvolutionForward{call.in, call.options, call.how.execution, out},
               &engines::Engine::convolution_forward);
}

template <class Use>
auto backward(const softdelta_causal_convolution_inputs* inputs,
              const softdelta_causal_convolution_gradients* gradients,
              const softdelta_causal_convolution_options* options, const softdelta_execution* execution,
              const Use& use) {
    Call call = check_call(inputs, options, execution);
    const auto grad = check_gradients(call, read_struct("gradients", gradients));
    return use(call.how.engine, engines::ConvolutionBackward{call.in, call.options, call.how.execution, grad},
               &engines::Engine::convolution_backward);
}

}  // namespace

}  // namespace softdelta::api

softdelta_status softdelta_causal_convolution_forward(const softdelta_causal_convolution_inputs* inputs,
                                                      const softdelta_causal_convolution_outputs* outputs,
                                                      const softdelta_causal_convolution_options* options,
                                                      const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] { api::forward(inputs, outputs, options, execution, api::compute); });
}

softdelta_status softdelta_causal_convolution_step(const softdelta_causal_convolution_inputs* inputs,
                                                   const softdelta_causal_convolution_outputs* outputs,
                                                   const softdelta_causal_convolution_options* options,
                                                   const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] {
        api::Call call = api::check_call(inputs, options, execution);
        const auto out = api::check_outputs(call, api::read_struct("outputs", outputs), true);
        api::run_pass(call.how.engine, engines::ConvolutionForward{call.in, call.options, call.how.execution, out},
                      &engines::Engine::convolution_forward);
    });
}

softdelta_status softdelta_causal_convolution_backward(const softdelta_causal_convolution_inputs* inputs,
                                                       const softdelta_causal_convolution_gradients* gradients,
                                                       const softdelta_causal_convolution_options* options,
                                                       const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] { api::backward(inputs, gradients, options, execution, api::compute); });
}

softdelta_status softdelta_causal_convolution_forward_workspace(const softdelta_causal_convolution_inputs* inputs,
                                                                const softdelta_causal_convolution_outputs* outputs,
                                                                const softdelta_causal_convolution_options* options,
                                                                const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard(
        [&] { api::result("bytes", bytes) = api::forward(inputs, outputs, options, execution, api::measure); });
}

softdelta_status softdelta_causal_convolution_backward_workspace(
    const softdelta_causal_convolution_inputs* inputs, const softdelta_causal_convolution_gradients* gradients,
    const softdelta_causal_convolution_options* options, const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard(
        [&] { api::result("bytes", bytes) = api::backward(inputs, gradients, options, execution, api::measure); });
}

softdelta_status softdelta_causal_convolution_forward_workspace_bound(
    const softdelta_causal_convolution_inputs* inputs, const softdelta_limits* limits,
    const softdelta_causal_convolution_options* options, const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard([&] {
        const auto call = api::check_call(inputs, options, execution);
        const core::ConvolutionOutputs none;
        api::result("bytes", bytes) = api::workspace_bound_of(
            call.how.engine, engines::ConvolutionForward{call.in, call.options, call.how.execution, none},
            &engines::Engine::convolution_forward, api::check_limits(limits));
    });
}
