// A small delta-rule kernel in the literature's WY words (docs/math.md), forward and backward. It rounds operands of
// its products to the storage type, and can be told to make one mistake or two. It shares nothing with what the judge
// runs.
#pragma once

#include "judge/fault.h"

namespace softdelta::test {

enum class DeltaMistake {
    none,
    // forward
    score_without_diagonal,    // o from the state before the token's update
    erase_with_diagonal,       // L = tril instead of stril
    inverse_first_order,       // A = I − L
    w_without_beta,            //
    v_new_ignores_state,       // v_new = u
    o_without_scale,           //
    erase_after_decay,         // Comba from the decayed state
    gate_exp2,                 // a natural gate taken as a log2 one
    gate_over_ln2,             // a log2 gate taken as a natural one
    state_decayed_twice,       // from chunk to chunk
    state_not_decayed,         //
    initial_state_ignored,     //
    tail_rows_lost,            // of a last chunk, what is no full tile of 16
    head_modulo,               // value head h reads key head h % H
    final_state_transposed,    //
    beta_not_doubled,          // allow_neg_eigval ignored
    state_leaks,               // from a packed sequence into the next
    u_without_beta,            //
    w_without_decay,           //
    write_key_without_decay,   //
    o_without_state,           //
    read_query_without_decay,  //
    q_without_norm,            //
    value_size_in_scale,       // V^-1/2
    A_log_without_exp,         //
    dt_bias_ignored,           //
    initial_state_of_first,    // for every sequence
    state_bf16,                // from chunk to chunk
    // inverse gradient
    dL_left_not_transposed,   // −stril(A dA Aᵀ)
    dL_right_not_transposed,  // −stril(Aᵀ dA A)
    dL_not_transposed,        // −stril(A dA A)
    dL_with_diagonal,         // −tril(…)
    dL_unmasked,              //
    dw_sign,                  // dw = du hᵀ
    dA_without_w,             // dA = du (βv)ᵀ
    dk_without_erase_scores,  //
    // gate gradient
    dg_without_last_row,        //
    dg_last_row_everywhere,     //
    dg_last_row_without_decay,  //
    dg_exclusive,               //
    dg_erase_inclusive,         // Comba's dE counted for its own row
    dg_through_chunks,          // the reverse sum runs on over chunk borders
    dg_through_sequences,       // and over borders of packed sequences
    dA_log_without_gate,        // Σ dg instead of Σ dg∘g
    ddt_bias_without_slope,     // Σ dg instead of Σ dx
    raw_gate_without_slope,     // dx = dg
    dg_without_erase_path,      // p∘dp
    dg_forward_sum,             //
    // other gradients
    dbeta_without_key_path,        //
    dbeta_with_beta,               //
    dbeta_without_value_path,      //
    dv_without_beta,               //
    beta_logits_without_slope,     //
    dq_without_scale,              //
    dk_without_scale,              //
    dk_scaled_twice,               //
    dk_without_p_path,             //
    dk_without_write,              // kw missing
    dq_without_norm,               // l2norm backward missing
    dk_without_norm,               //
    last_head_of_group,            // dq, dk of the last value head only
    dfinal_state_ignored,          //
    dinitial_state_without_decay,  //
    dstate_without_decay,          // in every chunk
    dstate_without_erase,          //
    du_without_state,              //
    dq_without_state,              //
    dq_without_scores,             //
    norm_without_projection        // dx = r dy
};

// How the gates of a chunk are summed: in f64, in f32 one after the other, in f32 by halves as parallel scans do, in
// f64 and rounded to f32, or in f32 divided by log 2.
enum class GateSums { f64, f32, f32_scan, f32_rounded, f32_log2 };

Results run_small_delta(const io::Call& call, DeltaMistake mistake = DeltaMistake::none, Index chunk_size = 64,
                        DeltaMistake second = DeltaMistake::none, GateSums sums = GateSums::f64,
                        const Fault& fault = {});

}  // namespace softdelta::test
