// Activations in f64, and their derivatives.
#pragma once

#include "core/layer/activation.h"
#include "engines/reference/sigmoid.h"

namespace softdelta::reference {

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
