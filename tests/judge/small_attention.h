// A small attention kernel, forward and backward, with operands of its products rounded to the storage type; it can be
// told to make one mistake or two or two. Shares nothing with what the judge runs.
#pragma once

#include "judge/fault.h"

namespace softdelta::test {

enum class AttentionMistake {
    none,
    // which keys, which heads
    top_left_for_bottom_right,  //
    window_left_off_by_one,     //
    window_right_off_by_one,    //
    head_modulo,                // query head h reads key head h % Hk
    sequences_leak,             // a packed sequence sees the first keys of the next
    mask_ignored_backward,      //
    mask_of_first_batch,        //
    tile_lost_after_empty_one,  // of 64 keys, after one that is masked for the row
    causal_strict,              // the diagonal is hidden
    causal_one_more,            // a key beyond it is seen
    window_from_top_left,       //
    rows_lost_after_dead_tile,  // backward, after 64 rows without a key
    // scores and softmax
    bias_scaled,           //
    scores_without_scale,  //
    softcap_after_bias,    //
    value_size_in_scale,   // Dv^-1/2
    softcap_ignored,       //
    o_not_normalised,      //
    sink_not_in_lse,       //
    sink_not_in_sum,       //
    lse_log2,              //
    lse_without_maximum,   //
    dead_row_nan,          //
    dead_row_mean,         // of v, as a softmax over equal −1e9
    // gradients
    without_delta,          // ds = p∘dp
    dlse_ignored,           //
    dlse_sign,              //
    without_softcap_slope,  //
    dq_without_scale,       //
    dk_without_scale,       //
    dq_scaled_twice,        //
    dk_scaled_twice,        //
    last_head_of_group,     // dk, dv of the last query head only
    dv_from_ds,             //
    dbias_scaled,           //
    dbias_last_tile,        // of 64 query rows, where it should be their sum
    dbias_last_head,        // where it should be their sum
    dbias_over_keys,        // summed over keys where it should be over queries
    dsink_sign,             //
    dsink_without_p         // −Σ D
};

Results run_small_attention(const io::Call& call, AttentionMistake mistake = AttentionMistake::none,
                            AttentionMistake second = AttentionMistake::none, const Fault& fault = {});

}  // namespace softdelta::test
