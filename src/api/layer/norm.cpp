// The gated norm: the checks of one call, then the engine.
#include <cmath>

#include "api/check.h"
#include "api/engines/table.h"
#include "api/error.h"
#include "api/operands.h"

namespace softdelta::api {

namespace {

struct Call {
    core::NormInputs in;
    core::NormOptions options;
    CheckedExecution how;
    Sizes sizes;
};

core::NormOptions check_options(const softdelta_gated_norm_options* given, const core::NormInputs& in) {
    const auto c = given != nullptr ? read_struct("options", given) : softdelta_gated_norm_options_default();
    if (c.gate < SOFTDELTA_ACTIVATION_NONE || c.gate > SOFTDELTA_ACTIVATION_SIGMOID)
        refuse("gate", std::to_string(c.gate), "0 (none), 1 (silu) or 2 (sigmoid)");
    if (c.gate == SOFTDELTA_ACTIVATION_NONE)
        expect_absent("z", in.z, "there is no gate");
    else
        expect_present("z", in.z, "the gate is made from it");
    if (!(c.epsilon >= 0 && fits_f32(c.epsilon)))
        refuse("epsilon", number_text(c.epsilon), "0 or a positive number that f32 can hold");
    return {static_cast<core::Activation>(c.gate), c.epsilon};
}

template <class Struct>
void check_operands(const Call& c, const Struct& tensors) {
    core::for_each_given(tensors, [&](const core::Operand<Struct>& operand, const Tensor& t) {
        if (operand.input == nullptr) expect_operand(operand, t, operand.shape, c.sizes);
    });
}

Call check_call(const softdelta_gated_norm_inputs* inputs, const softdelta_gated_norm_options* options,
                const softdelta_execution* execution) {
    using enum core::Symbol;
    Call c{};
    c.in = import_all<core::NormInputs>(read_struct("inputs", inputs));
    const core::NormInputs& in = c.in;
    expect_required(in);
    expect_one_device(in, in.x.device, "x");
    c.sizes[B] = {in.x.shape[0], "as x"};
    c.sizes[T] = {in.x.shape[1], "as x"};
    c.sizes[H] = {in.x.shape[2], "as x"};
    c.sizes[D] = {in.x.shape[3], "channels"};
    if (c.sizes[D].value < 1) refuse("x: dimension 3", "0", "1 or more channels");
    check_operands(c, in);
    c.options = check_options(options, in);
    c.how = check_execution(execution);
    return c;
}

core::NormOutputs check_outputs(const Call& c, const softdelta_gated_norm_outputs& given) {
    const auto out = import_all<core::NormOutputs>(given);
    expect_required(out);
    expect_one_device(out, c.in.x.device, "x");
    check_operands(c, out);
    return out;
}

core::NormGradients check_gradients(const Call& c, const softdelta_gated_norm_gradients& given) {
    const auto g = import_all<core::NormGradients>(given);
    expect_required(g);
    expect_result("gradients", g, c.how.execution);
    expect_one_device(g, c.in.x.device, "x");
    check_operands(c, g);
    for (const auto& operand : core::operands_of<core::NormGradients>)
        if (operand.input != nullptr) expect_gradient(operand.name, g.*operand.tensor, c.in.*operand.input);
    return g;
}

// Checked calls, for use(engine, call, pass).
template <class Use>
auto forward(const softdelta_gated_norm_inputs* inputs, const softdelta_gated_norm_outputs* outputs,
             const softdelta_gated_norm_options* options, const softdelta_execution* execution, const Use& use) {
    const Call call = check_call(inputs, options, execution);
    const auto out = check_outputs(call, read_struct("outputs", outputs));
    return use(call.how.engine, engines::NormForward{call.in, call.options, call.how.execution, out},
               &engines::Engine::norm_forward);
}

template <class Use>
auto backward(const softdelta_gated_norm_inputs* inputs, const softdelta_gated_norm_gradients* gradients,
              const softdelta_gated_norm_options* options, const softdelta_execution* execution, const Use& use) {
    const Call call = check_call(inputs, options, execution);
    const auto grad = check_gradients(call, read_struct("gradients", gradients));
    return use(call.how.engine, engines::NormBackward{call.in, call.options, call.how.execution, grad},
               &engines::Engine::norm_backward);
}

}  // namespace

}  // namespace softdelta::api

softdelta_status softdelta_gated_norm_forward(const softdelta_gated_norm_inputs* inputs,
                                              const softdelta_gated_norm_outputs* outputs,
                                              const softdelta_gated_norm_options* options,
                                              const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] { api::forward(inputs, outputs, options, execution, api::compute); });
}

softdelta_status softdelta_gated_norm_backward(const softdelta_gated_norm_inputs* inputs,
                                               const softdelta_gated_norm_gradients* gradients,
                                               const softdelta_gated_norm_options* options,
                                               const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] { api::backward(inputs, gradients, options, execution, api::compute); });
}

softdelta_status softdelta_gated_norm_forward_workspace(const softdelta_gated_norm_inputs* inputs,
                                                        const softdelta_gated_norm_outputs* outputs,
                                                        const softdelta_gated_norm_options* options,
                                                        const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard(
        [&] { api::result("bytes", bytes) = api::forward(inputs, outputs, options, execution, api::measure); });
}

softdelta_status softdelta_gated_norm_backward_workspace(const softdelta_gated_norm_inputs* inputs,
                                                         const softdelta_gated_norm_gradients* gradients,
                                                         const softdelta_gated_norm_options* options,
                                                         const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard(
        [&] { api::result("bytes", bytes) = api::backward(inputs, gradients, options, execution, api::measure); });
}

softdelta_status softdelta_gated_norm_forward_workspace_bound(const softdelta_gated_norm_inputs* inputs,
                                                              const softdelta_limits* limits,
                                                              const softdelta_gated_norm_options* options,
                                                              const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard([&] {
        const auto call = api::check_call(inputs, options, execution);
        const core::NormOutputs none;
        api::result("bytes", bytes) = api::workspace_bound_of(
            call.how.engine, engines::NormForward{call.in, call.options, call.how.execution, none},
            &engines::Engine::norm_forward, api::check_limits(limits));
    });
}
