// softdelta._native: attention. With heads_first q, k, v, o and their gradients are [B, H, L, D].
#include "python/native/call.h"
#include "python/native/operands.h"

namespace softdelta::python {

using namespace nb::literals;

namespace {

// One function of the C interface on what Python gives; `measure` asks how much memory it needs.
template <class Results, auto function, auto measure>
void call(const nb::tuple& inputs, const nb::tuple& options, const nb::tuple& results, const char* engine, int threads,
          bool bf16, bool heads_first) {
    Views views(bf16);
    const auto in = tensors_of<AttentionInputs>(views, inputs, heads_first);
    const auto opt = attention_options_of(Options(options));
    const auto out = tensors_of<Results>(views, results, heads_first);
    tell_of_f64(engine, {in.q, in.k, in.v});
    softdelta_execution execution = How{engine, threads, bf16}.execution(views);
    take_memory(views, execution, [&](std::size_t* bytes) { return measure(&in, &out, &opt, &execution, bytes); });
    run([&] { return function(&in, &out, &opt, &execution); });
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("attention_forward",
          &call<AttentionOutputs, softdelta_attention_forward, softdelta_attention_forward_workspace>, "inputs"_a,
          "options"_a, "outputs"_a, "engine"_a, "threads"_a, "bf16"_a, "heads_first"_a = false);
    m.def("attention_backward",
          &call<AttentionGradients, softdelta_attention_backward, softdelta_attention_backward_workspace>, "inputs"_a,
          "options"_a, "gradients"_a, "engine"_a, "threads"_a, "bf16"_a, "heads_first"_a = false);
}

}  // namespace softdelta::python
