// Mistakes of delta rules, in the words of docs/math.md, "The chunk form".
#include <cmath>

#include "diagnose/catalogue/catalogue.h"
#include "io/call/operands.h"

namespace softdelta::diagnose {

namespace {

using M = Mistake;
using io::Call;

const char* const delta_net = "DeltaNet, arXiv:2406.06484";
const char* const gated = "Gated DeltaNet, arXiv:2412.06464";
const char* const kimi = "Kimi Linear, arXiv:2510.26692";
const char* const comba = "Comba, arXiv:2506.02475";
const char* const fla = "flash-linear-attention, chunk kernels";
const char* const math = "math.md, Unfold";

bool erases(const Call& c) {
    return io::rule_of(c).erases();
}
bool has_gate(const Call& c) {
    return c.delta.g || c.delta.g_gamma;
}
bool erases_before_decay(const Call& c) {
    return io::rule_of(c).erase == core::Erase::from_previous_state;
}
bool has_beta(const Call& c) {
    return static_cast<bool>(c.delta.beta);
}
bool has_logits(const Call& c) {
    return c.delta.beta && c.delta_options.use_beta_sigmoid_in_kernel;
}
bool doubles_beta(const Call& c) {
    return has_logits(c) && c.delta_options.allow_neg_eigval;
}
bool has_raw_gate(const Call& c) {
    return c.delta.g && c.delta_options.use_gate_in_kernel;
}
bool has_A_log(const Call& c) {
    return has_raw_gate(c) && c.delta.A_log;
}
bool has_dt_bias(const Call& c) {
    return has_raw_gate(c) && c.delta.dt_bias;
}
bool has_norm(const Call& c) {
    return c.delta_options.use_qk_l2norm_in_kernel;
}
bool has_initial_state(const Call& c) {
    return static_cast<bool>(c.delta.initial_state);
}
bool has_dfinal_state(const Call& c) {
    return static_cast<bool>(c.dfinal_state);
}
bool has_groups(const Call& c) {
    return c.delta.v.shape(2) > c.delta.q.shape(2);
}
bool is_packed(const Call& c) {
    return !c.packing.tokens.empty();
}
bool shares_p(const Call& c) {
    return erases(c) && !c.delta.p;
}

const Entry entries[] = {
    // forward
    {M::score_without_diagonal, "score_without_diagonal", "o reads the state from before the token's own update",
     "score = tril(…) → stril(…)", delta_net},
    {M::erase_with_diagonal, "erase_with_diagonal", "the mask of L keeps the diagonal", "L = stril(…) → tril(…)",
     delta_net, Phase::forward, erases},
    {M::inverse_first_order, "inverse_first_order", "the inverse stops after its first term", "A = (I + L)⁻¹ → I − L",
     delta_net, Phase::forward, erases},
    {M::w_without_beta, "w_without_beta", "beta is missing in w", "w = A(β p e^E) → A(p e^E)", delta_net,
     Phase::forward, erases},
    {M::v_new_ignores_state, "v_new_ignores_state", "v_new does not erase what the state holds", "v_new = u − w h → u",
     delta_net, Phase::forward, erases},
    {M::o_without_scale, "o_without_scale", "the part of o that comes from the state is not scaled",
     "o = scale·(q e^G) h + … → (q e^G) h + …", fla},
    {M::erase_after_decay, "erase_after_decay", "Comba erases from the decayed state, as Gated DeltaNet does",
     "E_i = G_(i−1) → G_i", comba, Phase::operands, erases_before_decay},
    {M::gate_exp2, "gate_exp2", "a gate in natural logarithm is taken as one of base 2", "e^G → 2^G", kimi,
     Phase::operands, has_gate},
    {M::gate_over_ln2, "gate_over_ln2", "a gate in base 2 is taken as natural: it is divided by ln 2 once too often",
     "e^G → e^(G/ln 2)", kimi, Phase::operands, has_gate},
    {M::state_decayed_twice, "state_decayed_twice", "the state decays twice from chunk to chunk",
     "S' = e^G_last S + … → e^(2 G_last) S + …", gated, Phase::forward, has_gate},
    {M::state_not_decayed, "state_not_decayed", "the state does not decay from chunk to chunk",
     "S' = e^G_last S + … → S + …", gated, Phase::forward, has_gate},
    {M::initial_state_ignored, "initial_state_ignored", "the first chunk starts from a state of zeros",
     "S_0 = initial_state → 0", fla, Phase::forward, has_initial_state},
    {M::tail_rows_lost, "tail_rows_lost", "rows of a last chunk that fill no tile of 16 are not written",
     "o_i → 0 for the last n mod 16 rows", fla, Phase::results},
    {M::value_head_modulo, "value_head_modulo", "value heads read key heads in turn instead of in groups",
     "key head of h: h / (HV/H) → h mod H", "softdelta.h", Phase::operands, has_groups},
    {M::final_state_transposed, "final_state_transposed", "states are written with K and V swapped",
     "final_state = S → Sᵀ", fla, Phase::results},
    {M::beta_not_doubled, "beta_not_doubled", "negative eigenvalues are asked for, yet beta stays below 1",
     "β = 2σ(x) → σ(x)", "arXiv:2411.12537", Phase::operands, doubles_beta},
    {M::state_leaks, "state_leaks", "a packed sequence starts from the state that the one before it left",
     "S_0 of sequence n → S' of sequence n − 1", fla, Phase::forward, is_packed},
    {M::u_without_beta, "u_without_beta", "beta is missing in u", "u = A(β v) → A v", delta_net, Phase::forward,
     [](const Call& c) { return erases(c) && has_beta(c); }},
    {M::w_without_decay, "w_without_decay", "the decay is missing in w", "w = A(β p e^E) → A(β p)", gated,
     Phase::forward, [](const Call& c) { return erases(c) && has_gate(c); }},
    {M::write_key_without_decay, "write_key_without_decay", "what a row writes is not decayed up to the chunk's end",
     "S' = … + (k e^(G_last − G))ᵀ U → kᵀ U", gated, Phase::forward, has_gate},
    {M::o_without_state, "o_without_state", "o lacks what the state holds from earlier chunks",
     "o = scale·(q e^G) h + score U → score U", fla},
    {M::read_query_without_decay, "read_query_without_decay",
     "the state is read without the decay since its chunk began", "o = scale·(q e^G) h + … → scale·q h + …", gated,
     Phase::forward, has_gate},
    {M::q_without_norm, "q_without_norm", "q is not divided by its norm", "q = q r → q", fla, Phase::operands,
     has_norm},
    {M::value_size_in_delta_scale, "scale_of_value_size", "the default scale comes from V instead of K",
     "scale = K^-1/2 → V^-1/2", "softdelta.h", Phase::forward,
     [](const Call& c) { return std::isnan(c.delta_options.scale) && c.delta.q.shape(3) != c.delta.v.shape(3); }},
    {M::A_log_without_exp, "A_log_without_exp", "A_log is taken for e^A_log",
     "g = −e^A_log softplus(x) → −A_log softplus(x)", kimi, Phase::operands, has_A_log},
    {M::gate_bias_ignored, "dt_bias_ignored", "dt_bias is not added to the raw gate", "x + dt_bias → x", kimi,
     Phase::operands, has_dt_bias},
    {M::initial_state_of_first, "initial_state_of_first", "every sequence starts from the initial state of the first",
     "S_0 = initial_state[n] → initial_state[0]", fla, Phase::forward,
     [](const Call& c) { return has_initial_state(c) && c.delta.initial_state.shape(0) > 1; }},
    {M::state_bf16, "state_bf16", "the state is rounded to bf16 from chunk to chunk", "S' → bf16(S')", fla},

    // the gradient of the inverse
    {M::dL_left_not_transposed, "dL_left_not_transposed", "the left factor of dL is not transposed",
     "dL = −stril(Aᵀ dA Aᵀ) → −stril(A dA Aᵀ)", delta_net, Phase::backward, erases},
    {M::dL_right_not_transposed, "dL_right_not_transposed", "the right factor of dL is not transposed",
     "dL = −stril(Aᵀ dA Aᵀ) → −stril(Aᵀ dA A)", delta_net, Phase::backward, erases},
    {M::dL_not_transposed, "dL_not_transposed", "neither factor of dL is transposed",
     "dL = −stril(Aᵀ dA Aᵀ) → −stril(A dA A)", delta_net, Phase::backward, erases},
    {M::dL_with_diagonal, "dL_with_diagonal", "the mask after dL keeps the diagonal", "dL = −stril(…) → −tril(…)",
     delta_net, Phase::backward, erases},
    {M::dL_unmasked, "dL_unmasked", "dL is not masked", "dL = −stril(…) → −(…)", delta_net, Phase::backward, erases},
    {M::dw_sign, "dw_sign", "the sign of dw is wrong", "dw = −du hᵀ → du hᵀ", delta_net, Phase::backward, erases},
    {M::dA_without_w, "dA_without_w", "dA lacks the part that comes by way of w",
     "dA = du (βv)ᵀ + dw erase_keyᵀ → du (βv)ᵀ", delta_net, Phase::backward, erases},
    {M::dk_without_erase_scores, "dk_without_erase_scores", "dk lacks the part that comes by way of L",
     "dk = … + Σ derase_score β p e^… → …", math, Phase::backward, erases},

    // the gate's gradient
    {M::dg_without_last_row, "dg_without_last_row", "the last row of a chunk lacks what its gate does to the state",
     "dG_last += Σ k∘kw + e^G_last rowsum(S∘dS') → nothing", math, Phase::backward, has_gate},
    {M::dg_last_row_everywhere, "dg_last_row_everywhere", "the term of the last row is added to every row",
     "dG_last += x → dG_i += x for all i", math, Phase::backward, has_gate},
    {M::dg_last_row_without_decay, "dg_last_row_without_decay", "the term of the last row forgets the state's decay",
     "e^G_last rowsum(S∘dS') → rowsum(S∘dS')", math, Phase::backward, has_gate},
    {M::dg_exclusive, "dg_exclusive", "the reverse sum of dg leaves out a row's own term",
     "dg_i = Σ_(j ≥ i) dG_j → Σ_(j > i) dG_j", math, Phase::results, has_gate},
    {M::dg_erase_inclusive, "dg_erase_inclusive", "Comba's gate is taken to reach the erasing key of its own row",
     "dg_i = … + Σ_(j > i) dE_j → Σ_(j ≥ i) dE_j", comba, Phase::results, erases_before_decay},
    {M::dg_through_chunks, "dg_through_chunks", "the reverse sum of dg runs on over the borders of chunks",
     "dg_i: rows of the chunk → of the sequence", math, Phase::results, has_gate},
    {M::dg_through_sequences, "dg_through_sequences", "the reverse sum of dg runs on into the sequence before",
     "dg_i: rows of the chunk → and the first chunk of the next sequence", math, Phase::results,
     [](const Call& c) { return has_gate(c) && is_packed(c); }},
    {M::dA_log_without_gate, "dA_log_without_gate", "dA_log sums dg without the gate", "dA_log = Σ dg∘g → Σ dg", math,
     Phase::results, has_A_log},
    {M::gate_bias_without_slope, "ddt_bias_without_slope", "ddt_bias sums dg without the slope of the raw gate",
     "ddt_bias = Σ dx → Σ dg", math, Phase::results, has_dt_bias},
    {M::raw_gate_without_slope, "raw_gate_without_slope", "the gradient of the raw gate is that of the gate",
     "dx = dg·∂g/∂x → dg", math, Phase::results, has_raw_gate},
    {M::dg_without_erase_path, "dg_without_erase_path", "dg lacks the decay of what is erased, p∘dp",
     "dg = revsum(dG + dE) → revsum(dG)", math, Phase::backward,
     [](const Call& c) { return erases(c) && has_gate(c); }},
    {M::dg_forward_sum, "dg_forward_sum", "the sum of dg within a chunk runs forward instead of backward",
     "dg_i = Σ_(j ≥ i) dG_j → Σ_(j ≤ i) dG_j", math, Phase::results, has_gate},

    // other gradients
    {M::dbeta_without_key_path, "dbeta_without_key_path", "dbeta lacks the part that comes by way of the keys",
     "dβ = rowsum(dR∘v) + rowsum(p∘e) → rowsum(dR∘v)", math, Phase::backward,
     [](const Call& c) { return erases(c) && has_beta(c); }},
    {M::dbeta_with_beta, "dbeta_with_beta", "dbeta is multiplied by beta", "dβ → β dβ", math, Phase::backward,
     [](const Call& c) { return erases(c) && has_beta(c); }},
    {M::dbeta_without_value_path, "dbeta_without_value_path", "dbeta lacks the part that comes by way of the values",
     "dβ = rowsum(dR∘v) + rowsum(p∘e) → rowsum(p∘e)", math, Phase::backward,
     [](const Call& c) { return erases(c) && has_beta(c); }},
    {M::dv_without_beta, "dv_without_beta", "beta is missing in dv", "dv = β dR → dR", math, Phase::backward, erases},
    {M::beta_logits_without_slope, "beta_logits_without_slope", "the gradient of beta's logit is that of beta",
     "dx = dβ·∂β/∂x → dβ", math, Phase::results, has_logits},
    {M::delta_dq_without_scale, "dq_without_scale", "dq is not scaled", "dq = scale·(…) → (…)", math, Phase::backward},
    {M::delta_dk_without_scale, "dk_without_scale", "the part of dk that comes by way of the scores is not scaled",
     "dk = scale·Σ dscore q e^… + … → Σ dscore q e^… + …", math, Phase::backward},
    {M::delta_dk_scaled_twice, "dk_scaled_twice", "the part of dk that comes by way of the scores is scaled twice",
     "dk = scale·Σ dscore q e^… + … → scale²·Σ …", math, Phase::backward},
    {M::dk_without_p_path, "dk_without_p_path", "dk lacks the erasing path, dp", "dk = dk + dp → dk", math,
     Phase::results, shares_p},
    {M::dk_without_write, "dk_without_write", "dk lacks the path through the state", "dk = kw + … → …", math,
     Phase::backward},
    {M::dq_without_norm, "dq_without_norm", "the adjoint of l2norm is missing for q", "dq = r(dy − y Σ dy∘y) → dy",
     math, Phase::results, has_norm},
    {M::dk_without_norm, "dk_without_norm", "the adjoint of l2norm is missing for k", "dk = r(dy − y Σ dy∘y) → dy",
     math, Phase::results, has_norm},
    {M::last_value_head_of_group, "last_head_of_group",
     "dq, dk and dp hold the last value head of a group instead of the sum", "dk = Σ_h dk_h → dk_(last h)",
     "softdelta.h", Phase::results, has_groups},
    {M::dfinal_state_ignored, "dfinal_state_ignored", "the gradient of the final state is taken to be zero",
     "dS' of the last chunk = dfinal_state → 0", fla, Phase::backward, has_dfinal_state},
    {M::dinitial_state_without_decay, "dinitial_state_without_decay",
     "dinitial_state forgets the decay of the first chunk", "dS = e^G_last dS' + … → dS' + …", math, Phase::backward,
     has_gate},
    {M::dstate_without_decay, "dstate_without_decay", "the state's gradient does not decay from chunk to chunk",
     "dS = e^G_last dS' + … → dS' + …, in every chunk", math, Phase::backward, has_gate},
    {M::dstate_without_erase, "dstate_without_erase", "the state's gradient lacks the erasing path",
     "dS = … − erase_keyᵀ dR → …", math, Phase::backward, erases},
    {M::du_without_state, "du_without_state", "du lacks what comes through the state that leaves the chunk",
     "dU = scoreᵀ do + kg dh → scoreᵀ do", math, Phase::backward},
    {M::dq_without_state, "dq_without_state", "dq lacks the part that comes by way of the state",
     "dq = scale·(do hᵀ∘e^G + …) → scale·(…)", math, Phase::backward},
    {M::dq_without_scores, "dq_without_scores", "dq lacks the part that comes by way of the scores",
     "dq = scale·(… + Σ dscore k e^…) → scale·(…)", math, Phase::backward},
    {M::norm_without_projection, "norm_without_projection",
     "the adjoint of l2norm divides by the norm but does not project", "dx = r(dy − y Σ dy∘y) → r dy", math,
     Phase::results, has_norm},
};

}  // namespace

std::span<const Entry> delta_entries() {
    return entries;
}

}  // namespace softdelta::diagnose
