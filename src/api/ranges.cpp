// Between ranges of tokens and sets of keys: the checks of one call, then src/distributed, whose summaries are calls of
// an engine.
#include <tuple>
#include <vector>

#include "api/delta_rule.h"
#include "api/engines/table.h"
#include "api/error.h"
#include "api/operands.h"
#include "distributed/fold.h"
#include "distributed/merge.h"
#include "distributed/summary.h"

namespace softdelta::api {

namespace {

void expect_cpu(const char* name, core::Device device) {
    if (!device.is_cpu())
        throw core::Unsupported(std::string(name) + " lies on " + device_text(device) + ", expected cpu");
}

// A call whose summary is wanted.
DeltaCall check_range(const softdelta_delta_inputs* inputs, const softdelta_delta_options* options,
                      const softdelta_execution* execution) {
    DeltaCall call = check_delta_call(inputs, options, execution);
    expect_cpu("q", call.in.q.device);
    expect_absent("initial_state", call.in.initial_state, "a summary holds for every state that enters");
    core::for_each_given(call.in, [](const auto& operand, const Tensor& t) {
        if (core::is_of_pools(operand.name)) expect_absent(operand.name, t, "a summary has no pool of states");
    });
    if (call.how.execution.workspace != nullptr) refuse("execution.workspace", "given", "null: a summary allocates");
    if (call.how.execution.kept != nullptr) refuse("execution.gpu.kept", "given", "null: nothing is kept of a summary");
    if (!call.how.execution.stages.empty())
        refuse("execution.stages.wanted", "given", "none: a summary is made of several calls");
    return call;
}

// Refuses results that share memory with another operand.
template <class Inputs, class Results>
void expect_apart(const Inputs& in, const Results& out) {
    Operands operands;
    operands.add(in);
    operands.add(out);
    operands.expect_apart();
}

void summarise(const DeltaCall& call, const core::DeltaSummary& out) {
    const core::DeltaOutputs offset = distributed::offset_results(out);
    const distributed::MapCall map(call.in, call.options, out);
    const engines::DeltaForward offset_call{call.in, call.options, call.how.execution, offset};
    const engines::DeltaForward map_call{map.in, map.options, call.how.execution, map.out};
    constexpr auto pass = &engines::Engine::delta_forward;
    const engines::Engine *of_offset = nullptr, *of_map = nullptr;  // both are known before anything is written
    if (out.E) of_offset = &engine_for(call.how.engine, offset_call, pass);
    if (out.M) of_map = &engine_for(call.how.engine, map_call, pass);
    const core::UseThreads threads(call.how.execution.parallel_for);
    if (of_offset != nullptr) (of_offset->*pass).run(offset_call);
    if (of_map != nullptr) (of_map->*pass).run(map_call);
}

struct FoldCall {
    core::DeltaFoldInputs in;
    core::DeltaFoldOutputs out;
    bool state_v_first;
    core::Execution execution;
};

template <class Struct>
void check_fold_operands(const Struct& tensors, const core::DeltaOptions& options, const Sizes& sizes) {
    core::for_each_given(tensors, [&](const core::Operand<Struct>& operand, const Tensor& t) {
        expect_operand(operand, t, core::shape_of(operand, options), sizes);
    });
}

FoldCall check_fold(const softdelta_delta_fold_inputs* inputs, const softdelta_delta_fold_outputs* outputs,
                    const softdelta_delta_options* given, const softdelta_execution* execution) {
    using enum core::Symbol;
    FoldCall call{};
    call.in = import_all<core::DeltaFoldInputs>(read_struct("inputs", inputs));
    const auto c = read_struct("options", given);
    core::DeltaOptions options;
    options.rule = check_rule(c.rule);
    options.state_v_first = call.state_v_first = expect_flag("state_v_first", c.state_v_first);
    call.execution = check_execution(execution).execution;
    const core::Shape shape = options.state_v_first ? "P N HV V K" : "P N HV K V";
    expect_present("M", call.in.M, "the map of each range");
    expect_present("E", call.in.E, core::text_of(shape).c_str());
    expect_rank("E", call.in.E, shape);
    expect_cpu("E", call.in.E.device);
    expect_one_device(call.in, call.in.E.device);
    const auto& size = call.in.E.shape;
    Sizes sizes;
    sizes[ranges] = {size[0], "ranges, as E"};
    sizes[N] = {size[1], "sequences, as E"};
    sizes[HV] = {size[2], "value heads, as E"};
    sizes[K] = {size[options.state_v_first ? 4 : 3], "as E"};
    sizes[V] = {size[options.state_v_first ? 3 : 4], "as E"};
    check_fold_operands(call.in, options, sizes);
    call.out = import_all<core::DeltaFoldOutputs>(read_struct("outputs", outputs));
    expect_result("outputs", call.out);
    expect_one_device(call.out, call.in.E.device);
    check_fold_operands(call.out, options, sizes);
    expect_apart(call.in, call.out);
    return call;
}

// "o[2]"
std::string entry_name(const char* name, std::int64_t r) {
    return std::string(name).append("[").append(std::to_string(r)).append("]");
}

// One tensor of each set of keys.
Tensor check_part(const char* name, const DLTensor* const* given, std::int64_t r, const core::Shape& shape) {
    const std::string label = entry_name(name, r);
    const Tensor t = import(label.c_str(), given == nullptr ? nullptr : given[r]);
    expect_present(label.c_str(), t, core::text_of(shape).c_str());
    expect_rank(label.c_str(), t, shape);
    expect_kind(label.c_str(), t, core::Kind::floating);
    expect_cpu(label.c_str(), t.device);
    return t;
}

}  // namespace

}  // namespace softdelta::api

softdelta_status softdelta_delta_summary(const softdelta_delta_inputs* inputs,
                                         const softdelta_delta_summary_outputs* outputs,
                                         const softdelta_delta_options* options, const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] {
        const api::DeltaCall call = api::check_range(inputs, options, execution);
        const auto out = api::import_all<core::DeltaSummary>(api::read_struct("outputs", outputs));
        api::expect_result("outputs", out);
        api::expect_one_device(out, call.in.q.device);
        api::check_operands(call, out);
        api::expect_apart(call.in, out);
        api::summarise(call, out);
    });
}

softdelta_status softdelta_delta_summary_backward(const softdelta_delta_inputs* inputs,
                                                  const softdelta_delta_summary_gradients* gradients,
                                                  const softdelta_delta_options* options,
                                                  const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] {
        const api::DeltaCall call = api::check_range(inputs, options, execution);
        const auto grad = api::import_all<core::DeltaSummaryGradient>(api::read_struct("gradients", gradients));
        api::expect_present("d_o", grad.d_o, "the gradient starts there");
        api::expect_result("gradients", grad);
        api::expect_one_device(grad, call.in.q.device);
        api::check_operands(call, grad);
        api::expect_apart(call.in, grad);
        const distributed::GradientCall derived(call.in, grad);
        const engines::DeltaBackward backward{derived.in, call.options, call.how.execution, derived.out};
        constexpr auto pass = &engines::Engine::delta_backward;
        const engines::Engine& engine = api::engine_for(call.how.engine, backward, pass);
        const core::UseThreads threads(call.how.execution.parallel_for);
        (engine.*pass).run(backward);
    });
}

softdelta_status softdelta_delta_fold(const softdelta_delta_fold_inputs* inputs,
                                      const softdelta_delta_fold_outputs* outputs,
                                      const softdelta_delta_options* options, const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] {
        const api::FoldCall call = api::check_fold(inputs, outputs, options, execution);
        const core::UseThreads threads(call.execution.parallel_for);
        distributed::fold(call.in, call.state_v_first, call.execution.threads, call.out);
    });
}

softdelta_status softdelta_delta_fold_backward(const softdelta_delta_fold_inputs* inputs,
                                               const softdelta_delta_fold_outputs* outputs,
                                               const softdelta_delta_options* options,
                                               const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] {
        const api::FoldCall call = api::check_fold(inputs, outputs, options, execution);
        const core::UseThreads threads(call.execution.parallel_for);
        distributed::fold_backward(call.in, call.state_v_first, call.execution.threads, call.out);
    });
}

softdelta_status softdelta_attention_merge(const softdelta_attention_merge_inputs* inputs,
                                           const softdelta_attention_outputs* outputs,
                                           const softdelta_execution* execution) {
    using namespace softdelta;
    using enum core::Symbol;
    return api::guard([&] {
        constexpr std::int64_t most = 1 << 20;
        const auto [size, o, lse, count] = api::read_struct("inputs", inputs);
        if (count < 1 || count > most) api::refuse("count", std::to_string(count), "1 to " + std::to_string(most));
        const core::Execution how = api::check_execution(execution).execution;
        std::vector<core::AttentionOutputs> parts;
        api::Sizes sizes;
        const auto& [of_o, of_lse] = core::operands_of<core::AttentionOutputs>;
        for (std::int64_t r = 0; r < count; ++r) {
            parts.push_back({api::check_part("o", o, r, of_o.shape), api::check_part("lse", lse, r, of_lse.shape)});
            const auto& shape = parts.front().o.shape;
            sizes[B] = {shape[0], "as o[0]"};
            sizes[Lq] = {shape[1], "as o[0]"};
            sizes[H] = {shape[2], "as o[0]"};
            sizes[Dv] = {shape[3], "as o[0]"};
            api::expect_shape(api::entry_name("o", r).c_str(), parts.back().o, of_o.shape, sizes);
            api::expect_shape(api::entry_name("lse", r).c_str(), parts.back().lse, of_lse.shape, sizes);
        }
        const auto out = api::import_all<core::AttentionOutputs>(api::read_struct("outputs", outputs));
        api::expect_result("outputs", out);
        api::expect_one_device(out, parts.front().o.device);
        for (const auto& operand : core::operands_of<core::AttentionOutputs>)
            api::expect_operand(operand, out.*operand.tensor, operand.shape, sizes);
        for (const core::AttentionOutputs& part : parts) {
            api::Operands operands;
            operands.add(out);
            operands.reads("a part's o", part.o);
            operands.reads("a part's lse", part.lse);
            operands.expect_apart();
        }
        const core::UseThreads threads(how.parallel_for);
        distributed::merge(parts, how.threads, out);
    });
}
