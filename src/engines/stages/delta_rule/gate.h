// Gates and β from what the caller gave, and their slopes.
#pragma once

#include <cmath>

#include "core/delta_rule.h"

namespace softdelta::stages::delta {

using core::Index;

// σ and softplus without overflow, and with all digits where they vanish.
inline double sigmoid(double x) {
    return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}
inline double softplus(double x) {
    return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

// The gate of one value head: given, raw, constant or none.
class GateMaker {
  public:
    GateMaker(const core::DeltaInputs& in, const core::DeltaOptions& options, Index hv)
        : in_(in), options_(options), parameters_(core::gate_parameters(in)), hv_(hv) {
        const core::Tensor& A_log = parameters_.A_log;
        if (A_log) rate_ = std::exp(core::load(A_log, hv * A_log.stride[0]));
        if (in.g_gamma) constant_ = core::load(in.g_gamma, hv * in.g_gamma.stride[0]);
    }

    // Row i of the sequence, channel m.
    double make(const core::DeltaSequence& s, Index i, Index m) const {
        if (!has(s, i)) return 0;
        if (!in_.g) return constant_;
        switch (options_.raw_gate) {
            case core::RawGate::none:
                return load_given(s, i, m);
            case core::RawGate::softplus:
                return -rate_ * softplus(load_raw(s, i, m));
            case core::RawGate::lower_bound:
                return options_.lower_bound * sigmoid(rate_ * load_raw(s, i, m));
        }
        return 0;
    }

    // d(gate)/d(what the caller gave).
    double slope(const core::DeltaSequence& s, Index i, Index m) const {
        if (!has(s, i)) return 0;
        if (options_.raw_gate == core::RawGate::none) return 1;
        const double x = load_raw(s, i, m);
        if (options_.raw_gate == core::RawGate::softplus) return -rate_ * sigmoid(x);
        return options_.lower_bound * sigmoid(rate_ * x) * sigmoid(-rate_ * x) * rate_;
    }

    // d(gate)/dA_log.
    double slope_of_A_log(const core::DeltaSequence& s, Index i, Index m) const {
        if (!has(s, i)) return 0;
        if (options_.raw_gate == core::RawGate::softplus) return make(s, i, m);
        const double slope_of_raw = slope(s, i, m);
        return slope_of_raw == 0 ? 0 : slope_of_raw * load_raw(s, i, m);  // a gate of ±∞ is at its bound
    }

    // Whether the row has a gate, as the first of a token.
    bool has(const core::DeltaSequence& s, Index i) const { return token(s, i) >= 0; }

  private:
    Index token(const core::DeltaSequence& s, Index i) const { return core::token_begun(s.begin + i, options_.steps); }
    double load_given(const core::DeltaSequence& s, Index i, Index m) const {
        const core::Tensor& g = in_.g;
        const Index t = token(s, i);
        return core::load(g, g.rank == 4 ? g.offset({s.batch, t, hv_, m}) : g.offset({s.batch, t, hv_}));
    }
    double load_raw(const core::DeltaSequence& s, Index i, Index m) const {
        const core::Tensor& bias = parameters_.bias;
        const Index channels = in_.g.rank == 4 ? in_.g.shape[3] : 1;
        return load_given(s, i, m) + (bias ? core::load(bias, (hv_ * channels + m) * bias.stride[0]) : 0);
    }

    const core::DeltaInputs& in_;
    const core::DeltaOptions& options_;
    core::GateParameters parameters_;
    Index hv_;
    double rate_ = 1;      // e^A_log
    double constant_ = 0;  // g_gamma
};

inline double load_given_beta(const core::DeltaInputs& in, const core::DeltaSequence& s, Index hv, Index i) {
    return core::load(in.beta, in.beta.offset({s.batch, s.begin + i, hv}));
}

inline double load_beta(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaSequence& s,
                        Index hv, Index i) {
    const double x = load_given_beta(in, s, hv, i);
    if (options.raw_beta == core::RawBeta::none) return x;
    return (options.raw_beta == core::RawBeta::logits ? 1 : 2) * sigmoid(x);
}

// dβ/d(what the caller gave): cσ(x)σ(−x); 1 − σ(x) would have no digits left where σ is nearly 1.
inline double slope_of_beta(const core::DeltaInputs& in, const core::DeltaOptions& options,
                            const core::DeltaSequence& s, Index hv, Index i) {
    if (options.raw_beta == core::RawBeta::none) return 1;
    return load_beta(in, options, s, hv, i) * sigmoid(-load_given_beta(in, s, hv, i));
}

}  // namespace softdelta::stages::delta
