// The token form backwards: the states of a chunk's tokens once more, then their adjoint from the last token to the
// first, in f64.
#pragma once

#include "engines/cpu/kernels/delta_rule/backward/operands.h"
#include "engines/cpu/kernels/delta_rule/forward/tokens.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

template <class P>
class TokenBackward : public TokenForm<P> {
  public:
    TokenBackward(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& scratch)
        : TokenForm<P>(heads, sizes, scratch),
          columns_(sizes.value_columns()),
          wide_(scratch.take<double>(heads.heads() * columns_ * heads.key_size)),
          is_wide_(scratch.take<bool>(heads.heads())),
          erased_states_(scratch.take<double>(sizes.rows * heads.key_size * W)),
          erased_values_(scratch.take<double>(sizes.rows * W)),
          dv_(scratch.take<float>(sizes.rows * columns_)) {
        for (double** x : {&dq_, &dk_, &dp_, &dg_}) *x = scratch.take<double>(sizes.rows * heads.key_size);
        dbeta_ = scratch.take<double>(sizes.rows);
    }

    // Before the first chunk from the end.
    void begin() {
        for (Index h = 0; h < this->heads_.heads(); ++h) is_wide_[h] = false;
    }

    // Whether the gradient of the state of a head is too large for products in f32, as before a gate that rises:
    // earlier tokens may have finite gradients none the less, where nothing was written or a gate wipes the state.
    bool is_wide(Index head) const { return is_wide_[head]; }

    // The state over the tokens of a chunk.
    void pass(const Tokens& at, const KeyChunk<P>& keys, const GateChunk& gates, const StatePanels<P>& state) {
        this->load_gates(at.n, gates);
        for (Index c = 0; c < columns_; c += W) {
            load_columns(state, c, K(), this->state());
            this->advance(at, c, keys, gates.beta, nullptr, nullptr, 0);
            store_columns(this->state(), c, K(), state);
        }
    }

    // state enters the chunk; dstate: of what leaves it, then of what enters.
    void run(const Tokens& at, const KeyChunk<P>& keys, const GateChunk& gates, const StatePanels<P>& state,
             const DeltaRows& d_o, const StateOnly& dstate) {
        this->load_gates(at.n, gates);
        for (double* x : {dq_, dk_, dp_, dg_})
            for (Index i = 0; i < at.n * K(); ++i) x[i] = 0;
        for (Index i = 0; i < at.n; ++i) dbeta_[i] = 0;
        const bool was_wide = is_wide_[at.head];
        for (Index c = 0; c < columns_; c += W) {
            dstate_ = wide_ + (at.head * columns_ + c) * K();
            load_columns(state, c, K(), this->state());
            if (!was_wide) load_columns(dstate, c, K(), dstate_);
            for (Index i = 0; i < at.n; ++i) keep(at, i, c, keys, gates.beta);
            for (Index i = at.n; i-- > 0;) adjoin(at, i, c, keys, gates.beta, d_o);
            store_columns(dstate_, c, K(), dstate);
        }
        is_wide_[at.head] = false;
        const double* all = wide_ + at.head * columns_ * K();
        for (Index i = 0; i < columns_ * K(); ++i)
            if (all[i] > largest_in_products || all[i] < -largest_in_products) is_wide_[at.head] = true;
    }

    // What run() has made, of token i: [K] each; p without what is k's, [V], and a number.
    const double* dq(Index i) const { return dq_ + i * K(); }
    const double* dk(Index i) const { return dk_ + i * K(); }
    const double* dp(Index i) const { return dp_ + i * K(); }
    const double* dg(Index i) const { return dg_ + i * K(); }
    const float* dv(Index i) const { return dv_ + i * columns_; }
    double dbeta(Index i) const { return dbeta_[i]; }

  private:
    static constexpr double largest_in_products = 0x1p100;  // sums of their products with keys and values fit f32
    Index K() const { return this->K_; }
    double* erased_state(Index i) const { return erased_states_ + i * K() * W; }
    double* erased_value(Index i) const { return erased_values_ + i * W; }

    void keep(const Tokens& at, Index i, Index c, const KeyChunk<P>& keys, const float* beta) const {
        double e[W];
        this->decay_and_erase(at, i, c, keys, erased_state(i), e);
        this->write(i, keys, static_cast<double>(beta[i]), erased_state(i), e, this->state(), nullptr);
        for (Index j = 0; j < W; ++j) erased_value(i)[j] = e[j];
    }

    void adjoin(const Tokens& at, Index i, Index c, const KeyChunk<P>& keys, const float* betas,
                const DeltaRows& rows) const {
        const bool erases = this->heads_.erases();
        const double beta = static_cast<double>(betas[i]);
        const double *E = erased_state(i), *e = erased_value(i);
        double d_o[W], written[W], dwritten[W], de[W];
        for (Index j = 0; j < W; ++j) d_o[j] = dwritten[j] = 0;
        if (rows.data != nullptr) {
            const float* given = this->load_part(rows, at, i, c);
            for (Index j = 0; j < W; ++j)
                d_o[j] = static_cast<double>(this->heads_.scale) * static_cast<double>(given[j]);
        }
        for (Index j = 0; j < W; ++j) written[j] = beta * e[j];

        // o = scale Sᵀq, S = decay∘E or E, + k writtenᵀ
        for (Index m = 0; m < K(); ++m) {
            const auto q = static_cast<double>(keys.q[i * keys.row + m]),
                       k = static_cast<double>(keys.k[i * keys.row + m]);
            const double after = this->decay_after(i, m);
            double dq = 0, dk = 0;
            for (Index j = 0; j < W; ++j) {
                const double dS = dstate_[m * W + j] + q * d_o[j];
                dstate_[m * W + j] = dS;
                dwritten[j] += k * dS;
                dk += dS * written[j];
                dq += (after * E[m * W + j] + k * written[j]) * d_o[j];
            }
            dq_[i * K() + m] += dq;
            dk_[i * K() + m] += dk;
        }

        // written = β e, e = v − Eᵀp or v
        for (Index j = 0; j < W; ++j) {
            de[j] = beta * dwritten[j];
            dv_[i * columns_ + c + j] = static_cast<float>(de[j]);
            dbeta_[i] += dwritten[j] * e[j];
        }

        // E = decay∘S of the token before, or that itself
        for (Index m = 0; m < K(); ++m) {
            const double p = erases ? static_cast<double>(keys.p[i * keys.row + m]) : 0;
            const double before = this->decay_before(i, m), after = this->decay_after(i, m);
            double dp = 0, dg = 0;
            for (Index j = 0; j < W; ++j) {
                const double decayed = after * dstate_[m * W + j];
                const double dE = erases ? decayed - p * de[j] : decayed;
                dp -= E[m * W + j] * de[j];
                dg += E[m * W + j] * (this->before_decay_ ? decayed : dE);
                dstate_[m * W + j] = before * dE;
            }
            if (erases) dp_[i * K() + m] += dp;
            dg_[i * K() + m] += dg;
        }
    }

    Index columns_;
    double* wide_;  // [heads, V / W, K, W] gradients of states
    bool* is_wide_;
    double* dstate_ = nullptr;  // [K, W] of them
    double* erased_states_;     // [n, K, W]
    double* erased_values_;     // [n, W]
    float* dv_;                 // [n, V]
    double *dq_ = nullptr, *dk_ = nullptr, *dp_ = nullptr, *dg_ = nullptr, *dbeta_ = nullptr;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
