// The delta-rule family: the checks of one call, then the engine.
#include <algorithm>
#include <cmath>

#include "api/delta_rule.h"
#include "api/engines/table.h"
#include "api/error.h"
#include "core/rule_facts.h"

namespace softdelta::api {

namespace {

// How many states there are, where a call has some.
Index count_states(const DeltaCall& c, const char* name) {
    if (c.in.cu_seqlens && !c.in.cu_seqlens.device.is_cpu())
        throw core::Unsupported(std::string(name) + ": their number is known where cu_seqlens lies on the host");
    Index chunks = 0;
    const Index sequences = c.in.cu_seqlens ? core::sequence_count(c.in) : 1;  // without packing: of each batch row
    for (Index n = 0; n < sequences && c.in.q.shape[0] > 0; ++n)
        chunks += (core::token_sequence(c.in.cu_seqlens, {}, c.in.q.shape[1], n).count + c.options.state_interval - 1) /
                  c.options.state_interval;
    return chunks;
}

core::DeltaOptions check_options(const softdelta_delta_options& c, const core::DeltaInputs& in) {
    core::DeltaOptions o;
    o.rule = check_rule(c.rule);
    o.scale = std::isnan(c.scale) ? 1 / std::sqrt(static_cast<double>(in.q.shape[3])) : c.scale;
    expect_f32("scale", o.scale);
    o.l2norm = expect_flag("use_qk_l2norm_in_kernel", c.use_qk_l2norm_in_kernel);
    const bool bounded = !std::isnan(c.lower_bound);
    if (expect_flag("use_gate_in_kernel", c.use_gate_in_kernel)) {
        expect_present("g", in.g, "use_gate_in_kernel makes the gate from it");
        if (!bounded) expect_present("A_log", in.A_log, "use_gate_in_kernel without lower_bound needs it");
        if (bounded && !(c.lower_bound <= 0 && fits_f32(c.lower_bound)))
            refuse("lower_bound", number_text(c.lower_bound), "0 or a negative number that f32 can hold");
        o.raw_gate = bounded ? core::RawGate::lower_bound : core::RawGate::softplus;
        o.lower_bound = bounded ? c.lower_bound : 0;
    } else {
        for (const auto& operand : core::operands_of<core::DeltaInputs>)
            if (operand.need == core::needs::raw_gate)
                expect_absent(operand.name, in.*operand.tensor, "use_gate_in_kernel is off");
        if (bounded) refuse("lower_bound", number_text(c.lower_bound), "none: use_gate_in_kernel is off");
    }
    const bool doubled = expect_flag("allow_neg_eigval", c.allow_neg_eigval);
    if (expect_flag("use_beta_sigmoid_in_kernel", c.use_beta_sigmoid_in_kernel)) {
        expect_present("beta", in.beta, "use_beta_sigmoid_in_kernel applies to it");
        o.raw_beta = doubled ? core::RawBeta::doubled_logits : core::RawBeta::logits;
    }
    o.state_v_first = expect_flag("state_v_first", c.state_v_first);
    if (c.state_interval < 1) refuse("state_interval", std::to_string(c.state_interval), "1 or more");
    o.state_interval = std::min(c.state_interval, std::max<Index>(in.q.shape[1], 1));  // no sum of both overflows
    if (c.head_order < SOFTDELTA_HEAD_ORDER_GROUPED || c.head_order > SOFTDELTA_HEAD_ORDER_TILED)
        refuse("head_order", std::to_string(c.head_order), "0 or 1");
    o.head_order = static_cast<core::HeadOrder>(c.head_order);
    if (c.steps < 0 || c.steps > 64) refuse("steps", std::to_string(c.steps), "1 to 64");
    o.steps = std::max(c.steps, 1);
    return o;
}

// What a rule takes and what it does not.
void check_rule_operands(const core::Rule& rule, const core::DeltaInputs& in) {
    for (const auto& operand : core::operands_of<core::DeltaInputs>) {
        const core::Need need = operand.need(rule);
        if (need.use == core::Use::optional) continue;
        const Tensor& t = in.*operand.tensor;
        if (static_cast<bool>(t) == (need.use == core::Use::required)) continue;
        const std::string why = std::string(rule.name) + " " + need.why;
        (t ? expect_absent : expect_present)(operand.name, t, why.c_str());
    }
    if (in.g) expect_absent("g_gamma", in.g_gamma, "g is given");
}

Sizes sizes_of(const core::DeltaInputs& in) {
    using enum core::Symbol;
    Sizes sizes;
    sizes[B] = sizes[N] = {in.q.shape[0], "batch"};
    sizes[T] = {in.q.shape[1], "tokens"};
    sizes[H] = {in.q.shape[2], "heads"};
    sizes[K] = {in.q.shape[3], "as q"};
    sizes[HV] = {in.v.shape[2], "value heads"};
    sizes[V] = {in.v.shape[3], "as v"};
    if (sizes[K].value < 1) refuse("q: dimension 3", "0", "1 or more");
    if (sizes[V].value < 1) refuse("v: dimension 3", "0", "1 or more");
    if (sizes[H].value < 1) refuse("q: dimension 2", "0", "1 or more (heads)");
    if (sizes[HV].value < 1 || sizes[HV].value % sizes[H].value != 0)
        refuse("v: dimension 2", std::to_string(sizes[HV].value),
               "a multiple of " + std::to_string(sizes[H].value) + " (heads)");
    expect_memory("q, v: a state [HV, K, V]", {sizes[HV].value, sizes[K].value, sizes[V].value});
    sizes[HV_times_K] = {sizes[HV].value * sizes[K].value, "value heads * K"};
    return sizes;
}

}  // namespace

const core::Rule& check_rule(std::int32_t rule) {
    if (const core::Rule* found = core::find_rule(rule)) return *found;
    for (const core::Gate gate : {core::Gate::none, core::Gate::scalar, core::Gate::channel})
        if (rule == core::number_of_facts(gate, core::Erase::nothing, true))
            refuse("rule", "one by facts that erases nothing along p", "own_p 0 where nothing is erased");
    refuse("rule", std::to_string(rule),
           "0 to " + std::to_string(core::rules.size() - 1) + ", or what softdelta_rule_of_facts gives");
}

void refuse_transposed(const char* name, const Tensor& state, const core::Shape& shape, const DeltaCall& c) {
    const bool v_first = c.options.state_v_first;
    const Index third = c.sizes[v_first ? core::Symbol::V : core::Symbol::K].value,
                last = c.sizes[v_first ? core::Symbol::K : core::Symbol::V].value;
    if (state.rank == shape.rank && third != last && state.shape[2] == last && state.shape[3] == third)
        refuse(std::string(name) + ": dimensions [2, 3]",
               "[" + std::to_string(last) + ", " + std::to_string(third) + "]",
               "[" + std::to_string(third) + ", " + std::to_string(last) + "]" +
                   (v_first ? " ([V, K], for state_v_first is set): it looks transposed"
                            : " ([K, V]): it looks transposed; set state_v_first"));
}

DeltaCall check_delta_call(const softdelta_delta_inputs* inputs, const softdelta_delta_options* options,
                           const softdelta_execution* execution) {
    DeltaCall c{.in = import_all<core::DeltaInputs>(read_struct("inputs", inputs))};
    const core::DeltaInputs& in = c.in;
    expect_required(in);
    expect_one_device(in, in.q.device);
    c.sizes = sizes_of(in);
    c.options = check_options(read_struct("options", options), in);
    expect_memory("q: rows of all steps", {c.sizes[core::Symbol::T].value, c.options.steps});
    c.sizes[core::Symbol::nT] = {c.sizes[core::Symbol::T].value * c.options.steps,
                                 c.options.steps == 1 ? "tokens" : "tokens * steps"};
    check_rule_operands(c.options.rule, in);
    if (in.cu_seqlens) {
        expect_size("q", in.q, 0, {1, "packed sequences"});
        expect_cumulative("cu_seqlens", in.cu_seqlens, in.q.shape[1], "tokens");
        c.sizes[core::Symbol::N] = {in.cu_seqlens.shape[0] - 1, "sequences"};
    }
    if (in.snapshot_indices) c.sizes[core::Symbol::NT] = {count_states(c, "snapshot_indices"), "chunks"};
    check_operands(c, in);
    c.how = check_execution(execution, Family::delta_rule);
    if ((c.how.handover.ready != nullptr || c.how.handover.done != nullptr) && in.q.device.is_cpu())
        refuse("execution.gpu.state_ready, state_done", "an event", "null: tensors lie on the CPU");
    if (c.how.execution.kept != nullptr && in.q.device.is_cpu())
        refuse("execution.gpu.kept", "memory", "null: tensors lie on the CPU");
    if (c.how.engine.named != nullptr && c.how.engine.named->check_delta_stages != nullptr)
        c.how.engine.named->check_delta_stages(c.in, c.options, c.how.execution);
    return c;
}

namespace {

core::DeltaOutputs check_outputs(DeltaCall& c, const softdelta_delta_outputs& given) {
    const auto out = import_all<core::DeltaOutputs>(given);
    expect_result("outputs", out, c.how.execution);
    expect_one_device(out, c.in.q.device);
    if (out.states) {
        expect_absent("snapshot_indices", c.in.snapshot_indices, "states returns all of them");
        c.sizes[core::Symbol::NT] = {count_states(c, "states"), "chunks"};
    }
    check_operands(c, out);
    expect_state_indices({c.in.state_indices, c.in.final_state_indices, c.in.has_initial_state, c.in.snapshot_indices},
                         c.in.initial_state, out.final_state);
    return out;
}

core::DeltaGradients check_gradients(DeltaCall& c, const softdelta_delta_gradients& given) {
    const auto g = import_all<core::DeltaGradients>(given);
    if (!g.d_o && !g.dfinal_state)
        refuse("d_o", "missing, and so is dfinal_state", "one of them: gradients start there");
    expect_result("gradients", g, c.how.execution);
    expect_no_pool(c.in);
    expect_one_device(g, c.in.q.device);
    if (g.states) expect_present("u", g.u, "states is given");
    if (g.u) expect_present("states", g.states, "u is given");
    if (g.states) c.sizes[core::Symbol::NT] = {count_states(c, "states"), "chunks"};
    check_operands(c, g);
    for (const auto& operand : core::operands_of<core::DeltaGradients>)
        if (operand.input != nullptr) expect_gradient(operand.name, g.*operand.tensor, c.in.*operand.input);
    return g;
}

// Checked calls, for use(engine, call, pass).
template <class Use>
auto forward(const softdelta_delta_inputs* inputs, const softdelta_delta_outputs* outputs,
             const softdelta_delta_options* options, const softdelta_execution* execution, const Use& use) {
    DeltaCall call = check_delta_call(inputs, options, execution);
    const auto out = check_outputs(call, read_struct("outputs", outputs));
    return use(call.how.engine,
               engines::DeltaForward{call.in, call.options, call.how.execution, out, call.how.handover},
               &engines::Engine::delta_forward);
}

template <class Use>
auto backward(const softdelta_delta_inputs* inputs, const softdelta_delta_gradients* gradients,
              const softdelta_delta_options* options, const softdelta_execution* execution, const Use& use) {
    DeltaCall call = check_delta_call(inputs, options, execution);
    const auto grad = check_gradients(call, read_struct("gradients", gradients));
    return use(call.how.engine,
               engines::DeltaBackward{call.in, call.options, call.how.execution, grad, call.how.handover},
               &engines::Engine::delta_backward);
}

}  // namespace

}  // namespace softdelta::api

softdelta_status softdelta_delta_forward(const softdelta_delta_inputs* inputs, const softdelta_delta_outputs* outputs,
                                         const softdelta_delta_options* options, const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] { api::forward(inputs, outputs, options, execution, api::compute); });
}

softdelta_status softdelta_delta_backward(const softdelta_delta_inputs* inputs,
                                          const softdelta_delta_gradients* gradients,
                                          const softdelta_delta_options* options,
                                          const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] { api::backward(inputs, gradients, options, execution, api::compute); });
}

softdelta_status softdelta_delta_kept_size(const softdelta_delta_inputs* inputs, const softdelta_delta_options* options,
                                           const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard([&] {
        std::size_t& size = api::result("bytes", bytes);
        const api::DeltaCall call = api::check_delta_call(inputs, options, execution);
        const core::DeltaOutputs none;
        const engines::Engine& engine =
            api::engine_for(call.how.engine, engines::DeltaForward{call.in, call.options, call.how.execution, none},
                            &engines::Engine::delta_forward);
        const bool keeps = engine.delta_kept_size != nullptr && !api::is_staged(engine, call.in.q.device);
        size = keeps ? engine.delta_kept_size(call.in, call.options) : 0;
    });
}

softdelta_status softdelta_delta_forward_workspace(const softdelta_delta_inputs* inputs,
                                                   const softdelta_delta_outputs* outputs,
                                                   const softdelta_delta_options* options,
                                                   const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard(
        [&] { api::result("bytes", bytes) = api::forward(inputs, outputs, options, execution, api::measure); });
}

softdelta_status softdelta_delta_backward_workspace(const softdelta_delta_inputs* inputs,
                                                    const softdelta_delta_gradients* gradients,
                                                    const softdelta_delta_options* options,
                                                    const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard(
        [&] { api::result("bytes", bytes) = api::backward(inputs, gradients, options, execution, api::measure); });
}

softdelta_status softdelta_delta_forward_workspace_bound(const softdelta_delta_inputs* inputs,
                                                         const softdelta_limits* limits,
                                                         const softdelta_delta_options* options,
                                                         const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard([&] {
        const auto call = api::check_delta_call(inputs, options, execution);
        const core::DeltaOutputs none;
        api::result("bytes", bytes) = api::workspace_bound_of(
            call.how.engine, engines::DeltaForward{call.in, call.options, call.how.execution, none},
            &engines::Engine::delta_forward, api::check_limits(limits));
    });
}
