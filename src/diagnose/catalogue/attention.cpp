// Mistakes of attention, in the words of the contract: s = softcap(scale q kᵀ) + bias, p, o, lse, D, ds.
#include <cmath>

#include "diagnose/catalogue/catalogue.h"

namespace softdelta::diagnose {

namespace {

using M = Mistake;
using io::Call;

const char* const flash = "FlashAttention-2, arXiv:2307.08691";
const char* const flash_api = "flash-attention, flash_attn_interface";
const char* const dynamic = "flash-sparse-attention 1.2.3, tests/data/attn_boolmask_rows_dead";
const char* const gemma = "Gemma 2, arXiv:2408.00118";
const char* const streaming = "StreamingLLM, arXiv:2309.17453; gpt-oss";
const char* const sdpa = "torch.nn.functional.scaled_dot_product_attention";
const char* const gqa = "GQA, arXiv:2305.13245";

bool is_bottom_right(const Call& c) {
    return c.attention_options.causal == Causal::bottom_right;
}
bool has_left_window(const Call& c) {
    return c.attention_options.window_left >= 0;
}
bool has_right_window(const Call& c) {
    return c.attention_options.window_right >= 0;
}
bool is_causal(const Call& c) {
    return c.attention_options.causal != Causal::none;
}
bool has_groups(const Call& c) {
    return c.attention.q.shape(2) > c.attention.k.shape(2);
}
bool is_packed(const Call& c) {
    return !c.packing.keys.empty();
}
bool has_mask(const Call& c) {
    return static_cast<bool>(c.attention.mask);
}
bool has_bias(const Call& c) {
    return static_cast<bool>(c.attention.bias);
}
bool shares_bias(const Call& c) {
    return has_bias(c) &&
           (c.attention.bias.shape(0) * c.attention.bias.shape(1) < c.attention.q.shape(0) * c.attention.q.shape(2));
}
bool has_softcap(const Call& c) {
    return c.attention_options.softcap > 0;
}
bool has_sink(const Call& c) {
    return static_cast<bool>(c.attention.sink);
}
bool has_dlse(const Call& c) {
    return static_cast<bool>(c.dlse);
}
bool hides_keys(const Call& c) {
    const AttentionOptions& o = c.attention_options;
    return has_mask(c) || has_bias(c) || o.causal != Causal::none || o.window_left >= 0 || o.window_right >= 0 ||
           o.top_w >= 0;
}

const Entry entries[] = {
    // which keys, which heads
    {M::top_left_for_bottom_right, "top_left_for_bottom_right",
     "the causal diagonal starts in the top left corner instead of ending in the bottom right one",
     "j ≤ i + Lk − Lq → j ≤ i", flash_api, Phase::forward, is_bottom_right},
    {M::window_left_off_by_one, "window_left_off_by_one", "the window reaches one key too far to the left",
     "j ≥ i' − left → j ≥ i' − left − 1", flash_api, Phase::forward, has_left_window},
    {M::window_right_off_by_one, "window_right_off_by_one", "the window reaches one key too far to the right",
     "j ≤ i' + right → j ≤ i' + right + 1", flash_api, Phase::forward, has_right_window},
    {M::query_head_modulo, "query_head_modulo", "query heads read key heads in turn instead of in groups",
     "key head of h: h / (H/Hk) → h mod Hk", gqa, Phase::forward, has_groups},
    {M::sequences_leak, "sequences_leak", "a packed sequence sees the first keys of the next",
     "j < Lk of the sequence → j < Lk + 3", flash_api, Phase::forward, is_packed},
    {M::mask_ignored_backward, "mask_ignored_backward", "the backward pass forms p of hidden keys too",
     "p = e^(s − lse) over seen keys → over all keys", flash, Phase::forward, hides_keys},
    {M::mask_of_first_batch, "mask_of_first_batch", "every batch row reads the mask of the first",
     "mask[b, …] → mask[0, …]", sdpa, Phase::forward,
     [](const Call& c) { return has_mask(c) && c.attention.mask.shape(0) > 1; }},
    {M::tile_lost_after_empty_one, "tile_lost_after_empty_one",
     "after a tile of keys that a row does not see, the next one is lost", "tile j skipped when tile j − 1 was empty",
     dynamic, Phase::forward, hides_keys},
    {M::causal_strict, "causal_strict", "the causal mask hides the diagonal", "j ≤ i' → j < i'", flash_api,
     Phase::forward, is_causal},
    {M::causal_one_more, "causal_one_more", "the causal mask shows one key too many", "j ≤ i' → j ≤ i' + 1", flash_api,
     Phase::forward, is_causal},
    {M::window_from_top_left, "window_from_top_left",
     "the window is counted from the top left diagonal instead of the bottom right one", "i' = i + Lk − Lq → i",
     flash_api, Phase::forward, [](const Call& c) { return has_left_window(c) || has_right_window(c); }},
    {M::rows_lost_after_dead_tile, "rows_lost_after_dead_tile",
     "the backward pass ends at the first tile of 64 query rows without a key: later rows have no gradient and add to "
     "none",
     "dq, ds of rows after a dead tile → 0", dynamic, Phase::forward, hides_keys},

    // scores and softmax
    {M::bias_scaled, "bias_scaled", "the bias is scaled as the scores are",
     "s = scale·q kᵀ + bias → scale·(q kᵀ + bias)", sdpa, Phase::forward, has_bias},
    {M::scores_without_scale, "scores_without_scale", "the scores are not scaled", "s = scale·q kᵀ → q kᵀ", flash},
    {M::value_size_in_scale, "scale_of_value_size", "the default scale of the scores comes from Dv instead of D",
     "s = D^-1/2 q kᵀ → Dv^-1/2 q kᵀ", "softdelta.h", Phase::forward,
     [](const Call& c) {
         return std::isnan(c.attention_options.scale) && c.attention.q.shape(3) != c.attention.v.shape(3);
     }},
    {M::softcap_ignored, "softcap_ignored", "the softcap is not applied", "s = cap(x) + bias → x + bias", gemma,
     Phase::forward, has_softcap},
    {M::o_not_normalised, "o_not_normalised", "o is not divided by the softmax sum",
     "o = Σ e^(s − m) v / Σ e^(s − m) → Σ e^(s − m) v", flash},
    {M::softcap_after_bias, "softcap_after_bias", "the softcap is applied to scores with their bias",
     "s = cap(x) + bias → cap(x + bias)", gemma, Phase::forward,
     [](const Call& c) { return has_softcap(c) && has_bias(c); }},
    {M::sink_not_in_lse, "sink_not_in_lse", "lse leaves out the sink", "lse = log(e^sink + Σ e^s) → log Σ e^s",
     streaming, Phase::forward, has_sink},
    {M::sink_not_in_sum, "sink_not_in_sum", "the softmax leaves out the sink",
     "p = e^s / (e^sink + Σ e^s) → e^s / Σ e^s", streaming, Phase::forward, has_sink},
    {M::lse_log2, "lse_log2", "lse is stored in base 2", "lse = ln Σ e^s → log₂ Σ e^s", flash},
    {M::lse_without_maximum, "lse_without_maximum", "lse lacks the maximum that was subtracted",
     "lse = m + ln Σ e^(s − m) → ln Σ e^(s − m)", flash},
    {M::dead_row_nan, "dead_row_nan", "a row without a key is 0/0, NaN", "o = 0 → NaN", dynamic, Phase::forward,
     hides_keys},
    {M::dead_row_mean, "dead_row_mean",
     "a row without a key is the mean of all values, as a softmax over equal large negative numbers gives",
     "o = 0 → mean of v", sdpa, Phase::forward, hides_keys},

    // gradients
    {M::without_delta, "without_delta", "ds lacks D, the row sum of do∘o", "ds = p∘(dp − D) → p∘dp", flash},
    {M::delta_after_rounding, "delta_after_rounding", "D is formed from o as it was stored, rounded",
     "D = rowsum(do∘o) → rowsum(do∘stored(o))", flash},
    {M::dlse_ignored, "dlse_ignored", "the gradient of lse is ignored", "D = rowsum(do∘o) − dlse → rowsum(do∘o)", flash,
     Phase::forward, has_dlse},
    {M::dlse_sign, "dlse_sign", "the gradient of lse has the wrong sign",
     "D = rowsum(do∘o) − dlse → rowsum(do∘o) + dlse", flash, Phase::forward, has_dlse},
    {M::without_softcap_slope, "without_softcap_slope", "the slope of the softcap is missing in ds",
     "ds' = ds∘(1 − tanh²) → ds", gemma, Phase::forward, has_softcap},
    {M::dq_without_scale, "dq_without_scale", "dq is not scaled", "dq = scale·ds k → ds k", flash},
    {M::dk_without_scale, "dk_without_scale", "dk is not scaled", "dk = scale·dsᵀ q → dsᵀ q", flash},
    {M::dq_scaled_twice, "dq_scaled_twice", "dq is scaled twice", "dq = scale·ds k → scale²·ds k", flash},
    {M::dk_scaled_twice, "dk_scaled_twice", "dk is scaled twice: q had its scale already",
     "dk = scale·dsᵀ q → scale²·dsᵀ q", flash},
    {M::last_query_head_of_group, "last_head_of_group",
     "dk and dv hold the last query head of a group instead of the sum", "dk = Σ_h dk_h → dk_(last h)", gqa,
     Phase::forward, has_groups},
    {M::dv_from_ds, "dv_from_ds", "dv is formed from ds instead of p", "dv = pᵀ do → dsᵀ do", flash},
    {M::dbias_scaled, "dbias_scaled", "dbias is scaled as dq is", "dbias = ds → scale·ds", sdpa, Phase::forward,
     has_bias},
    {M::dbias_last_tile, "dbias_last_tile", "each tile of 64 query rows overwrites dbias instead of adding to it",
     "dbias = Σ tiles → the last tile", sdpa, Phase::forward, has_bias},
    {M::dbias_over_keys, "dbias_over_keys", "dbias is summed over keys instead of query rows",
     "dbias_j = Σ_i ds_ij → dbias_i = Σ_j ds_ij", sdpa, Phase::forward, has_bias},
    {M::dbias_last_head, "dbias_last_head",
     "each head and batch row overwrites the dbias that they share instead of adding to it",
     "dbias = Σ_(b, h) ds → of the last b, h", sdpa, Phase::forward, shares_bias},
    {M::dbias_rounded_by_tile, "dbias_rounded_by_tile", "dbias is rounded to its type after each tile of query rows",
     "dbias = round(Σ tiles) → round(… round(tile 0) + tile 1 …)", sdpa, Phase::forward, has_bias},
    {M::dsink_sign, "dsink_sign", "the sign of dsink is wrong", "dsink = −Σ e^(sink − lse) D → +Σ …", streaming,
     Phase::forward, has_sink},
    {M::dsink_without_p, "dsink_without_p", "dsink lacks the sink's probability", "dsink = −Σ e^(sink − lse) D → −Σ D",
     streaming, Phase::forward, has_sink},
};

}  // namespace

std::span<const Entry> attention_entries() {
    return entries;
}

}  // namespace softdelta::diagnose
