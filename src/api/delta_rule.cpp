// The delta-rule family: the checks of one call, then the engine.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "api/check.h"
#include "api/engines.h"
#include "api/error.h"
#include "core/delta_rule.h"

namespace softdelta::api {

namespace {

struct Call {
    core::DeltaInputs in;
    core::DeltaOptions options;
    core::Execution execution;
    WantedEngine engine;
    Size batch, tokens, heads, value_heads, key_size, value_size, sequences;  // B T H HV K V N
};

core::DeltaInputs import_inputs(const softdelta_delta_inputs& c) {
    core::DeltaInputs in;
    in.q = import("q", c.q);
    in.k = import("k", c.k);
    in.p = import("p", c.p);
    in.v = import("v", c.v);
    in.g = import("g", c.g);
    in.g_gamma = import("g_gamma", c.g_gamma);
    in.beta = import("beta", c.beta);
    in.initial_state = import("initial_state", c.initial_state);
    in.A_log = import("A_log", c.A_log);
    in.dt_bias = import("dt_bias", c.dt_bias);
    in.cu_seqlens = import("cu_seqlens", c.cu_seqlens);
    in.state_indices = import("state_indices", c.state_indices);
    return in;
}

core::DeltaOptions check_options(const softdelta_delta_options& c, const core::DeltaInputs& in) {
    if (c.rule < SOFTDELTA_DELTA_RULE || c.rule > SOFTDELTA_SIMPLE_GLA)
        refuse("rule", std::to_string(c.rule), "0 to 4");
    core::DeltaOptions o;
    o.rule = core::rules[static_cast<std::size_t>(c.rule)];
    o.scale = std::isnan(c.scale) ? 1 / std::sqrt(static_cast<double>(in.q.shape[3])) : c.scale;
    expect_finite("scale", o.scale);
    o.l2norm = expect_flag("use_qk_l2norm_in_kernel", c.use_qk_l2norm_in_kernel);
    const bool bounded = !std::isnan(c.lower_bound);
    if (expect_flag("use_gate_in_kernel", c.use_gate_in_kernel)) {
        expect_present("g", in.g, "use_gate_in_kernel makes the gate from it");
        if (!bounded) expect_present("A_log", in.A_log, "use_gate_in_kernel without lower_bound needs it");
        if (bounded) expect_finite("lower_bound", c.lower_bound);
        o.raw_gate = bounded ? core::RawGate::lower_bound : core::RawGate::softplus;
        o.lower_bound = bounded ? c.lower_bound : 0;
    } else {
        expect_absent("A_log", in.A_log, "use_gate_in_kernel is off");
        expect_absent("dt_bias", in.dt_bias, "use_gate_in_kernel is off");
        if (bounded) refuse("lower_bound", std::to_string(c.lower_bound), "none: use_gate_in_kernel is off");
    }
    const bool doubled = expect_flag("allow_neg_eigval", c.allow_neg_eigval);
    if (expect_flag("use_beta_sigmoid_in_kernel", c.use_beta_sigmoid_in_kernel)) {
        expect_present("beta", in.beta, "use_beta_sigmoid_in_kernel applies to it");
        o.raw_beta = doubled ? core::RawBeta::doubled_logits : core::RawBeta::logits;
    }
    o.state_v_first = expect_flag("state_v_first", c.state_v_first);
    if (c.state_interval < 1) refuse("state_interval", std::to_string(c.state_interval), "1 or more");
    o.state_interval = std::min(c.state_interval, std::max<Index>(in.q.shape[1], 1));  // no sum of both overflows
    return o;
}

// What a rule takes and what it does not.
void check_rule_operands(const core::Rule& rule, const core::DeltaInputs& in) {
    const std::string name(rule.name);
    if (rule.gate == core::Gate::none) expect_absent("g", in.g, (name + " has no gate").c_str());
    if (!rule.gate_optional) expect_present("g", in.g, (name + " has a gate").c_str());
    const bool constant_gate = rule.erase == core::Erase::nothing;
    if (!constant_gate) expect_absent("g_gamma", in.g_gamma, "only simple_gla takes a constant gate");
    if (in.g) expect_absent("g_gamma", in.g_gamma, "g is given");
    if (rule.own_p) expect_present("p", in.p, (name + " erases along it").c_str());
    if (!rule.own_p) expect_absent("p", in.p, (name + " erases along k").c_str());
    if (rule.erase == core::Erase::nothing) expect_absent("beta", in.beta, (name + " has no beta").c_str());
}

void check_state_indices(const Call& c, const Tensor& state) {
    const Tensor& indices = c.in.state_indices;
    expect_integer("state_indices", indices);
    expect_shape("state_indices", indices, "[N]", {c.sequences});
    if (!indices || !state || !indices.device.is_cpu()) return;
    std::vector<bool> used(static_cast<std::size_t>(state.shape[0]), false);
    for (Index n = 0; n < indices.shape[0]; ++n) {
        const Index i = core::load_index(indices, n * indices.stride[0]);
        const std::string label = "state_indices[" + std::to_string(n) + "]";
        if (i == -1) continue;
        if (i < 0 || i >= state.shape[0])
            refuse(label, std::to_string(i),
                   "0 to " + std::to_string(state.shape[0] - 1) + ", or -1 where there is no sequence");
        if (used[static_cast<std::size_t>(i)]) refuse(label, std::to_string(i), "an entry that no other sequence uses");
        used[static_cast<std::size_t>(i)] = true;
    }
}

// A state [N, HV, K, V] or [N, HV, V, K]; a pool has any number of entries.
void check_state(const Call& c, const char* name, const Tensor& state) {
    expect_float(name, state);
    const bool v_first = c.options.state_v_first;
    expect_rank(name, state, 4, v_first ? "[N, HV, V, K]" : "[N, HV, K, V]");
    if (!c.in.state_indices) expect_size(name, state, 0, {c.sequences});
    expect_size(name, state, 1, {c.value_heads});
    const Index third = (v_first ? c.value_size : c.key_size).value, last = (v_first ? c.key_size : c.value_size).value;
    if (state && third != last && state.shape[2] == last && state.shape[3] == third)
        refuse(std::string(name) + ": dimensions [2, 3]",
               "[" + std::to_string(last) + ", " + std::to_string(third) + "]",
               "[" + std::to_string(third) + ", " + std::to_string(last) + "]" +
                   (v_first ? " ([V, K], for state_v_first is set): it looks transposed"
                            : " ([K, V]): it looks transposed; set state_v_first"));
    expect_size(name, state, 2, {v_first ? c.value_size : c.key_size});
    expect_size(name, state, 3, {v_first ? c.key_size : c.value_size});
}

Call check_call(const softdelta_delta_inputs* inputs, const softdelta_delta_options* options,
                const softdelta_execution* execution) {
    Call c{};
    c.in = import_inputs(read_struct("inputs", inputs));
    const core::DeltaInputs& in = c.in;
    expect_present("q", in.q, "[B, T, H, K]");
    expect_present("k", in.k, "[B, T, H, K]");
    expect_present("v", in.v, "[B, T, HV, V]");
    expect_rank("q", in.q, 4, "[B, T, H, K]");
    expect_rank("v", in.v, 4, "[B, T, HV, V]");
    expect_one_device(in, in.q.device);
    c.batch = {in.q.shape[0], "batch"};
    c.tokens = {in.q.shape[1], "tokens"};
    c.heads = {in.q.shape[2], "heads"};
    c.key_size = {in.q.shape[3], "as q"};
    c.value_heads = {in.v.shape[2], "value heads"};
    c.value_size = {in.v.shape[3], "as v"};
    c.sequences = c.batch;
    if (c.key_size.value < 1) refuse("q: dimension 3", "0", "1 or more");
    if (c.value_size.value < 1) refuse("v: dimension 3", "0", "1 or more");
    if (c.heads.value < 1) refuse("q: dimension 2", "0", "1 or more (heads)");
    if (c.value_heads.value < 1 || c.value_heads.value % c.heads.value != 0)
        refuse("v: dimension 2", std::to_string(c.value_heads.value),
               "a multiple of " + std::to_string(c.heads.value) + " (heads)");

    expect_memory("q, v: a state [HV, K, V]", {c.value_heads.value, c.key_size.value, c.value_size.value});

    c.options = check_options(read_struct("options", options), in);
    const core::Rule& rule = c.options.rule;
    check_rule_operands(rule, in);
    for (const auto& [name, t] : {std::pair{"q", &in.q}, {"k", &in.k}, {"p", &in.p}}) {
        expect_float(name, *t);
        expect_shape(name, *t, "[B, T, H, K]", {c.batch, c.tokens, c.heads, c.key_size});
    }
    expect_float("v", in.v);
    expect_shape("v", in.v, "[B, T, HV, V]", {c.batch, c.tokens, c.value_heads, c.value_size});
    for (const auto& [name, t] : {std::pair{"g", &in.g},
                                  {"beta", &in.beta},
                                  {"g_gamma", &in.g_gamma},
                                  {"A_log", &in.A_log},
                                  {"dt_bias", &in.dt_bias}})
        expect_float(name, *t);
    const bool channel = rule.gate == core::Gate::channel;
    if (channel)
        expect_shape("g", in.g, "[B, T, HV, K]", {c.batch, c.tokens, c.value_heads, c.key_size});
    else
        expect_shape("g", in.g, "[B, T, HV]", {c.batch, c.tokens, c.value_heads});
    expect_shape("beta", in.beta, "[B, T, HV]", {c.batch, c.tokens, c.value_heads});
    expect_shape("g_gamma", in.g_gamma, "[HV]", {c.value_heads});
    expect_shape("A_log", in.A_log, "[HV]", {c.value_heads});
    expect_shape("dt_bias", in.dt_bias, channel ? "[HV*K]" : "[HV]",
                 {channel ? Size{c.value_heads.value * c.key_size.value, "value heads * K"} : c.value_heads});
    if (in.cu_seqlens) {
        expect_size("q", in.q, 0, {{1, "packed sequences"}});
        expect_cumulative("cu_seqlens", in.cu_seqlens, c.tokens.value, "tokens");
        c.sequences = {in.cu_seqlens.shape[0] - 1, "sequences"};
    }
    check_state(c, "initial_state", in.initial_state);
    check_state_indices(c, in.initial_state);
    std::tie(c.execution, c.engine) = check_execution(execution);
    if (c.engine.named != nullptr && c.engine.named->check_delta_stages != nullptr)
        c.engine.named->check_delta_stages(c.in, c.options, c.execution);
    return c;
}

Index chunk_count(const Call& c) {
    Index chunks = 0;
    const Index sequences = c.in.cu_seqlens ? c.sequences.value : 1;  // without packing: of each batch row
    for (Index n = 0; n < sequences && c.batch.value > 0; ++n)
        chunks += (core::sequence(c.in, n).count + c.options.state_interval - 1) / c.options.state_interval;
    return chunks;
}

core::DeltaOutputs check_outputs(const Call& c, const softdelta_delta_outputs& given) {
    const core::DeltaOutputs out{import("o", given.o), import("final_state", given.final_state),
                                 import("states", given.states)};
    expect_one_device(out, c.in.q.device);
    expect_result("o", out.o, "[B, T, HV, V]", {c.batch, c.tokens, c.value_heads, c.value_size});
    check_state(c, "final_state", out.final_state);
    expect_writable("final_state", out.final_state);
    check_state_indices(c, out.final_state);
    if (out.states) {
        if (c.in.cu_seqlens && !c.in.cu_seqlens.device.is_cpu())
            throw core::Unsupported("states: their number is known where cu_seqlens lies on the host");
        const bool v_first = c.options.state_v_first;
        expect_result("states", out.states, v_first ? "[B, NT, HV, V, K]" : "[B, NT, HV, K, V]",
                      {c.batch,
                       {chunk_count(c), "chunks"},
                       c.value_heads,
                       v_first ? c.value_size : c.key_size,
                       v_first ? c.key_size : c.value_size});
    }
    return out;
}

core::DeltaGradients check_gradients(const Call& c, const softdelta_delta_gradients& given) {
    core::DeltaGradients g;
    g.d_o = import("d_o", given.d_o);
    g.dfinal_state = import("dfinal_state", given.dfinal_state);
    if (!g.d_o && !g.dfinal_state)
        refuse("d_o", "missing, and so is dfinal_state", "one of them: gradients start there");
    expect_float("d_o", g.d_o);
    expect_shape("d_o", g.d_o, "[B, T, HV, V]", {c.batch, c.tokens, c.value_heads, c.value_size});
    if (c.in.state_indices) throw core::Unsupported("state_indices: there are no gradients through a pool of states");
    check_state(c, "dfinal_state", g.dfinal_state);
    const auto wanted = [](const char* name, Tensor& field, DLTensor* tensor, const Tensor& input) {
        field = import(name, tensor);
        expect_gradient(name, field, input);
    };
    wanted("dq", g.dq, given.dq, c.in.q);
    wanted("dk", g.dk, given.dk, c.in.k);
    wanted("dp", g.dp, given.dp, c.in.p);
    wanted("dv", g.dv, given.dv, c.in.v);
    wanted("dg", g.dg, given.dg, c.in.g);
    wanted("dg_gamma", g.dg_gamma, given.dg_gamma, c.in.g_gamma);
    wanted("dbeta", g.dbeta, given.dbeta, c.in.beta);
    wanted("dA_log", g.dA_log, given.dA_log, c.in.A_log);
    wanted("ddt_bias", g.ddt_bias, given.ddt_bias, c.in.dt_bias);
    g.dinitial_state = import("dinitial_state", given.dinitial_state);
    check_state(c, "dinitial_state", g.dinitial_state);
    expect_writable("dinitial_state", g.dinitial_state);
    expect_one_device(g, c.in.q.device);
    return g;
}

}  // namespace

}  // namespace softdelta::api

softdelta_status softdelta_delta_forward(const softdelta_delta_inputs* inputs, const softdelta_delta_options* options,
                                         const softdelta_execution* execution, const softdelta_delta_outputs* outputs) {
    using namespace softdelta;
    return api::guard([&] {
        const api::Call call = api::check_call(inputs, options, execution);
        const auto out = api::check_outputs(call, api::read_struct("outputs", outputs));
        api::run_pass(call.engine, engines::DeltaForward{call.in, call.options, call.execution, out},
                      &engines::Engine::delta_forward);
    });
}

softdelta_status softdelta_delta_backward(const softdelta_delta_inputs* inputs, const softdelta_delta_options* options,
                                          const softdelta_execution* execution,
                                          const softdelta_delta_gradients* gradients) {
    using namespace softdelta;
    return api::guard([&] {
        const api::Call call = api::check_call(inputs, options, execution);
        const auto grad = api::check_gradients(call, api::read_struct("gradients", gradients));
        api::run_pass(call.engine, engines::DeltaBackward{call.in, call.options, call.execution, grad},
                      &engines::Engine::delta_backward);
    });
}

softdelta_status softdelta_delta_forward_workspace(const softdelta_delta_inputs* inputs,
                                                   const softdelta_delta_options* options,
                                                   const softdelta_execution* execution,
                                                   const softdelta_delta_outputs* outputs, size_t* bytes) {
    using namespace softdelta;
    return api::guard([&] {
        const api::Call call = api::check_call(inputs, options, execution);
        const auto out = api::check_outputs(call, api::read_struct("outputs", outputs));
        api::result("bytes", bytes) =
            api::workspace_of(call.engine, engines::DeltaForward{call.in, call.options, call.execution, out},
                              &engines::Engine::delta_forward);
    });
}

softdelta_status softdelta_delta_backward_workspace(const softdelta_delta_inputs* inputs,
                                                    const softdelta_delta_options* options,
                                                    const softdelta_execution* execution,
                                                    const softdelta_delta_gradients* gradients, size_t* bytes) {
    using namespace softdelta;
    return api::guard([&] {
        const api::Call call = api::check_call(inputs, options, execution);
        const auto grad = api::check_gradients(call, api::read_struct("gradients", gradients));
        api::result("bytes", bytes) =
            api::workspace_of(call.engine, engines::DeltaBackward{call.in, call.options, call.execution, grad},
                              &engines::Engine::delta_backward);
    });
}
