// Activations and their derivatives.
#pragma once

#include "core/layer/activation.h"

namespace softdelta::cuda {

// σ(x) and σ(−x) = 1 − σ(x), to within a few ulps.
struct Sigmoid {
    float of_x, of_minus_x;

    __device__ explicit Sigmoid(float x) {
        const float e = __expf(-fabsf(x)), larger = __fdividef(1, 1 + e);  // no exponential of a positive number
        of_x = x >= 0 ? larger : e * larger;
        of_minus_x = x >= 0 ? e * larger : larger;
    }
};

// f(x), and its derivative: with σ = σ(x), (xσ)' = σ (1 + x (1 − σ)) and σ' = σ (1 − σ).
struct Activated {
    float value, slope;

    __device__ Activated(core::Activation activation, float x) : value(x), slope(1) {
        if (activation == core::Activation::none) return;
        const Sigmoid sigmoid(x);
        const bool silu = activation == core::Activation::silu;
        value = silu ? x * sigmoid.of_x : sigmoid.of_x;
        slope = sigmoid.of_x * (silu ? 1 + x * sigmoid.of_minus_x : sigmoid.of_minus_x);
    }
};

__device__ inline float activate(core::Activation activation, float x) {
    return Activated(activation, x).value;
}

}  // namespace softdelta::cuda
