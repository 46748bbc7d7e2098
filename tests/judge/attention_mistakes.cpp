#include "judge/mistakes.h"
#include "judge/small_attention.h"

namespace softdelta::test {

namespace {

using M = AttentionMistake;

// Three tiles of queries and keys with tails; two query heads a key head.
io::MakeOptions inputs() {
    io::MakeOptions o;
    o.op = "attention";
    o.batch = 2, o.heads = 4, o.key_heads = 2;
    o.queries = o.keys = 150;
    o.key_size = 32, o.value_size = 48;
    return o;
}

io::MakeOptions causal(const char* kind, std::int64_t keys = 150) {
    io::MakeOptions o = inputs();
    o.causal = kind;
    o.keys = keys;
    return o;
}

io::MakeOptions window(std::int64_t left, std::int64_t right) {
    io::MakeOptions o = inputs();
    o.window_left = left, o.window_right = right;
    return o;
}

io::MakeOptions off_diagonal() {
    io::MakeOptions o = window(40, 10);
    o.keys = 200;
    return o;
}

io::MakeOptions masked(const char* kind) {
    io::MakeOptions o = inputs();
    o.mask = kind;
    return o;
}

io::MakeOptions biased(const char* kind, double softcap = 0) {
    io::MakeOptions o = inputs();
    o.bias = kind;
    o.softcap = softcap;
    return o;
}

io::MakeOptions with_sink() {
    io::MakeOptions o = inputs();
    o.sink = true;
    return o;
}

io::MakeOptions packed() {
    io::MakeOptions o = inputs();
    o.lengths = {70, 0, 17, 63};
    o.key_lengths = {50, 20, 0, 80};
    return o;
}

Mistake mistake(const char* name, AttentionMistake m, const char* entry, const char* result,
                const io::MakeOptions& inputs) {
    return {name,
            entry,
            result,
            inputs,
            [m](const io::Call& call) { return run_small_attention(call, m); },
            [](const io::Call& call) { return run_small_attention(call); },
            static_cast<int>(m)};
}

}  // namespace

std::vector<Mistake> attention_mistakes() {
    const io::MakeOptions plain = inputs();
    return {
        mistake("top left for bottom right", M::top_left_for_bottom_right, "top_left_for_bottom_right", "o",
                causal("bottom_right", 200)),
        mistake("window off by one on the left", M::window_left_off_by_one, "window_left_off_by_one", "o",
                window(40, 10)),
        mistake("window off by one on the right", M::window_right_off_by_one, "window_right_off_by_one", "o",
                window(40, 10)),
        mistake("query head reads key head modulo", M::head_modulo, "query_head_modulo", "o", plain),
        mistake("packed sequences leak", M::sequences_leak, "sequences_leak", "o", packed()),
        mistake("mask ignored backward", M::mask_ignored_backward, "mask_ignored_backward", "dv", masked("random")),
        mistake("mask of the first batch row", M::mask_of_first_batch, "mask_of_first_batch", "o", masked("padding")),
        mistake("tile lost after an empty one", M::tile_lost_after_empty_one, "tile_lost_after_empty_one", "o",
                window(20, 0)),
        mistake("causal without its diagonal", M::causal_strict, "causal_strict", "o", causal("top_left")),
        mistake("causal with one key more", M::causal_one_more, "causal_one_more", "o", causal("bottom_right", 200)),
        mistake("window from the top left", M::window_from_top_left, "window_from_top_left", "o", off_diagonal()),
        mistake("rows lost after a dead tile", M::rows_lost_after_dead_tile, "rows_lost_after_dead_tile", "dq",
                masked("dead_rows")),

        mistake("bias scaled", M::bias_scaled, "bias_scaled", "o", biased("full")),
        mistake("scores without scale", M::scores_without_scale, "scores_without_scale", "o", plain),
        mistake("scale of the value size", M::value_size_in_scale, "scale_of_value_size", "o", plain),
        mistake("softcap ignored", M::softcap_ignored, "softcap_ignored", "o", biased("none", 2)),
        mistake("o not normalised", M::o_not_normalised, "o_not_normalised", "o", plain),
        mistake("softcap after bias", M::softcap_after_bias, "softcap_after_bias", "o", biased("head", 2)),
        mistake("sink not in lse", M::sink_not_in_lse, "sink_not_in_lse", "lse", with_sink()),
        mistake("sink not in the sum", M::sink_not_in_sum, "sink_not_in_sum", "o", with_sink()),
        mistake("lse of base 2", M::lse_log2, "lse_log2", "lse", plain),
        mistake("lse without maximum", M::lse_without_maximum, "lse_without_maximum", "lse", plain),
        mistake("dead row is NaN", M::dead_row_nan, "dead_row_nan", "o", masked("dead_rows")),
        mistake("dead row is a mean", M::dead_row_mean, "dead_row_mean", "o", masked("dead_rows")),

        mistake("ds without delta", M::without_delta, "without_delta", "dq", plain),
        mistake("dlse ignored", M::dlse_ignored, "dlse_ignored", "dq", plain),
        mistake("sign of dlse", M::dlse_sign, "dlse_sign", "dk", plain),
        mistake("softcap without slope", M::without_softcap_slope, "without_softcap_slope", "dq", biased("none", 2)),
        mistake("dq without scale", M::dq_without_scale, "dq_without_scale", "dq", plain),
        mistake("dk without scale", M::dk_without_scale, "dk_without_scale", "dk", plain),
        mistake("dq scaled twice", M::dq_scaled_twice, "dq_scaled_twice", "dq", plain),
        mistake("dk scaled twice", M::dk_scaled_twice, "dk_scaled_twice", "dk", plain),
        mistake("only the last head of a group", M::last_head_of_group, "last_head_of_group", "dk", causal("top_left")),
        mistake("dv from ds", M::dv_from_ds, "dv_from_ds", "dv", plain),
        mistake("dbias scaled", M::dbias_scaled, "dbias_scaled", "dbias", biased("key_head")),
        mistake("dbias of the last tile", M::dbias_last_tile, "dbias_last_tile", "dbias", biased("row")),
        mistake("dbias of the last head", M::dbias_last_head, "dbias_last_head", "dbias", biased("row")),
        mistake("dbias summed over keys", M::dbias_over_keys, "dbias_over_keys", "dbias", biased("row")),
        mistake("sign of dsink", M::dsink_sign, "dsink_sign", "dsink", with_sink()),
        mistake("dsink without p", M::dsink_without_p, "dsink_without_p", "dsink", with_sink()),
    };
}

}  // namespace softdelta::test
