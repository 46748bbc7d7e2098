// softdelta._native: the causal convolution and the gated norm.
#include "python/native/call.h"
#include "python/native/operands.h"

namespace softdelta::python {

using namespace nb::literals;

namespace {

// Options beyond those of the C interface are Python's own.
softdelta_causal_convolution_options convolution_options(const nb::tuple& tuple) {
    Options read(tuple);
    return {sizeof(softdelta_causal_convolution_options), read.next<std::int32_t>(), 0};
}
softdelta_gated_norm_options norm_options(const nb::tuple& tuple) {
    Options read(tuple);
    return {sizeof(softdelta_gated_norm_options), read.next<std::int32_t>(), read.next<double>()};
}

// One function of the C interface on what Python gives.
template <class Inputs, class Results, auto options_of, auto function>
void call(const nb::tuple& inputs, const nb::tuple& options, const nb::tuple& results, const char* engine, int threads,
          bool bf16) {
    Views views(bf16);
    const auto in = tensors_of<Inputs>(views, inputs);
    const auto opt = options_of(options);
    const auto out = tensors_of<Results>(views, results);
    tell_of_f64(engine, {in.x});
    const softdelta_execution execution = How{engine, threads, bf16}.execution(views);
    run([&] { return function(&in, &out, &opt, &execution); });
}

template <auto function>
void bind(nb::module_& m, const char* name) {
    m.def(name, function, "inputs"_a, "options"_a, "results"_a, "engine"_a, "threads"_a, "bf16"_a);
}

}  // namespace

void bind_layer(nb::module_& m) {
    bind<call<ConvolutionInputs, ConvolutionOutputs, convolution_options, softdelta_causal_convolution_forward>>(
        m, "convolution_forward");
    bind<call<ConvolutionInputs, ConvolutionGradients, convolution_options, softdelta_causal_convolution_backward>>(
        m, "convolution_backward");
    bind<call<NormInputs, NormOutputs, norm_options, softdelta_gated_norm_forward>>(m, "norm_forward");
    bind<call<NormInputs, NormGradients, norm_options, softdelta_gated_norm_backward>>(m, "norm_backward");
}

}  // namespace softdelta::python
