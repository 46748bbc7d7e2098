// Calls of drawn shapes, types and options that let a mistake show.
#pragma once

#include "judge/draw_case.h"
#include "judge/mistakes.h"

namespace softdelta::test {

inline void draw_packing(Draw& draw, io::MakeOptions& o) {
    if (o.lengths.empty() && !draw.one_in(4)) return;
    o.lengths.resize(static_cast<std::size_t>(draw.between(2, 4)));
    for (std::int64_t& length : o.lengths) length = draw.one_in(5) ? 0 : draw.between(1, 100);
    if (o.op == "attention" && draw.one_in(2)) {
        o.key_lengths = o.lengths;
        for (std::int64_t& length : o.key_lengths) length = draw.one_in(5) ? 0 : draw.between(1, 100);
    } else {
        o.key_lengths.clear();
    }
}

// Options that the inputs have already stay on.
inline void vary_attention(Draw& draw, io::MakeOptions& o) {
    o.key_heads = draw.between(1, 2);
    o.heads = o.key_heads * draw.of({1, 2, 2, 3});
    o.queries = draw.of({draw.between(2, 60), draw.between(60, 200)});
    o.keys = draw.one_in(2) ? o.queries : draw.between(2, 220);
    o.key_size = draw.of({1, 8, 24, 64});
    o.value_size = draw.of({3, 16, 40, 64});
    if (o.causal == "none") o.causal = draw.of({"none", "none", "top_left", "bottom_right"});
    if (o.window_left >= 0) o.window_left = draw.between(0, 100), o.window_right = draw.between(0, 30);
    if (o.mask == "none" && draw.one_in(4)) o.mask = draw.of({"random", "padding", "dead_rows"});
    if (o.bias == "none" && draw.one_in(4)) o.bias = draw.of({"full", "row", "head", "key_head"});
    if (o.softcap == 0 && draw.one_in(4)) o.softcap = 3;
    o.sink = o.sink || draw.one_in(4);
}

inline void vary_delta(Draw& draw, io::MakeOptions& o) {
    o.heads = draw.between(1, 2);
    o.value_heads = o.heads * draw.of({1, 2, 2, 3});
    o.tokens = draw.of({draw.between(1, 60), draw.between(60, 200)});
    const bool square = o.key_size == o.value_size;
    o.key_size = draw.of({2, 8, 24, 64});
    o.value_size = square ? o.key_size : draw.of({3, 16, 40, 64});
    if (o.gate == "uniform") o.gate_value *= draw.of({0.5, 1.0, 2.0, 10.0});
    o.l2norm = o.l2norm && !draw.one_in(5);
    o.initial_state = !draw.one_in(4);
    o.state_v_first = draw.one_in(3);
    if (o.raw_gate == "none" && o.op != "simple_gla" && o.op != "gla") {
        o.beta_logits = draw.one_in(4);
        o.allow_neg_eigval = o.beta_logits && draw.one_in(2);
        if (o.op != "delta_rule" && draw.one_in(4)) {
            o.gate = "mild", o.raw_gate = draw.of({"softplus", "lower_bound"});
            o.lower_bound = -0.1;
        }
    }
}

inline io::MakeOptions vary(Draw& draw, const io::MakeOptions& inputs) {
    io::MakeOptions o = inputs;
    o.seed = static_cast<std::uint64_t>(draw.between(1, 1 << 30));
    o.dtype = draw.of({DType::bf16, DType::bf16, DType::f16, DType::f32});
    if ((o.op == "comba" || o.op == "gdn2") && o.dtype == DType::f16) o.dtype = DType::bf16;  // results outgrow f16
    o.batch = draw.between(1, 2);
    o.op == "attention" ? vary_attention(draw, o) : vary_delta(draw, o);
    draw_packing(draw, o);
    return o;
}

}  // namespace softdelta::test
