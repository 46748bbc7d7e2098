// softdelta._native: between ranges of tokens and sets of keys.
#include <vector>

#include "python/native/call.h"
#include "python/native/operands.h"

namespace softdelta::python {

using namespace nb::literals;

namespace {

void summary(const nb::tuple& inputs, const nb::tuple& options, const nb::tuple& outputs, const char* engine,
             int threads, bool bf16) {
    Views views(bf16);
    const auto in = tensors_of<DeltaInputs>(views, inputs);
    const auto opt = delta_options_of(Options(options));
    const auto out = tensors_of<DeltaSummary>(views, outputs);
    const softdelta_execution execution = How{engine, threads, bf16}.execution(views);
    run([&] { return softdelta_delta_summary(&in, &out, &opt, &execution); });
}

void summary_backward(const nb::tuple& inputs, const nb::tuple& options, const nb::tuple& gradients, const char* engine,
                      int threads, bool bf16) {
    Views views(bf16);
    const auto in = tensors_of<DeltaInputs>(views, inputs);
    const auto opt = delta_options_of(Options(options));
    const auto grad = tensors_of<DeltaSummaryGradient>(views, gradients);
    const softdelta_execution execution = How{engine, threads, bf16}.execution(views);
    run([&] { return softdelta_delta_summary_backward(&in, &grad, &opt, &execution); });
}

template <auto function>
void fold(const nb::tuple& inputs, const nb::tuple& options, const nb::tuple& outputs, int threads, bool bf16) {
    Views views(bf16);
    const auto in = tensors_of<DeltaFoldInputs>(views, inputs);
    const auto opt = delta_options_of(Options(options));
    const auto out = tensors_of<DeltaFoldOutputs>(views, outputs);
    const softdelta_execution execution = How{nullptr, threads, bf16}.execution(views);
    run([&] { return function(&in, &out, &opt, &execution); });
}

// parts: ((o, lse), …), no more than views have room for.
void merge(const nb::tuple& parts, const nb::tuple& outputs, int threads, bool bf16) {
    constexpr std::size_t most = 8;
    if (parts.size() > most) throw nb::value_error("more than 8 parts");
    Views views(bf16);
    std::vector<const DLTensor*> o, lse;
    for (const nb::handle part : parts) {
        const auto pair = nb::cast<nb::tuple>(part);
        o.push_back(views.input("o", pair[0]));
        lse.push_back(views.input("lse", pair[1]));
    }
    const auto out = tensors_of<AttentionOutputs>(views, outputs);
    const softdelta_execution execution = How{nullptr, threads, bf16}.execution(views);
    const softdelta_attention_merge_inputs in{sizeof in, o.data(), lse.data(), static_cast<std::int64_t>(o.size())};
    run([&] { return softdelta_attention_merge(&in, &out, &execution); });
}

}  // namespace

void bind_ranges(nb::module_& m) {
    m.def("delta_summary", &summary, "inputs"_a, "options"_a, "outputs"_a, "engine"_a, "threads"_a, "bf16"_a);
    m.def("delta_summary_backward", &summary_backward, "inputs"_a, "options"_a, "gradients"_a, "engine"_a, "threads"_a,
          "bf16"_a);
    m.def("delta_fold", &fold<softdelta_delta_fold>, "inputs"_a, "options"_a, "outputs"_a, "threads"_a, "bf16"_a);
    m.def("delta_fold_backward", &fold<softdelta_delta_fold_backward>, "inputs"_a, "options"_a, "outputs"_a,
          "threads"_a, "bf16"_a);
    m.def("attention_merge", &merge, "parts"_a, "outputs"_a, "threads"_a, "bf16"_a);
}

}  // namespace softdelta::python
