// The token form: the recurrence itself, in f64, W value columns at a time. For chunks whose gates rise: e^Σg of many
// tokens would overflow where the state that it multiplies is small, or 0. Between chunks states are f32 as always.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/fold.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// 0·e^g is 0 and any other number of f32 times e^700 is beyond f32, while e^g itself ends at e^709.
inline constexpr double highest_gate = 700;

inline double decay_of(const GateChunk& gates, Index at) {
    double g = static_cast<double>(gates.g[at]);
    if (gates.g_rest != nullptr) g += static_cast<double>(gates.g_rest[at]);
    return __builtin_exp(g > highest_gate ? highest_gate : g);
}

// W value columns of a state, [K, W], from a panel and back.
template <class P>
void load_columns(const StatePanels<P>& state, Index c, Index K, double* S) {
    const auto panel = state.panel(c / NR * NR);
    for (Index m = 0; m < K; ++m)
        for (Index j = 0; j < W; ++j) S[m * W + j] = static_cast<double>(panel.state[m * panel.width + c % NR + j]);
}
template <class P>
void store_columns(const double* S, Index c, Index K, const StatePanels<P>& state) {
    const auto panel = state.panel(c / NR * NR);
    for (Index m = 0; m < K; ++m)
        for (Index j = 0; j < W; ++j) panel.state[m * panel.width + c % NR + j] = static_cast<float>(S[m * W + j]);
}

template <class P>
class TokenForm {
  public:
    TokenForm(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& scratch)
        : heads_(heads),
          K_(heads.key_size),
          before_decay_(heads.rule.erase == core::Erase::from_previous_state),
          decay_(scratch.take<double>(sizes.rows * K_)),
          state_(scratch.take<double>(K_ * W)),
          v_(scratch.take<float>(W)) {}

    // Of n tokens.
    void load_gates(Index n, const GateChunk& gates) {
        const bool channel = heads_.has_channel_gate();
        for (Index i = 0; i < n; ++i)
            for (Index m = 0; m < K_; ++m)
                decay_[i * K_ + m] = channel  ? decay_of(gates, i * gates.row + m)
                                     : m == 0 ? decay_of(gates, i)
                                              : decay_[i * K_];
    }

    double* state() const { return state_; }  // [K, W]

    // The state over the tokens, value columns from c on. o, u: [n, V] in rows of `row` floats; null: not wanted.
    void advance(const Tokens& at, Index c, const KeyChunk<P>& keys, const float* beta, float* o, float* u,
                 Index row) const {
        double e[W];
        for (Index i = 0; i < at.n; ++i) {
            decay_and_erase(at, i, c, keys, state_, e);
            double out[W];
            write(i, keys, static_cast<double>(beta[i]), state_, e, state_, o == nullptr ? nullptr : out);
            for (Index j = 0; o != nullptr && j < W; ++j)
                o[i * row + c + j] = static_cast<float>(static_cast<double>(heads_.scale) * out[j]);
            for (Index j = 0; u != nullptr && j < W; ++j)
                u[i * row + c + j] = static_cast<float>(static_cast<double>(beta[i]) * e[j]);
        }
    }

  protected:
    double decay(Index i, Index m) const { return decay_[i * K_ + m]; }
    double decay_before(Index i, Index m) const { return before_decay_ ? 1 : decay(i, m); }  // of the state erased from
    double decay_after(Index i, Index m) const { return before_decay_ ? decay(i, m) : 1; }

    // W elements of row i from column c on, zeros beyond the last.
    const float* load_part(const DeltaRows& t, const Tokens& at, Index i, Index c) const {
        const Index width = heads_.value_size - c < W ? heads_.value_size - c : W;
        if (!t.has(at.begin + i)) {
            store(v_, splat(0.0F));
            return v_;
        }
        load_row(row_from(t, at.head, at.begin + i, c), width, v_);
        return v_;
    }

    // E, the state that token i erases from, which may be where the state is; e = v − Eᵀp, or v.
    void decay_and_erase(const Tokens& at, Index i, Index c, const KeyChunk<P>& keys, double* E, double (&e)[W]) const {
        const float* p = keys.p + i * keys.row;
        const float* v = load_part(heads_.v, at, i, c);
        for (Index j = 0; j < W; ++j) e[j] = static_cast<double>(v[j]);
        for (Index m = 0; m < K_; ++m) {
            const double before = decay_before(i, m);
            const double erased = heads_.erases() ? static_cast<double>(p[m]) : 0;
            for (Index j = 0; j < W; ++j) {
                const double x = before * state_[m * W + j];
                E[m * W + j] = x;
                if (heads_.erases()) e[j] -= erased * x;
            }
        }
    }

    // The state after token i, and what q reads of it unless that is null.
    void write(Index i, const KeyChunk<P>& keys, double beta, const double* E, const double (&e)[W], double* S,
               double* out) const {
        const float *q = keys.q + i * keys.row, *k = keys.k + i * keys.row;
        for (Index j = 0; out != nullptr && j < W; ++j) out[j] = 0;
        for (Index m = 0; m < K_; ++m) {
            const double after = decay_after(i, m), key = static_cast<double>(k[m]);
            for (Index j = 0; j < W; ++j) S[m * W + j] = after * E[m * W + j] + key * (beta * e[j]);
            for (Index j = 0; out != nullptr && j < W; ++j) out[j] += static_cast<double>(q[m]) * S[m * W + j];
        }
    }

    const DeltaHeads& heads_;
    Index K_;
    bool before_decay_;
    double* decay_;  // [n, K]
    double* state_;  // [K, W]
    float* v_;       // [W]
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
