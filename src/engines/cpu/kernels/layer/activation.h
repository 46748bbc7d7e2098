// Activations of vectors and their derivatives.
#pragma once

#include "core/layer/activation.h"
#include "engines/cpu/kernels/simd/simd.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

using core::Activation;

template <Activation activation>
SOFTDELTA_INLINE F activate(F x) {
    if constexpr (activation == Activation::silu) return x * sigmoid(x);
    if constexpr (activation == Activation::sigmoid) return sigmoid(x);
    return x;
}

// With σ = σ(x): (xσ)' = σ (1 + x (1 − σ)) and σ' = σ (1 − σ).
template <Activation activation>
SOFTDELTA_INLINE F derivative(F x) {
    const F one = splat(1.0F);
    if constexpr (activation == Activation::none) return one;
    const F s = sigmoid(x), rest = sigmoid(splat(0.0F) - x);
    if constexpr (activation == Activation::silu) return s * fma(x, rest, one);
    return s * rest;
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
