#include "judge/draw_case.h"

#include <limits>

namespace softdelta::test {

namespace {

std::vector<std::int64_t> draw_lengths(Draw& draw, std::size_t count) {
    std::vector<std::int64_t> lengths(count);
    for (std::int64_t& length : lengths) length = draw.one_in(4) ? 0 : draw.between(1, 90);
    if (lengths.front() == 0) lengths.front() = draw.between(1, 90);
    return lengths;
}

void draw_attention(Draw& draw, io::MakeOptions& o) {
    o.key_heads = draw.between(1, 2);
    o.heads = o.key_heads * draw.of({1, 1, 2, 3});
    o.key_size = draw.of({5, 16, 32, 64});
    o.value_size = draw.of({7, 16, 48, 64});
    o.queries = draw.of({draw.between(1, 8), draw.between(9, 150), draw.between(9, 150)});
    o.keys = draw.of({o.queries, draw.between(1, 200)});
    if (draw.one_in(4)) {
        o.lengths = draw_lengths(draw, static_cast<std::size_t>(draw.between(1, 4)));
        o.key_lengths = draw.one_in(2) ? o.lengths : draw_lengths(draw, o.lengths.size());
    }
    o.causal = draw.of({"none", "none", "top_left", "bottom_right"});
    if (draw.one_in(4)) o.window_left = draw.between(0, 80);
    if (draw.one_in(4)) o.window_right = draw.between(0, 80);
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();  // wider than any call
    if (draw.one_in(16)) o.window_left = most - draw.between(0, 1);
    if (draw.one_in(16)) o.window_right = most - draw.between(0, 1);
    if (draw.one_in(4)) o.softcap = static_cast<double>(draw.of({1, 5, 30}));
    o.mask = draw.of({"none", "none", "random", "padding", "dead_rows"});
    o.bias = draw.of({"none", "none", "full", "row", "head", "key_head"});
    o.sink = draw.one_in(3);
    if (o.bias != "none" && draw.one_in(4)) o.top_w = draw.between(1, 40);
    if (o.bias == "none" && o.lengths.empty() && draw.one_in(4)) {
        o.bias = "padding";
        o.mask_value = draw.of({-1e4, -1e9, -1e10, -3.4e38, 1e10});
    }
    o.alibi = o.top_w < 0 && o.bias != "padding" && draw.one_in(6);  // top_w: f32 and f64 may differ in the last key
    o.bias_slopes = o.bias != "none" && draw.one_in(4);
}

void draw_gate(Draw& draw, io::MakeOptions& o) {
    o.gate = draw.of({"mild", "mild", "steep", "wipe", "uniform", "uniform", "spread"});
    o.gate_value = draw.of({-0.02, -1.0, -5.0, -20.0});
    if (o.op == "simple_gla" && draw.one_in(3)) {
        o.gate = draw.of({"constant", "none"});
    } else if (o.op != "delta_rule" && draw.one_in(4)) {
        o.gate = "mild";
        o.raw_gate = draw.of({"softplus", "lower_bound"});
        o.lower_bound = draw.of({-0.1, -5.0});
    }
}

void draw_delta(Draw& draw, io::MakeOptions& o) {
    o.heads = draw.between(1, 2);
    o.value_heads = o.heads * draw.of({1, 1, 2, 3});
    o.key_size = draw.of({5, 16, 32, 64});
    o.value_size = draw.of({7, 16, 32, 48});
    o.tokens = draw.of({draw.between(1, 8), draw.between(9, 160), draw.between(9, 160)});
    if (draw.one_in(4)) o.lengths = draw_lengths(draw, static_cast<std::size_t>(draw.between(1, 4)));
    draw_gate(draw, o);
    o.l2norm = !draw.one_in(3);
    o.initial_state = !draw.one_in(3);
    o.state_v_first = draw.one_in(3);
    o.beta_logits = o.op != "simple_gla" && o.op != "gla" && draw.one_in(3);
    o.allow_neg_eigval = o.beta_logits && draw.one_in(2);
}

}  // namespace

io::MakeOptions draw_case(Draw& draw) {
    io::MakeOptions o;
    o.op = draw.of({"attention", "attention", "delta_rule", "gated_delta_rule", "kda", "comba", "simple_gla"});
    o.seed = static_cast<std::uint64_t>(draw.between(1, 1 << 30));
    if (o.op != "attention" && o.seed % 4 == 0) o.op = o.seed % 8 == 0 ? "gla" : "gdn2";
    o.dtype = draw.of({DType::bf16, DType::bf16, DType::f16, DType::f32});
    o.gradients = !draw.one_in(10);
    o.batch = draw.between(1, 2);
    if ((o.op == "comba" || o.op == "gdn2") && o.dtype == DType::f16)
        o.dtype = DType::bf16;  // its p is not near k: results outgrow f16
    o.op == "attention" ? draw_attention(draw, o) : draw_delta(draw, o);
    return o;
}

}  // namespace softdelta::test
