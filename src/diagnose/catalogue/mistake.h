// The mistakes that the catalogue knows by name, and a set of them, and of points, that a run makes.
#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <span>

#include "diagnose/catalogue/point.h"

namespace softdelta::diagnose {

enum class Mistake {
    // delta rules, forward
    score_without_diagonal,
    erase_with_diagonal,
    inverse_first_order,
    w_without_beta,
    v_new_ignores_state,
    o_without_scale,
    erase_after_decay,
    gate_exp2,
    gate_over_ln2,
    state_decayed_twice,
    state_not_decayed,
    initial_state_ignored,
    tail_rows_lost,
    value_head_modulo,
    final_state_transposed,
    beta_not_doubled,
    state_leaks,
    u_without_beta,
    w_without_decay,
    write_key_without_decay,
    o_without_state,
    read_query_without_decay,
    q_without_norm,
    value_size_in_delta_scale,
    A_log_without_exp,
    gate_bias_ignored,
    initial_state_of_first,
    state_bf16,
    // the gradient of the inverse
    dL_left_not_transposed,
    dL_right_not_transposed,
    dL_not_transposed,
    dL_with_diagonal,
    dL_unmasked,
    dw_sign,
    dA_without_w,
    dk_without_erase_scores,
    // the gate's gradient
    dg_without_last_row,
    dg_last_row_everywhere,
    dg_last_row_without_decay,
    dg_exclusive,
    dg_erase_inclusive,
    dg_through_chunks,
    dg_through_sequences,
    dA_log_without_gate,
    gate_bias_without_slope,
    raw_gate_without_slope,
    dg_without_erase_path,
    dg_forward_sum,
    // other gradients of delta rules
    dbeta_without_key_path,
    dbeta_with_beta,
    dbeta_without_value_path,
    dv_without_beta,
    beta_logits_without_slope,
    delta_dq_without_scale,
    delta_dk_without_scale,
    delta_dk_scaled_twice,
    dk_without_p_path,
    dk_without_write,
    dq_without_norm,
    dk_without_norm,
    last_value_head_of_group,
    dfinal_state_ignored,
    dinitial_state_without_decay,
    dstate_without_decay,
    dstate_without_erase,
    du_without_state,
    dq_without_state,
    dq_without_scores,
    norm_without_projection,
    // attention: which keys, which heads
    top_left_for_bottom_right,
    window_left_off_by_one,
    window_right_off_by_one,
    query_head_modulo,
    sequences_leak,
    mask_ignored_backward,
    mask_of_first_batch,
    tile_lost_after_empty_one,
    causal_strict,
    causal_one_more,
    window_from_top_left,
    rows_lost_after_dead_tile,
    // scores and softmax
    bias_scaled,
    scores_without_scale,
    value_size_in_scale,
    softcap_ignored,
    o_not_normalised,
    softcap_after_bias,
    sink_not_in_lse,
    sink_not_in_sum,
    lse_log2,
    lse_without_maximum,
    dead_row_nan,
    dead_row_mean,
    // gradients of attention
    without_delta,
    delta_after_rounding,
    dlse_ignored,
    dlse_sign,
    without_softcap_slope,
    dq_without_scale,
    dk_without_scale,
    dq_scaled_twice,
    dk_scaled_twice,
    last_query_head_of_group,
    dv_from_ds,
    dbias_scaled,
    dbias_last_tile,
    dbias_over_keys,
    dbias_last_head,
    dbias_rounded_by_tile,
    dsink_sign,
    dsink_without_p,
    at_a_point,  // any change at a place; Point says which
    count
};

// Where a mistake first shows.
enum class Phase { operands, forward, backward, results };

class Mistakes {
  public:
    void add(Mistake m) { bits_.set(static_cast<std::size_t>(m)); }
    bool has(Mistake m) const { return bits_.test(static_cast<std::size_t>(m)); }

    static constexpr std::size_t most_points = 2;
    void add(const Point& point) { points_[count_++] = point; }
    std::span<const Point> points() const { return {points_.data(), count_}; }
    bool has(const Point& point) const { return std::ranges::find(points(), point) != points().end(); }
    bool changes(std::string_view place) const {
        return std::ranges::find(points(), place, &Point::place) != points().end();
    }

  private:
    std::bitset<static_cast<std::size_t>(Mistake::count)> bits_;
    std::array<Point, most_points> points_{};
    std::size_t count_ = 0;
};

}  // namespace softdelta::diagnose
