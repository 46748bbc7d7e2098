// A plan of attention: one call, checked and prepared by its engine, that runs on the memory of each layer.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>

#include "api/attention.h"
#include "api/engines/table.h"
#include "api/error.h"
#include "api/operands.h"
#include "core/fork.h"

namespace softdelta::api {

namespace {

// A dense copy of lengths, or of the first columns of a table: what the caller has may change.
std::unique_ptr<std::byte[]> keep(Tensor& t, Index columns = 1) {
    if (!t) return {};
    const auto size = static_cast<Index>(core::size_of(t.dtype));
    auto copy = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(t.shape[0] * columns * size));
    for (Index row = 0, to = 0; row < t.shape[0]; ++row)
        for (Index column = 0; column < columns; ++column, to += size)
            std::memcpy(copy.get() + to,
                        static_cast<const std::byte*>(t.data) + (row * t.stride[0] + column * t.stride[1]) * size,
                        static_cast<std::size_t>(size));
    t.data = copy.get();
    t.stride = {columns, 1};
    if (t.rank == 2) t.shape[1] = columns;
    return copy;
}

std::string strides_text(Tensor t) {
    t.shape = t.stride;
    return shape_text(t);
}

// A tensor of a layer lies as the plan's does.
void expect_as_planned(const char* name, const Tensor& t, const Tensor& planned) {
    if (!planned) return expect_absent(name, t, "the plan has none");
    expect_present(name, t, "the plan has one");
    const auto refuse_other = [&](const char* what, const std::string& actual, const std::string& expected) {
        refuse(std::string(name) + ": " + what, actual, expected + ", as in the plan");
    };
    if (t.dtype != planned.dtype) refuse_other("type", core::name_of(t.dtype), core::name_of(planned.dtype));
    if (t.rank != planned.rank || t.shape != planned.shape) refuse_other("shape", shape_text(t), shape_text(planned));
    if (t.stride != planned.stride) refuse_other("strides", strides_text(t), strides_text(planned));
    if (t.device != planned.device) refuse_other("device", device_text(t.device), device_text(planned.device));
}

// Gives tensors the memory of a layer's, once these are as planned.
template <class Struct>
void take_memory(Struct& tensors, const Struct& planned, const Struct& layer) {
    for (const core::Operand<Struct>& operand : core::operands_of<Struct>) {
        const Tensor& t = layer.*operand.tensor;
        if (operand.kind == core::Kind::integer) {
            expect_absent(operand.name, t, "lengths and tables are the plan's");
            continue;
        }
        expect_as_planned(operand.name, t, planned.*operand.tensor);
        (tensors.*operand.tensor).data = t.data;
    }
}

}  // namespace

class AttentionPlan {
  public:
    AttentionPlan(const softdelta_attention_inputs* inputs, const softdelta_attention_outputs* outputs,
                  const softdelta_attention_options* options, const softdelta_execution* execution)
        : planned_(import_all<core::AttentionInputs>(read_struct("inputs", inputs))),
          call_(check_attention_call(inputs, options, execution)),
          out_(check_attention_outputs(call_, outputs)),
          planned_out_(out_) {
        const engines::Engine& engine = engine_for(call_.how.engine, pass(), &engines::Engine::attention_forward);
        if (engine.attention_forward.prepare == nullptr)
            throw core::Unsupported(std::string("engine ") + engine.name + " has no plans of attention");
        keep_lengths();
        prepared_ = engine.attention_forward.prepare(pass());
    }

    void forward(const softdelta_attention_inputs* inputs, const softdelta_attention_outputs* outputs) {
        if (core::forked() != forked_)
            throw core::InvalidArgument("plan was made before a fork, expected one of this process");
        if (busy_.exchange(true, std::memory_order_acquire))
            throw core::InvalidArgument("plan is in use by another call, expected one call at a time");
        const std::unique_ptr<std::atomic<bool>, Release> use(&busy_);
        take_memory(call_.in, planned_, import_all<core::AttentionInputs>(read_struct("inputs", inputs)));
        take_memory(out_, planned_out_, import_all<core::AttentionOutputs>(read_struct("outputs", outputs)));
        expect_results_apart(pass());
        const core::UseThreads threads(call_.how.execution.parallel_for);
        prepared_->run();
    }

  private:
    struct Release {
        void operator()(std::atomic<bool>* busy) const { busy->store(false, std::memory_order_release); }
    };

    engines::AttentionForward pass() const { return {call_.in, call_.options, call_.how.execution, out_}; }

    void keep_lengths() {
        core::AttentionInputs& in = call_.in;
        Index columns = 0;
        for (Index n = 0; in.block_table && n < in.block_table.shape[0]; ++n)
            columns = std::max(columns, (core::sequence(in, n).k_count + in.k.shape[1] - 1) / in.k.shape[1]);
        kept_ = {keep(in.cu_seqlens_q), keep(in.cu_seqlens_k), keep(in.cache_seqlens), keep(in.block_table, columns)};
    }

    core::AttentionInputs planned_;  // as callers see them
    AttentionCall call_;
    core::AttentionOutputs out_, planned_out_;
    std::array<std::unique_ptr<std::byte[]>, 4> kept_{};
    std::unique_ptr<engines::Prepared> prepared_;
    bool forked_ = core::forked();
    std::atomic<bool> busy_{false};
};

}  // namespace softdelta::api

struct softdelta_attention_plan {
    softdelta::api::AttentionPlan plan;
};

softdelta_status softdelta_attention_plan_create(const softdelta_attention_inputs* inputs,
                                                 const softdelta_attention_outputs* outputs,
                                                 const softdelta_attention_options* options,
                                                 const softdelta_execution* execution,
                                                 softdelta_attention_plan** plan) {
    using namespace softdelta;
    return api::guard([&] {
        auto*& made = api::result("plan", plan);
        made = new softdelta_attention_plan{{inputs, outputs, options, execution}};
    });
}

softdelta_status softdelta_attention_plan_forward(softdelta_attention_plan* plan,
                                                  const softdelta_attention_inputs* inputs,
                                                  const softdelta_attention_outputs* outputs) {
    using namespace softdelta;
    return api::guard([&] {
        if (plan == nullptr) api::refuse("plan", "null", "one that softdelta_attention_plan_create made");
        plan->plan.forward(inputs, outputs);
    });
}

void softdelta_attention_plan_destroy(softdelta_attention_plan* plan) {
    delete plan;
}
