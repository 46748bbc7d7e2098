#include "cli/plan.h"

namespace softdelta::cli {

namespace {

using io::MakeOptions;
using Plan = std::vector<std::pair<std::string, MakeOptions>>;

// Adds a class to the plan: the base with a change, and a seed of its own.
auto adder(Plan& plan, const MakeOptions& base) {
    return [&](const std::string& name, auto change) {
        MakeOptions options = base;
        options.seed = base.seed + plan.size();
        change(options);
        plan.emplace_back(name, options);
    };
}

Plan delta_plan(MakeOptions o) {
    o.batch = 2, o.heads = 2, o.value_heads = 4, o.tokens = 147, o.key_size = 16, o.value_size = 24;
    Plan plan;
    const auto add = adder(plan, o);
    add("ordinary", [](MakeOptions& m) { m.batch = 3; });
    add("exact", [](MakeOptions& m) { m.keys_like = "few", m.gate = "halves", m.l2norm = false, m.scale = 0.5; });
    add("slow", [](MakeOptions& m) {
        m.tokens = 333, m.gate = "spread", m.gate_value = -6e-3, m.l2norm = false, m.most_beta = 0.3;
    });
    add("alike", [](MakeOptions& m) {
        m.keys_like = "alike", m.gate = "spread", m.gate_value = -0.02, m.key_size = 32, m.scale = 0.3;
    });
    add("steep", [](MakeOptions& m) { m.gate = "steep"; });
    add("rising", [](MakeOptions& m) { m.gate = "spread", m.gate_value = 0.02; });
    add("large-beta", [](MakeOptions& m) { m.most_beta = 2; });
    add("packed", [](MakeOptions& m) { m.lengths = {41, 64, 1, 70, 93}; });
    add("stateless", [](MakeOptions& m) { m.initial_state = false; });
    add("wide", [](MakeOptions& m) { m.batch = 1, m.tokens = 77, m.key_size = 72, m.value_size = 104; });
    add("heads", [](MakeOptions& m) { m.tokens = 63, m.heads = 5, m.value_heads = 10; });
    for (const int tokens : {1, 64, 65})
        add("length-" + std::to_string(tokens), [&](MakeOptions& m) { m.tokens = tokens; });
    add("length-4097", [](MakeOptions& m) {
        m.batch = 1, m.tokens = 4097, m.heads = 1, m.value_heads = 2, m.gate = "spread", m.gate_value = -4e-4;
        m.l2norm = false, m.most_beta = 0.03;
    });
    if (o.op == "simple_gla" || o.op == "delta_rule")  // whose kernels have no groups of value heads
        for (auto& [name, options] : plan) options.value_heads = options.heads;
    return plan;
}

Plan attention_plan(MakeOptions o) {
    o.batch = 2, o.heads = 4, o.key_heads = 2, o.queries = 77, o.keys = 98, o.key_size = 16, o.value_size = 24;
    Plan plan;
    const auto add = adder(plan, o);
    add("causal", [](MakeOptions& m) { m.batch = 3, m.causal = "bottom_right"; });
    add("top-left", [](MakeOptions& m) { m.causal = "top_left"; });
    add("large-scores", [](MakeOptions& m) { m.scale = 12; });
    add("dead-rows", [](MakeOptions& m) { m.queries = 150, m.mask = "dead_rows"; });
    add("finite-mask", [](MakeOptions& m) { m.bias = "padding", m.mask_value = -3e4; });
    add("bias", [](MakeOptions& m) { m.bias = "head"; });
    add("window", [](MakeOptions& m) {
        m.queries = 140, m.keys = 150, m.window_left = 20, m.window_right = 0, m.causal = "bottom_right";
    });
    add("softcap", [](MakeOptions& m) { m.softcap = 2; });
    add("sink", [](MakeOptions& m) { m.sink = true; });
    add("alibi", [](MakeOptions& m) { m.alibi = true; });
    add("packed", [](MakeOptions& m) { m.lengths = {37, 64, 1, 70}, m.key_lengths = {41, 64, 9, 93}; });
    add("wide", [](MakeOptions& m) { m.batch = 1, m.heads = 2, m.key_heads = 1, m.key_size = m.value_size = 136; });
    add("heads", [](MakeOptions& m) { m.queries = 63, m.heads = 12, m.key_heads = 6; });
    for (const int n : {1, 64, 65})
        add("length-" + std::to_string(n), [&](MakeOptions& m) { m.queries = n, m.keys = 65; });
    add("length-4097", [](MakeOptions& m) { m.batch = 1, m.queries = 5, m.keys = 4097; });
    return plan;
}

}  // namespace

Plan gate_plan(const MakeOptions& base) {
    MakeOptions o;
    o.op = base.op, o.seed = base.seed, o.dtype = base.dtype, o.gradients = base.gradients;
    return o.op == "attention" ? attention_plan(o) : delta_plan(o);
}

}  // namespace softdelta::cli
