// Activations and their derivatives.
#pragma once

#include "core/layer/activation.h"
#include "engines/cuda/sigmoid.h"

namespace softdelta::cuda {

__device__ inline float activate(core::Activation activation, float x) {
    if (activation == core::Activation::silu) return x * sigmoid(x);
    return activation == core::Activation::sigmoid ? sigmoid(x) : x;
}

// With σ = σ(x): (xσ)' = σ (1 + x (1 − σ)) and σ' = σ (1 − σ), where 1 − σ = σ(−x).
__device__ inline float derivative(core::Activation activation, float x) {
    if (activation == core::Activation::silu) return sigmoid(x) * (1 + x * sigmoid(-x));
    return activation == core::Activation::sigmoid ? sigmoid(x) * sigmoid(-x) : 1;
}

}  // namespace softdelta::cuda
