// softdelta._native: the delta rules.
#include "python/native/call.h"
#include "python/native/operands.h"

namespace softdelta::python {

using namespace nb::literals;

softdelta_delta_options delta_options_of(const nb::tuple& tuple) {
    Options read(tuple);
    return {sizeof(softdelta_delta_options),
            read.next<std::int32_t>(),
            read.next<double>(),
            read.next<bool>(),
            read.next<bool>(),
            read.next<double>(),
            read.next<bool>(),
            read.next<bool>(),
            read.next<bool>(),
            read.next<std::int64_t>(),
            read.next<std::int32_t>()};
}

namespace {

void forward(const nb::tuple& inputs, const nb::tuple& options, const nb::tuple& outputs, const char* engine,
             int threads, bool bf16, std::uintptr_t state_ready, std::uintptr_t state_done) {
    Views views(bf16);
    const auto in = tensors_of<DeltaInputs>(views, inputs);
    const auto opt = delta_options_of(options);
    const auto out = tensors_of<DeltaOutputs>(views, outputs);
    softdelta_execution execution = How{engine, threads, bf16, state_ready, state_done}.execution(views);
    take_memory(views, execution, [&](std::size_t* bytes) {
        return softdelta_delta_forward_workspace(&in, &opt, &execution, &out, bytes);
    });
    run([&] { return softdelta_delta_forward(&in, &opt, &execution, &out); });
}

void backward(const nb::tuple& inputs, const nb::tuple& options, const nb::tuple& gradients, const char* engine,
              int threads, bool bf16, std::uintptr_t state_ready, std::uintptr_t state_done) {
    Views views(bf16);
    const auto in = tensors_of<DeltaInputs>(views, inputs);
    const auto opt = delta_options_of(options);
    const auto grad = tensors_of<DeltaGradients>(views, gradients);
    softdelta_execution execution = How{engine, threads, bf16, state_ready, state_done}.execution(views);
    take_memory(views, execution, [&](std::size_t* bytes) {
        return softdelta_delta_backward_workspace(&in, &opt, &execution, &grad, bytes);
    });
    run([&] { return softdelta_delta_backward(&in, &opt, &execution, &grad); });
}

}  // namespace

void bind_delta_rule(nb::module_& m) {
    m.def("delta_forward", &forward, "inputs"_a, "options"_a, "outputs"_a, "engine"_a, "threads"_a, "bf16"_a,
          "state_ready"_a = 0, "state_done"_a = 0);
    m.def("delta_backward", &backward, "inputs"_a, "options"_a, "gradients"_a, "engine"_a, "threads"_a, "bf16"_a,
          "state_ready"_a = 0, "state_done"_a = 0);
}

}  // namespace softdelta::python
