#include "diagnose/catalogue/places.h"

#include <algorithm>
#include <deque>
#include <initializer_list>

#include "io/call/operands.h"

namespace softdelta::diagnose {

namespace {

using C = Change;
using io::Call;

enum class Kind {
    rows,       // a row of numbers for each token
    by_beta,    // the same, where β has its rows
    beta,       // β itself
    gates,      // before they are summed
    square,     // products of rows of a chunk, i ≥ j
    strict,     // i > j
    scores,     // of queries with keys
    state,      // K × V
    exponents,  // of each row
    decay,      // exponents of pairs of rows
    last,       // the exponent of the state
    sums,       // of gates, before any exponential
    factor,     // one number, or numbers that only factors change
    heads,      // summed over
    tiles,      // summed over
    online,     // summed over tiles, rescaled
    running,    // the reverse sum of dg
    index,      // which key head
    sink,       // a number of each head
    window,     // how far it reaches
    mask,       // applied or not
    flag,       // of a tile
    dead,       // rows without a key
    norm,       // l2norm
    written,    // a result of rows
    written_state,
    written_number
};

struct Changed {
    Change change;
    const char* words;    // after the words of the place
    const char* formula;  // X: the formula of the place
};

const Changed changes[] = {
    {C::missing, "is missing", "X → 0"},
    {C::doubled, "counts twice", "X → 2 X"},
    {C::halved, "is halved", "X → X/2"},
    {C::negated, "has the wrong sign", "X → −X"},
    {C::times_scale, "is scaled once too often", "X → scale·X"},
    {C::over_scale, "is not scaled, or divided by the scale", "X → X/scale"},
    {C::times_ln2, "is multiplied by ln 2", "X → ln 2·X"},
    {C::over_ln2, "is divided by ln 2", "X → X/ln 2"},
    {C::times_group, "is multiplied by the group's size", "X → (heads of a group)·X"},
    {C::over_group, "is averaged over the group's heads", "X → X/(heads of a group)"},
    {C::times_beta, "is multiplied by beta once too often", "X → β X"},
    {C::over_beta, "lacks beta, or is divided by it", "X → X/β"},
    {C::row_before, "is that of the row before", "X_i → X_(i−1)"},
    {C::row_after, "is that of the row after", "X_i → X_(i+1)"},
    {C::two_rows_before, "is that of two rows before", "X_i → X_(i−2)"},
    {C::tail_lost, "is lost in rows that fill no tile of 16", "X_i → 0 for the last n mod 16 rows"},
    {C::first_row_lost, "is lost in the first row", "X_0 → 0"},
    {C::last_row_lost, "is lost in the last row", "X_last → 0"},
    {C::last_warp_lost, "is lost in rows 48 to 63 of each tile of 64", "X_i → 0 for i mod 64 ≥ 48"},
    {C::last_of_16_lost, "is lost in the last row of every 16", "X_i → 0 for i mod 16 = 15"},
    {C::stale, "is that of the chunk or tile computed before", "X → X of the one before"},
    {C::transposed, "is transposed", "X → Xᵀ"},
    {C::without_diagonal, "lacks its diagonal", "X_ii → 0"},
    {C::unmasked, "is not masked", "tril(…) → (…)"},
    {C::first_tile_lost, "lacks the first 64 keys", "X_ij → 0 for j < 64"},
    {C::last_tile_lost, "lacks the last tile of 64 keys", "X_ij → 0 for the last tile j"},
    {C::bf16, "is rounded to bf16", "X → bf16(X)"},
    {C::undecayed, "is left out", "X → 0"},
    {C::twice, "counts twice", "X → 2 X"},
    {C::base_2, "is taken to base 2", "e^X → 2^X"},
    {C::base_over_ln2, "is divided by ln 2 once too often", "X → X/ln 2"},
    {C::decay_of_row_before, "excludes the row's own gate", "X_i → X_(i−1)"},
    {C::decay_of_row_after, "includes the next row's gate", "X_i → X_(i+1)"},
    {C::last_only, "holds only the last one: each overwrites it", "Σ → the last"},
    {C::first_only, "holds only the first one", "Σ → the first"},
    {C::unsummed, "is not formed", "Σ → the row's own"},
    {C::summed_by_tile, "begins anew every 16 rows", "Σ over the chunk → over 16 rows"},
    {C::one, "is taken as 1", "X → 1"},
    {C::squashed, "goes through a sigmoid", "X → σ(X)"},
    {C::cumulated, "is summed along the rows once too often", "X_i → Σ_(j ≤ i) X_j"},
    {C::not_rescaled, "is not rescaled when the maximum grows", "e^(s − m) → e^(s − m of its tile)"},
    {C::swapped, "is swapped with k", "q, k → k, q"},
    {C::always, "is applied though it was not asked for", "x → x r"},
    {C::head_before, "is that of the head before", "X_h → X_(h−1)"},
    {C::head_after, "is that of the head after", "X_h → X_(h+1)"},
    {C::first_head, "is that of the first head", "X_h → X_0"},
    {C::modulo, "takes heads in turn instead of in groups", "h / group → h mod groups"},
    {C::not_a_number, "is NaN", "X → NaN"},
    {C::first_sequence, "is that of the first sequence", "X_n → X_0"},
};

using Changes = std::initializer_list<Change>;

std::vector<Change> changes_of(Kind kind) {
    std::vector<Change> all;
    const auto add = [&](const Changes& some) {
        for (const Change change : some) all.push_back(change);
    };
    const Changes factors = {C::missing,    C::doubled,   C::halved,   C::negated,     C::times_scale,
                             C::over_scale, C::times_ln2, C::over_ln2, C::times_group, C::over_group},
                  rows = {C::row_before,     C::row_after,     C::two_rows_before, C::tail_lost,
                          C::first_row_lost, C::last_row_lost, C::last_warp_lost,  C::last_of_16_lost},
                  decays = {C::undecayed, C::twice, C::base_2, C::base_over_ln2},
                  neighbours = {C::decay_of_row_before, C::decay_of_row_after};
    switch (kind) {
        case Kind::rows:
            add(factors), add(rows), add({C::stale});
            break;
        case Kind::by_beta:
            add(factors), add({C::times_beta, C::over_beta}), add(rows), add({C::stale});
            break;
        case Kind::beta:
            add(factors), add({C::times_beta}), add(rows), add({C::stale, C::one, C::squashed});
            break;
        case Kind::gates:
            add(factors), add(rows), add({C::cumulated});
            break;
        case Kind::square:
            add(factors), add({C::times_beta, C::over_beta, C::transposed, C::without_diagonal, C::unmasked, C::stale});
            break;
        case Kind::strict:
            add(factors), add({C::times_beta, C::over_beta, C::transposed, C::stale});
            break;
        case Kind::scores:
            add(factors), add({C::first_tile_lost, C::last_tile_lost, C::row_before, C::row_after, C::stale});
            break;
        case Kind::state:
            add(factors), add({C::transposed, C::stale, C::bf16});
            break;
        case Kind::exponents:
            add(decays), add(neighbours);
            break;
        case Kind::last:
        case Kind::decay:
            add(decays);
            break;
        case Kind::sums:
            add(decays), add(neighbours), add({C::unsummed, C::summed_by_tile});
            break;
        case Kind::factor:
        case Kind::written_number:
            add(factors);
            break;
        case Kind::heads:
            add({C::last_only, C::first_only, C::modulo});
            break;
        case Kind::tiles:
            add({C::last_only, C::first_only});
            break;
        case Kind::online:
            add({C::not_rescaled, C::last_only, C::first_only});
            break;
        case Kind::running:
            add({C::unsummed, C::summed_by_tile});
            break;
        case Kind::index:
            add({C::head_before, C::head_after, C::first_head});
            break;
        case Kind::sink:
            add(factors), add({C::head_before, C::head_after, C::first_head});
            break;
        case Kind::window:
            add({C::missing, C::doubled, C::halved});
            break;
        case Kind::mask:
            add({C::missing});
            break;
        case Kind::flag:
            add({C::stale});
            break;
        case Kind::dead:
            add({C::not_a_number, C::unmasked});
            break;
        case Kind::norm:
            add({C::missing, C::always});
            break;
        case Kind::written:
            add(factors), add(rows), add({C::head_before, C::head_after, C::first_head});
            break;
        case Kind::written_state:
            add(factors),
                add({C::transposed, C::bf16, C::head_before, C::head_after, C::first_head, C::first_sequence});
            break;
    }
    return all;
}

using Applies = bool (*)(const Call&);

struct Place {
    const char* name;
    Kind kind;
    const char* formula;
    const char* words;
    Phase from;
    Applies applies;
};

bool always(const Call&) {
    return true;
}
bool erases(const Call& c) {
    return io::rule_of(c).erases();
}
bool gated(const Call& c) {
    return c.delta.g || c.delta.g_gamma;
}
bool erases_gated(const Call& c) {
    return erases(c) && gated(c);
}
bool has_beta(const Call& c) {
    return erases(c) && c.delta.beta;
}
bool has_p(const Call& c) {
    return static_cast<bool>(c.delta.p);
}
bool shares_p(const Call& c) {
    return erases(c) && !c.delta.p;
}
bool grouped(const Call& c) {
    return c.delta.v.shape(2) > c.delta.q.shape(2);
}
bool has_p_grouped(const Call& c) {
    return has_p(c) && grouped(c);
}
bool has_A_log(const Call& c) {
    return static_cast<bool>(c.delta.A_log);
}
bool has_dt_bias(const Call& c) {
    return static_cast<bool>(c.delta.dt_bias);
}

// Names and formulas of docs/math.md.
const Place delta_places[] = {
    {"scale", Kind::factor, "scale", "the scale", Phase::forward, always},
    {"key head", Kind::index, "key head of h", "the key head that a value head reads", Phase::operands, always},
    {"norm of q", Kind::norm, "q r", "l2norm of q", Phase::operands, always},
    {"norm of k", Kind::norm, "k r", "l2norm of k", Phase::operands, always},
    {"q", Kind::by_beta, "q", "q", Phase::operands, always},
    {"k", Kind::by_beta, "k", "k", Phase::operands, always},
    {"k in score", Kind::by_beta, "k", "k, but not where it erases,", Phase::operands, shares_p},
    {"k in L and w", Kind::by_beta, "p = k", "k where it erases", Phase::operands, shares_p},
    {"p", Kind::by_beta, "p", "p", Phase::operands, has_p},
    {"v", Kind::by_beta, "v", "v", Phase::operands, always},
    {"β", Kind::beta, "β", "beta", Phase::operands, has_beta},
    {"g", Kind::gates, "g", "the gate", Phase::operands, gated},
    {"G", Kind::sums, "G", "the gate's sum G", Phase::operands, gated},
    {"E", Kind::sums, "E", "the gate's sum E, of what erases,", Phase::operands, erases_gated},
    {"do", Kind::by_beta, "do", "the gradient of o", Phase::backward, always},
    // forward
    {"S", Kind::state, "S", "the state that enters a chunk", Phase::forward, always},
    {"score.decay", Kind::decay, "G_i − G_j", "the decay between the rows of score", Phase::forward, gated},
    {"score", Kind::square, "score", "score", Phase::forward, always},
    {"L.decay", Kind::decay, "E_i − G_j", "the decay between the rows of L", Phase::forward, erases_gated},
    {"L", Kind::strict, "L", "L", Phase::forward, erases},
    {"A", Kind::square, "A", "A = (I + L)⁻¹", Phase::forward, erases},
    {"erase_key.decay", Kind::exponents, "E", "the decay in erase_key", Phase::forward, erases_gated},
    {"erase_key", Kind::by_beta, "β p e^E", "erase_key", Phase::forward, erases},
    {"beta_v", Kind::by_beta, "β v", "β v", Phase::forward, erases},
    {"w", Kind::by_beta, "A erase_key", "w", Phase::forward, erases},
    {"u", Kind::by_beta, "A (β v)", "u", Phase::forward, erases},
    {"S in w S", Kind::state, "S", "the state that w erases from", Phase::forward, erases},
    {"w S", Kind::by_beta, "w S", "what v_new erases, w S,", Phase::forward, erases},
    {"v_new", Kind::by_beta, "v_new", "v_new", Phase::forward, always},
    {"v_new in o", Kind::by_beta, "v_new", "v_new in o", Phase::forward, always},
    {"score v_new", Kind::by_beta, "score v_new", "the part of o from the chunk's own rows", Phase::forward, always},
    {"read_query.decay", Kind::exponents, "G", "the decay in read_query", Phase::forward, gated},
    {"S in o", Kind::state, "S", "the state that o reads", Phase::forward, always},
    {"read_query S", Kind::by_beta, "read_query S", "the part of o from the state", Phase::forward, always},
    {"o", Kind::by_beta, "o", "o", Phase::forward, always},
    {"write_key.decay", Kind::exponents, "G_last − G", "the decay in write_key", Phase::forward, gated},
    {"write_key", Kind::by_beta, "k e^(G_last − G)", "write_key", Phase::forward, always},
    {"v_new in S'", Kind::by_beta, "v_new", "v_new in what is written to the state", Phase::forward, always},
    {"state_decay", Kind::last, "G_last", "the decay of the state", Phase::forward, gated},
    {"state_decay∘S", Kind::state, "state_decay∘S", "the state that a chunk passes on", Phase::forward, always},
    {"write_keyᵀ v_new", Kind::state, "write_keyᵀ v_new", "what a chunk writes to the state", Phase::forward, always},
    {"S'", Kind::state, "S'", "the state that leaves a chunk", Phase::forward, always},
    // backward
    {"dS'", Kind::state, "dS'", "the gradient of the state that leaves a chunk", Phase::backward, always},
    {"scoreᵀ do.decay", Kind::decay, "G_i − G_j", "the decay in the part of dU from the chunk's own rows",
     Phase::backward, gated},
    {"scoreᵀ do", Kind::by_beta, "scoreᵀ do", "the part of dU from the chunk's own rows", Phase::backward, always},
    {"write_key dS'.decay", Kind::exponents, "G_last − G", "the decay in the part of dU from the state",
     Phase::backward, gated},
    {"write_key dS'", Kind::by_beta, "write_key dS'", "the part of dU from the state", Phase::backward, always},
    {"dU", Kind::by_beta, "dU", "dU", Phase::backward, always},
    {"v_new in dscore", Kind::by_beta, "v_new", "v_new in dscore", Phase::backward, always},
    {"dscore", Kind::square, "dscore", "dscore", Phase::backward, always},
    {"dS'.decay", Kind::last, "G_last", "the decay of the state's gradient", Phase::backward, gated},
    {"state_decay∘dS'", Kind::state, "state_decay∘dS'", "the gradient that a chunk's state passes on", Phase::backward,
     always},
    {"read_queryᵀ do.decay", Kind::exponents, "G", "the decay in the part of dS from o", Phase::backward, gated},
    {"read_queryᵀ do", Kind::state, "read_queryᵀ do", "the part of dS from o", Phase::backward, always},
    {"S in dq", Kind::state, "S", "the state in dq", Phase::backward, always},
    {"dq from S.decay", Kind::exponents, "G", "the decay in the part of dq from the state", Phase::backward, gated},
    {"dq from S", Kind::by_beta, "(do Sᵀ)∘e^G", "the part of dq from the state", Phase::backward, always},
    {"dq from scores.decay", Kind::decay, "G_i − G_j", "the decay in the part of dq from the scores", Phase::backward,
     gated},
    {"dq from scores", Kind::by_beta, "Σ dscore k e^(G_i − G_j)", "the part of dq from the scores", Phase::backward,
     always},
    {"dq", Kind::by_beta, "dq", "dq, as it goes into dg too,", Phase::backward, always},
    {"v_new in kw", Kind::by_beta, "v_new", "v_new in kw", Phase::backward, always},
    {"kw.decay", Kind::exponents, "G_last − G", "the decay in kw", Phase::backward, gated},
    {"kw", Kind::by_beta, "kw", "the part of dk from the state, kw,", Phase::backward, always},
    {"dk from scores.decay", Kind::decay, "G_i − G_j", "the decay in the part of dk from the scores", Phase::backward,
     gated},
    {"dk from scores", Kind::by_beta, "scale·Σ dscore q e^(G_i − G_j)", "the part of dk from the scores",
     Phase::backward, always},
    {"S in dw", Kind::state, "S", "the state in dw", Phase::backward, erases},
    {"dw", Kind::by_beta, "dw", "dw", Phase::backward, erases},
    {"du (β v)ᵀ", Kind::square, "du (β v)ᵀ", "the part of dA from u", Phase::backward, erases},
    {"dw erase_keyᵀ", Kind::square, "dw erase_keyᵀ", "the part of dA from w", Phase::backward, erases},
    {"dA", Kind::square, "dA", "dA", Phase::backward, erases},
    {"dL", Kind::strict, "dL", "dL", Phase::backward, erases},
    {"Aᵀ du", Kind::by_beta, "Aᵀ du", "dR, the gradient of β v,", Phase::backward, erases},
    {"Aᵀ dw", Kind::by_beta, "Aᵀ dw", "the gradient of erase_key", Phase::backward, erases},
    {"e from S.decay", Kind::exponents, "E", "the decay in the part of e from the state", Phase::backward,
     erases_gated},
    {"e from S", Kind::by_beta, "(Aᵀ dw)∘e^E", "the part of e from the state", Phase::backward, erases},
    {"e from L.decay", Kind::decay, "E_i − G_j", "the decay in the part of e from L", Phase::backward, erases_gated},
    {"e from L", Kind::by_beta, "Σ dL k e^(E_i − G_j)", "the part of e from L", Phase::backward, erases},
    {"e", Kind::by_beta, "e", "e, of which dp and dβ are formed,", Phase::backward, erases},
    {"dk from L.decay", Kind::decay, "E_i − G_j", "the decay in the part of dk from L", Phase::backward, erases_gated},
    {"dk from L", Kind::by_beta, "Σ dL β p e^(E_i − G_j)", "the part of dk from L", Phase::backward, erases},
    {"dp", Kind::by_beta, "dp", "dp", Phase::backward, erases},
    {"dv", Kind::by_beta, "dv", "dv", Phase::backward, always},
    {"rowsum(dR∘v)", Kind::by_beta, "rowsum(dR∘v)", "the part of dβ from v", Phase::backward, has_beta},
    {"rowsum(p∘e)", Kind::by_beta, "rowsum(p∘e)", "the part of dβ from the keys", Phase::backward, has_beta},
    {"dβ", Kind::by_beta, "dβ", "dβ", Phase::backward, has_beta},
    {"wᵀ dU", Kind::state, "wᵀ dU", "the erasing part of dS", Phase::backward, erases},
    {"dk", Kind::by_beta, "dk", "dk before dp is added", Phase::backward, always},
    {"q∘dq", Kind::by_beta, "q∘dq", "the part q∘dq of dg", Phase::backward, gated},
    {"k∘dk", Kind::by_beta, "k∘dk", "the part k∘dk of dg", Phase::backward, gated},
    {"p∘dp", Kind::by_beta, "p∘dp", "the part p∘dp of dg", Phase::backward, erases_gated},
    {"Σ k∘kw", Kind::factor, "Σ k∘kw", "what dg's last row has from the writes", Phase::backward, gated},
    {"S∘dS'.decay", Kind::last, "G_last", "the decay in what dg's last row has from the state", Phase::backward, gated},
    {"S∘dS'", Kind::factor, "e^G_last rowsum(S∘dS')", "what dg's last row has from the state", Phase::backward, gated},
    {"dS", Kind::state, "dS", "the gradient of the state that enters a chunk", Phase::backward, always},
    // results
    {"sum of dg", Kind::running, "dg_i = Σ_(j ≥ i)", "the reverse sum of dg", Phase::results, gated},
    {"sum over heads of dq", Kind::heads, "dq = Σ_h", "the sum of dq over the heads of a group", Phase::results,
     grouped},
    {"sum over heads of dk", Kind::heads, "dk = Σ_h", "the sum of dk over the heads of a group", Phase::results,
     grouped},
    {"sum over heads of dp", Kind::heads, "dp = Σ_h", "the sum of dp over the heads of a group", Phase::results,
     has_p_grouped},
    {"o, as written", Kind::written, "o", "o as it is written", Phase::results, always},
    {"final_state, as written", Kind::written_state, "final_state", "final_state", Phase::results, always},
    {"dq, as written", Kind::written, "dq", "dq as it is written", Phase::results, always},
    {"dk, as written", Kind::written, "dk", "dk as it is written", Phase::results, always},
    {"dp, as written", Kind::written, "dp", "dp as it is written", Phase::results, has_p},
    {"dv, as written", Kind::written, "dv", "dv as it is written", Phase::results, always},
    {"dg, as written", Kind::written, "dg", "dg as it is written", Phase::results, gated},
    {"dbeta, as written", Kind::written, "dβ", "dβ as it is written", Phase::results, has_beta},
    {"dinitial_state, as written", Kind::written_state, "dinitial_state", "dinitial_state", Phase::results, always},
    {"dA_log, as written", Kind::written_number, "dA_log", "dA_log", Phase::results, has_A_log},
    {"ddt_bias, as written", Kind::written_number, "ddt_bias", "ddt_bias", Phase::results, has_dt_bias},
};

bool capped(const Call& c) {
    return c.attention_options.softcap > 0;
}
bool biased(const Call& c) {
    return static_cast<bool>(c.attention.bias) || static_cast<bool>(c.attention.alibi_slopes);
}
bool has_bias(const Call& c) {
    return static_cast<bool>(c.attention.bias);
}
bool hides_keys(const Call& c) {
    const AttentionOptions& o = c.attention_options;
    return c.attention.mask || c.attention.bias || o.causal != Causal::none || o.window_left >= 0 ||
           o.window_right >= 0 || o.top_w >= 0;
}
bool has_sink(const Call& c) {
    return static_cast<bool>(c.attention.sink);
}
bool causal(const Call& c) {
    return c.attention_options.causal != Causal::none;
}
bool masked(const Call& c) {
    return static_cast<bool>(c.attention.mask);
}
bool windowed(const Call& c) {
    return c.attention_options.window_left >= 0 || c.attention_options.window_right >= 0;
}
bool has_dlse(const Call& c) {
    return static_cast<bool>(c.dlse);
}
bool queries_grouped(const Call& c) {
    return c.attention.q.shape(2) > c.attention.k.shape(2);
}

// Names of the contract: s = softcap(scale q kᵀ) + bias, m, l, p, o, lse, D, dp, ds.
const Place attention_places[] = {
    {"scale", Kind::factor, "scale", "the scale", Phase::forward, always},
    {"key head", Kind::index, "key head of h", "the key head that a query head reads", Phase::forward, always},
    {"q", Kind::rows, "q", "q", Phase::forward, always},
    {"k", Kind::rows, "k", "k", Phase::forward, always},
    {"v", Kind::rows, "v", "v", Phase::forward, always},
    {"do", Kind::rows, "do", "the gradient of o", Phase::backward, always},
    {"q kᵀ", Kind::scores, "scale·q kᵀ", "the product q kᵀ", Phase::forward, always},
    {"p of rows without a key", Kind::dead, "p = 0", "p of a row without a key, and so its gradients,", Phase::forward,
     hides_keys},
    {"tile seen", Kind::flag, "tile j is seen", "whether one of 64 rows sees a tile of keys", Phase::forward,
     hides_keys},
    {"bias", Kind::factor, "bias", "the bias", Phase::forward, biased},
    {"softcap", Kind::factor, "cap", "the softcap", Phase::forward, capped},
    {"causal", Kind::mask, "hidden keys", "the causal mask", Phase::forward, causal},
    {"mask", Kind::mask, "hidden keys", "the mask", Phase::forward, masked},
    {"window", Kind::window, "window", "the window", Phase::forward, windowed},
    {"sink", Kind::sink, "sink", "the sink", Phase::forward, has_sink},
    {"slope", Kind::factor, "1 − tanh²", "the slope of the softcap", Phase::backward, capped},
    {"l", Kind::factor, "l", "the sum l of the softmax", Phase::forward, always},
    {"sum of l", Kind::online, "l = Σ e^(s − m)", "the sum l over tiles of keys", Phase::forward, always},
    {"sum of o", Kind::online, "o = Σ e^(s − m) v / l", "the sum of o over tiles of keys", Phase::forward, always},
    {"m in lse", Kind::factor, "m", "the maximum in lse", Phase::forward, always},
    {"ln l in lse", Kind::factor, "ln l", "the logarithm in lse", Phase::forward, always},
    {"p", Kind::scores, "p", "p in o", Phase::forward, always},
    {"o", Kind::rows, "o", "o, as it goes into D too,", Phase::forward, always},
    {"dp", Kind::scores, "do vᵀ", "dp", Phase::backward, always},
    {"D", Kind::rows, "rowsum(do∘o)", "D", Phase::backward, always},
    {"dlse", Kind::factor, "dlse", "the gradient of lse", Phase::backward, has_dlse},
    {"p in ds", Kind::factor, "p", "p in ds", Phase::backward, always},
    {"ds", Kind::scores, "ds", "ds", Phase::backward, always},
    {"ds in dq", Kind::scores, "ds k", "ds in dq", Phase::backward, always},
    {"ds in dk", Kind::scores, "dsᵀ q", "ds in dk", Phase::backward, always},
    {"p in dv", Kind::scores, "pᵀ do", "p in dv", Phase::backward, always},
    {"sum of dq", Kind::tiles, "dq = Σ", "the sum of dq over tiles of keys", Phase::backward, always},
    {"sum of dk", Kind::tiles, "dk = Σ", "the sum of dk over tiles of query rows", Phase::backward, always},
    {"sum of dv", Kind::tiles, "dv = Σ", "the sum of dv over tiles of query rows", Phase::backward, always},
    {"sum over heads of dk", Kind::heads, "dk = Σ_h", "the sum of dk over the heads of a group", Phase::backward,
     queries_grouped},
    {"sum over heads of dv", Kind::heads, "dv = Σ_h", "the sum of dv over the heads of a group", Phase::backward,
     queries_grouped},
    {"o, as written", Kind::written, "o", "o as it is written", Phase::results, always},
    {"lse, as written", Kind::written, "lse", "lse as it is written", Phase::results, always},
    {"dq, as written", Kind::written, "dq", "dq as it is written", Phase::results, always},
    {"dk, as written", Kind::written, "dk", "dk as it is written", Phase::results, always},
    {"dv, as written", Kind::written, "dv", "dv as it is written", Phase::results, always},
    {"dbias, as written", Kind::written_number, "dbias", "dbias", Phase::results, has_bias},
    {"dsink, as written", Kind::written_number, "dsink", "dsink", Phase::results, has_sink},
};

bool norm_asked(const Call& c) {
    return !c.is_attention && c.delta_options.use_qk_l2norm_in_kernel;
}

bool norm_not_asked(const Call& c) {
    return !norm_asked(c);
}

// Entries live as long as the program, as those of the catalogue do.
class Points {
  public:
    explicit Points(std::span<const Place> places) {
        for (const Place& place : places) {
            for (const Change change : changes_of(place.kind)) add(place, change);
            if (place.name == std::string("q")) add(place, Change::swapped);
        }
    }
    std::span<const Entry> entries() const { return entries_; }

  private:
    const char* keep(std::string text) { return texts_.emplace_back(std::move(text)).c_str(); }

    void add(const Place& place, Change change) {
        const Changed& how =
            *std::find_if(std::begin(changes), std::end(changes), [&](const Changed& c) { return c.change == change; });
        std::string formula;
        for (const char* at = how.formula; *at != 0; ++at)
            if (*at == 'X')
                formula += place.formula;
            else
                formula += *at;
        const char* name = keep(std::string(place.name) + " " + how.words);
        entries_.push_back({Mistake::at_a_point, name, keep(std::string(place.words) + " " + how.words), keep(formula),
                            "", place.from, place.applies, Point{place.name, change}});
        if (place.kind == Kind::dead && change == Change::unmasked)
            entries_.back().formula = "p = 0 → softmax over all keys";
        if (place.kind == Kind::flag) {
            entries_.back().sentence = "after a tile of keys that none of 64 rows sees, these rows lose the next one";
            entries_.back().formula = "tile j skipped when no row saw tile j − 1";
        }
        if (place.kind != Kind::norm) return;
        entries_.back().applies = change == Change::always ? norm_not_asked : norm_asked;
    }

    std::deque<std::string> texts_;
    std::vector<Entry> entries_;
};

}  // namespace

std::span<const Entry> delta_points() {
    static const Points points(delta_places);
    return points.entries();
}

std::span<const Entry> attention_points() {
    static const Points points(attention_places);
    return points.entries();
}

std::string places_page() {
    return R"(Places are the intermediates of [math.md](math.md) and [stages.md](stages.md), and results as they are written.

Any number may be lost, doubled, halved, negative, scaled, unscaled, multiplied or divided by ln 2, β, the
group's size. Rows: of the row or head before or after, of two rows before, of the first head or sequence, stale, or lost (the first, the last,
the tail, 48 to 63 of 64, the last of 16). Products and states: transposed, without diagonal, mask or a tile of keys,
rounded to bf16. Exponents: left out, twice, base 2, over ln 2, a row off. Sums: one term only, begun anew, not rescaled, over heads in turn.
Operands: β of 1 or σ(β), gates summed twice, q for k, l2norm.
)";
}

}  // namespace softdelta::diagnose
