// softdelta._native: attention. With heads_first q, k, v, o and their gradients are [B, H, L, D].
#include <memory>

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

// It holds no Python object, for it reads nothing of the call that it was made of.
class Plan {
  public:
    Plan(const nb::tuple& inputs, const nb::tuple& options, const nb::tuple& outputs, const char* engine, int threads,
         bool bf16, bool heads_first)
        : heads_first_(heads_first) {
        Views views(bf16);
        const auto in = tensors_of<AttentionInputs>(views, inputs, heads_first);
        const auto opt = attention_options_of(Options(options));
        const auto out = tensors_of<AttentionOutputs>(views, outputs, heads_first);
        const softdelta_execution execution = How{engine, threads, bf16}.execution(views);
        softdelta_attention_plan* plan = nullptr;
        run([&] { return softdelta_attention_plan_create(&in, &out, &opt, &execution, &plan); });
        plan_.reset(plan);
    }
    void forward(const nb::tuple& inputs, const nb::tuple& outputs, bool bf16) {
        Views views(bf16);
        const auto in = tensors_of<AttentionInputs>(views, inputs, heads_first_);
        const auto out = tensors_of<AttentionOutputs>(views, outputs, heads_first_);
        run([&] { return softdelta_attention_plan_forward(plan_.get(), &in, &out); });
    }

  private:
    struct Destroy {
        void operator()(softdelta_attention_plan* plan) const { softdelta_attention_plan_destroy(plan); }
    };
    std::unique_ptr<softdelta_attention_plan, Destroy> plan_;
    bool heads_first_;
};

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("attention_forward",
          &call<AttentionOutputs, softdelta_attention_forward, softdelta_attention_forward_workspace>, "inputs"_a,
          "options"_a, "outputs"_a, "engine"_a, "threads"_a, "bf16"_a, "heads_first"_a = false);
    m.def("attention_backward",
          &call<AttentionGradients, softdelta_attention_backward, softdelta_attention_backward_workspace>, "inputs"_a,
          "options"_a, "gradients"_a, "engine"_a, "threads"_a, "bf16"_a, "heads_first"_a = false);
    nb::class_<Plan>(m, "AttentionPlan")
        .def(nb::init<const nb::tuple&, const nb::tuple&, const nb::tuple&, const char*, int, bool, bool>(), "inputs"_a,
             "options"_a, "outputs"_a, "engine"_a, "threads"_a, "bf16"_a, "heads_first"_a = false)
        .def("forward", &Plan::forward, "inputs"_a, "outputs"_a, "bf16"_a);
}

}  // namespace softdelta::python
