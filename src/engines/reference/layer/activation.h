// Activations in f64, and their derivatives.
#pragma once

#include <cmath>

#include "core/layer/activation.h"

namespace softdelta::reference {

// 1 / (1 + e^−x), by an exponential that does not overflow.
inline double sigmoid(double x) {
    const double e = std::exp(-std::abs(x));
    return (x < 0 ? e : 1) / (1 + e);
}

inline double activate(core::Activation activation, double x) {
    switch (activation) {
        case core::Activation::silu:
            return x * sigmoid(x);
        case core::Activation::sigmoid:
            return sigmoid(x);
        default:
            return x;
    }
}

// With σ = σ(x): (xσ)' = σ (1 + x (1 − σ)) and σ' = σ (1 − σ), where 1 − σ = σ(−x).
inline double derivative(core::Activation activation, double x) {
    switch (activation) {
        case core::Activation::silu:
            return sigmoid(x) * (1 + x * sigmoid(-x));
        case core::Activation::sigmoid:
            return sigmoid(x) * sigmoid(-x);
        default:
            return 1;
    }
}

}  // namespace softdelta::reference
