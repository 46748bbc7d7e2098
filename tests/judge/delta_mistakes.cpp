#include <string>

#include "judge/mistakes.h"
#include "judge/small_delta.h"

namespace softdelta::test {

namespace {

using M = DeltaMistake;

// Three chunks of 64, the last a tail; a gate that carries the state from chunk to chunk; two value heads a key head.
io::MakeOptions inputs(const char* op) {
    io::MakeOptions o;
    o.op = op;
    o.tokens = 150;
    o.heads = 2, o.value_heads = 4;
    o.key_size = 32, o.value_size = 48;
    o.gate = "uniform", o.gate_value = -0.02;
    return o;
}

// Tokens of two steps, so that rows of chunks are steps; the last chunk is a tail again.
io::MakeOptions in_steps(const char* op) {
    io::MakeOptions o = inputs(op);
    o.steps = 2, o.tokens = 75;
    return o;
}

io::MakeOptions packed(const char* op) {
    io::MakeOptions o = inputs(op);
    o.lengths = {70, 0, 17, 63};
    return o;
}

io::MakeOptions steeper(const char* op) {
    io::MakeOptions o = inputs(op);
    o.gate_value = -0.2;
    return o;
}

io::MakeOptions square(const char* op) {
    io::MakeOptions o = inputs(op);
    o.value_size = o.key_size;
    return o;
}

io::MakeOptions single(const char* op) {
    io::MakeOptions o = inputs(op);
    o.dtype = DType::f32;
    return o;
}

io::MakeOptions without_norm(const char* op) {
    io::MakeOptions o = inputs(op);
    o.l2norm = false;
    return o;
}

io::MakeOptions raw(const char* op, const char* gate) {
    io::MakeOptions o = inputs(op);
    o.gate = "mild", o.raw_gate = gate;
    o.lower_bound = -0.1;
    o.beta_logits = true, o.allow_neg_eigval = true;
    return o;
}

// A_log above 0 in every head, so that the gate stays one without its exponential.
io::MakeOptions growing_rate() {
    io::MakeOptions o = raw("gated_delta_rule", "softplus");
    o.seed = 129;
    return o;
}

Mistake mistake(const std::string& name, DeltaMistake m, const char* entry, const char* result,
                const io::MakeOptions& inputs) {
    return {name,
            entry,
            result,
            inputs,
            [m](const io::Call& call) { return run_small_delta(call, m); },
            [](const io::Call& call) { return run_small_delta(call); },
            static_cast<int>(m)};
}

}  // namespace

std::vector<Mistake> delta_mistakes() {
    const io::MakeOptions delta = inputs("delta_rule"), gdn = inputs("gated_delta_rule"), kda = inputs("kda"),
                          comba = inputs("comba"), gla = inputs("simple_gla");
    std::vector<Mistake> mistakes = {
        mistake("score without its diagonal", M::score_without_diagonal, "score_without_diagonal", "o", gdn),
        mistake("score without its diagonal, no erasing", M::score_without_diagonal, "score_without_diagonal", "o",
                gla),
        mistake("L with its diagonal", M::erase_with_diagonal, "erase_with_diagonal", "o", delta),
        mistake("inverse of first order", M::inverse_first_order, "inverse_first_order", "o", kda),
        mistake("w without beta", M::w_without_beta, "w_without_beta", "o", gdn),
        mistake("v_new without w S", M::v_new_ignores_state, "v_new_ignores_state", "o", gdn),
        mistake("o without scale", M::o_without_scale, "o_without_scale", "o", gla),
        mistake("decay before erase", M::erase_after_decay, "erase_after_decay", "o", steeper("comba")),
        mistake("natural gate taken as log2", M::gate_exp2, "gate_exp2", "o", gdn),
        mistake("log2 gate taken as natural", M::gate_over_ln2, "gate_over_ln2", "o", kda),
        mistake("state decayed twice", M::state_decayed_twice, "state_decayed_twice", "final_state", gdn),
        mistake("state not decayed", M::state_not_decayed, "state_not_decayed", "o", kda),
        mistake("initial state ignored", M::initial_state_ignored, "initial_state_ignored", "o", comba),
        mistake("tail rows lost", M::tail_rows_lost, "tail_rows_lost", "o", kda),
        mistake("value head reads key head modulo", M::head_modulo, "value_head_modulo", "o", gdn),
        mistake("final state transposed", M::final_state_transposed, "final_state_transposed", "final_state",
                square("gated_delta_rule")),
        mistake("beta not doubled", M::beta_not_doubled, "beta_not_doubled", "o", raw("gated_delta_rule", "softplus")),
        mistake("state leaks into the next sequence", M::state_leaks, "state_leaks", "o", packed("kda")),
        mistake("u without beta", M::u_without_beta, "u_without_beta", "o", gdn),
        mistake("w without decay", M::w_without_decay, "w_without_decay", "o", steeper("kda")),
        mistake("write key without decay", M::write_key_without_decay, "write_key_without_decay", "final_state", gdn),
        mistake("o without state", M::o_without_state, "o_without_state", "o", comba),
        mistake("read query without decay", M::read_query_without_decay, "read_query_without_decay", "o", kda),
        mistake("q without norm", M::q_without_norm, "q_without_norm", "o", gdn),
        mistake("scale of the value size", M::value_size_in_scale, "scale_of_value_size", "o", delta),
        mistake("A_log without exp", M::A_log_without_exp, "A_log_without_exp", "o", growing_rate()),
        mistake("dt_bias ignored", M::dt_bias_ignored, "dt_bias_ignored", "o", raw("kda", "softplus")),
        mistake("initial state of the first", M::initial_state_of_first, "initial_state_of_first", "o", packed("kda")),
        mistake("state in bf16", M::state_bf16, "state_bf16", "final_state", single("gated_delta_rule")),

        mistake("dL not transposed on the left", M::dL_left_not_transposed, "dL_left_not_transposed", "dk", gdn),
        mistake("dL not transposed on the right", M::dL_right_not_transposed, "dL_right_not_transposed", "dk", gdn),
        mistake("dL not transposed", M::dL_not_transposed, "dL_not_transposed", "dk", kda),
        mistake("dL not transposed, own p", M::dL_not_transposed, "dL_not_transposed", "dp", comba),
        mistake("dL with its diagonal", M::dL_with_diagonal, "dL_with_diagonal", "dk", without_norm("kda")),
        mistake("dL unmasked", M::dL_unmasked, "dL_unmasked", "dk", gdn),
        mistake("dL unmasked, no gate", M::dL_unmasked, "dL_unmasked", "dk", delta),
        mistake("sign of dw", M::dw_sign, "dw_sign", "dk", gdn),
        mistake("dA without dw", M::dA_without_w, "dA_without_w", "dbeta", kda),
        mistake("dk without erase scores", M::dk_without_erase_scores, "dk_without_erase_scores", "dk", gdn),

        mistake("dg without last row", M::dg_without_last_row, "dg_without_last_row", "dg", gdn),
        mistake("dg without last row, channels", M::dg_without_last_row, "dg_without_last_row", "dg", kda),
        mistake("last row of dg in every row", M::dg_last_row_everywhere, "dg_last_row_everywhere", "dg", comba),
        mistake("last row of dg without decay", M::dg_last_row_without_decay, "dg_last_row_without_decay", "dg", gdn),
        mistake("dg exclusive", M::dg_exclusive, "dg_exclusive", "dg", gdn),
        mistake("dg exclusive, no erasing", M::dg_exclusive, "dg_exclusive", "dg", gla),
        mistake("dg inclusive where it erases before", M::dg_erase_inclusive, "dg_erase_inclusive", "dg", comba),
        mistake("dg through chunks", M::dg_through_chunks, "dg_through_chunks", "dg", kda),
        mistake("dg through sequences", M::dg_through_sequences, "dg_through_sequences", "dg",
                packed("gated_delta_rule")),
        mistake("dA_log without gate", M::dA_log_without_gate, "dA_log_without_gate", "dA_log",
                raw("gated_delta_rule", "softplus")),
        mistake("dA_log without gate, channels", M::dA_log_without_gate, "dA_log_without_gate", "dA_log",
                raw("kda", "lower_bound")),
        mistake("ddt_bias without slope", M::ddt_bias_without_slope, "ddt_bias_without_slope", "ddt_bias",
                raw("kda", "softplus")),
        mistake("raw gate without slope", M::raw_gate_without_slope, "raw_gate_without_slope", "dg",
                raw("comba", "lower_bound")),
        mistake("dg without erase path", M::dg_without_erase_path, "dg_without_erase_path", "dg", kda),
        mistake("dg summed forward", M::dg_forward_sum, "dg_forward_sum", "dg", gdn),

        mistake("dbeta without key path", M::dbeta_without_key_path, "dbeta_without_key_path", "dbeta", gdn),
        mistake("beta in dbeta", M::dbeta_with_beta, "dbeta_with_beta", "dbeta", delta),
        mistake("dbeta without value path", M::dbeta_without_value_path, "dbeta_without_value_path", "dbeta", gdn),
        mistake("dv without beta", M::dv_without_beta, "dv_without_beta", "dv", kda),
        mistake("beta logits without slope", M::beta_logits_without_slope, "beta_logits_without_slope", "dbeta",
                raw("kda", "softplus")),
        mistake("dq without scale", M::dq_without_scale, "dq_without_scale", "dq", gla),
        mistake("dk without scale", M::dk_without_scale, "dk_without_scale", "dk", gdn),
        mistake("dk scaled twice", M::dk_scaled_twice, "dk_scaled_twice", "dk", without_norm("gated_delta_rule")),
        mistake("dk without the path of p", M::dk_without_p_path, "dk_without_p_path", "dk", gdn),
        mistake("dk without writing", M::dk_without_write, "dk_without_write", "dk", gla),
        mistake("dq without norm", M::dq_without_norm, "dq_without_norm", "dq", gdn),
        mistake("dk without norm", M::dk_without_norm, "dk_without_norm", "dk", comba),
        mistake("only the last head of a group", M::last_head_of_group, "last_head_of_group", "dq", gdn),
        mistake("dfinal_state ignored", M::dfinal_state_ignored, "dfinal_state_ignored", "dk", delta),
        mistake("dinitial_state without decay", M::dinitial_state_without_decay, "dinitial_state_without_decay",
                "dinitial_state", gdn),
        mistake("gradient of the state without decay", M::dstate_without_decay, "dstate_without_decay", "dk",
                steeper("kda")),
        mistake("gradient of the state without erasing", M::dstate_without_erase, "dstate_without_erase", "dk", gdn),
        mistake("du without state", M::du_without_state, "du_without_state", "dv", comba),
        mistake("dq without state", M::dq_without_state, "dq_without_state", "dq", gdn),
        mistake("dq without scores", M::dq_without_scores, "dq_without_scores", "dq", kda),
        mistake("norm without projection", M::norm_without_projection, "norm_without_projection", "dq", gdn),

        mistake("score without diagonal, gla", M::score_without_diagonal, "score_without_diagonal", "o", inputs("gla")),
        mistake("o without scale, gla", M::o_without_scale, "o_without_scale", "o", inputs("gla")),
        mistake("gate exp2, gla", M::gate_exp2, "gate_exp2", "o", inputs("gla")),
        mistake("state decayed twice, gla", M::state_decayed_twice, "state_decayed_twice", "final_state",
                inputs("gla")),
        mistake("write key without decay, gla", M::write_key_without_decay, "write_key_without_decay", "final_state",
                steeper("gla")),
        mistake("o without state, gla", M::o_without_state, "o_without_state", "o", inputs("gla")),
        mistake("read query without decay, gla", M::read_query_without_decay, "read_query_without_decay", "o",
                steeper("gla")),
        mistake("dg without last row, gla", M::dg_without_last_row, "dg_without_last_row", "dg", inputs("gla")),
        mistake("dg exclusive, gla", M::dg_exclusive, "dg_exclusive", "dg", inputs("gla")),
        mistake("dk without write, gla", M::dk_without_write, "dk_without_write", "dk", inputs("gla")),
        mistake("du without state, gla", M::du_without_state, "du_without_state", "dv", inputs("gla")),
        mistake("dq without scores, gla", M::dq_without_scores, "dq_without_scores", "dq", inputs("gla")),
        mistake("erase with diagonal, gdn2", M::erase_with_diagonal, "erase_with_diagonal", "o", inputs("gdn2")),
        mistake("inverse first order, gdn2", M::inverse_first_order, "inverse_first_order", "o", inputs("gdn2")),
        mistake("v new ignores state, gdn2", M::v_new_ignores_state, "v_new_ignores_state", "o", inputs("gdn2")),
        mistake("w without decay, gdn2", M::w_without_decay, "w_without_decay", "o", steeper("gdn2")),
        mistake("tail rows lost, gdn2", M::tail_rows_lost, "tail_rows_lost", "o", inputs("gdn2")),
        mistake("dL not transposed, gdn2", M::dL_not_transposed, "dL_not_transposed", "dp", inputs("gdn2")),
        mistake("dL unmasked, gdn2", M::dL_unmasked, "dL_unmasked", "dk", inputs("gdn2")),
        mistake("dA without w, gdn2", M::dA_without_w, "dA_without_w", "dp", inputs("gdn2")),
        mistake("dk without erase scores, gdn2", M::dk_without_erase_scores, "dk_without_erase_scores", "dk",
                inputs("gdn2")),
        mistake("dg without erase path, gdn2", M::dg_without_erase_path, "dg_without_erase_path", "dg", inputs("gdn2")),
        mistake("dbeta without key path, gdn2", M::dbeta_without_key_path, "dbeta_without_key_path", "dbeta",
                inputs("gdn2")),
        mistake("dstate without erase, gdn2", M::dstate_without_erase, "dstate_without_erase", "dk", inputs("gdn2")),
    };
    for (const std::string op : {"gated_delta_product", "dplr"}) {
        const io::MakeOptions steps = in_steps(op.c_str());
        const std::string of = ", steps of " + op;
        mistakes.insert(
            mistakes.end(),
            {
                mistake("score without diagonal" + of, M::score_without_diagonal, "score_without_diagonal", "o", steps),
                mistake("L with its diagonal" + of, M::erase_with_diagonal, "erase_with_diagonal", "o", steps),
                mistake("inverse of first order" + of, M::inverse_first_order, "inverse_first_order", "o", steps),
                mistake("v_new without w S" + of, M::v_new_ignores_state, "v_new_ignores_state", "o", steps),
                mistake("u without beta" + of, M::u_without_beta, "u_without_beta", "o", steps),
                mistake("state not decayed" + of, M::state_not_decayed, "state_not_decayed", "o", steps),
                mistake("tail rows lost" + of, M::tail_rows_lost, "tail_rows_lost", "o", steps),
                mistake("dL not transposed" + of, M::dL_not_transposed, "dL_not_transposed", op == "dplr" ? "dp" : "dk",
                        steps),
                mistake("dA without dw" + of, M::dA_without_w, "dA_without_w", "dbeta", steps),
                mistake("dk without erase scores" + of, M::dk_without_erase_scores, "dk_without_erase_scores", "dk",
                        steps),
                mistake("dg without erase path" + of, M::dg_without_erase_path, "dg_without_erase_path", "dg", steps),
                mistake("dbeta without value path" + of, M::dbeta_without_value_path, "dbeta_without_value_path",
                        "dbeta", steps),
                mistake("gradient of the state without erasing" + of, M::dstate_without_erase, "dstate_without_erase",
                        "dk", steps),
            });
    }
    return mistakes;
}

}  // namespace softdelta::test
