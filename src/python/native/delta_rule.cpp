// softdelta._native: the delta rules.
#include "python/native/call.h"
#include "python/native/operands.h"

namespace softdelta::python {

using namespace nb::literals;

namespace {

// Python has it among the options: it belongs to a function, recurrent ones, and to its backward pass.
bool float_products_of(const nb::tuple& options) {
    constexpr std::size_t after_those_of_c = 11;
    return options.size() > after_those_of_c && nb::cast<bool>(options[after_those_of_c]);
}

// One function of the C interface on what Python gives; `measure` asks how much memory it needs.
template <class Results, auto function, auto measure>
void call(const nb::tuple& inputs, const nb::tuple& options, const nb::tuple& results, const char* engine, int threads,
          bool bf16, std::uintptr_t state_ready, std::uintptr_t state_done, std::uintptr_t kept,
          std::size_t kept_size) {
    Views views(bf16);
    const auto in = tensors_of<DeltaInputs>(views, inputs);
    const auto opt = delta_options_of(Options(options));
    const auto out = tensors_of<Results>(views, results);
    tell_of_f64(engine, {in.q, in.k, in.v});
    const How how{engine, threads, bf16, state_ready, state_done, kept, kept_size, float_products_of(options)};
    const softdelta_gpu gpu = how.gpu();
    softdelta_execution execution = how.execution(views);
    execution.gpu = &gpu;
    take_memory(views, execution, [&](std::size_t* bytes) { return measure(&in, &out, &opt, &execution, bytes); });
    run([&] { return function(&in, &out, &opt, &execution); });
}

std::size_t kept_size(const nb::tuple& inputs, const nb::tuple& options, const char* engine) {
    Views views(false);
    const auto in = tensors_of<DeltaInputs>(views, inputs);
    const auto opt = delta_options_of(Options(options));
    const softdelta_execution execution = How{engine, 0, false}.execution(views);
    std::size_t bytes = 0;
    run([&] { return softdelta_delta_kept_size(&in, &opt, &execution, &bytes); });
    return bytes;
}

}  // namespace

void bind_delta_rule(nb::module_& m) {
    m.def("delta_forward", &call<DeltaOutputs, softdelta_delta_forward, softdelta_delta_forward_workspace>, "inputs"_a,
          "options"_a, "outputs"_a, "engine"_a, "threads"_a, "bf16"_a, "state_ready"_a = 0, "state_done"_a = 0,
          "kept"_a = 0, "kept_size"_a = 0);
    m.def("delta_backward", &call<DeltaGradients, softdelta_delta_backward, softdelta_delta_backward_workspace>,
          "inputs"_a, "options"_a, "gradients"_a, "engine"_a, "threads"_a, "bf16"_a, "state_ready"_a = 0,
          "state_done"_a = 0, "kept"_a = 0, "kept_size"_a = 0);
    m.def("delta_kept_size", &kept_size, "inputs"_a, "options"_a, "engine"_a);
}

}  // namespace softdelta::python
