// What a level does where it has no instruction of its own: the same results from instructions that every level has.
#pragma once

#include "core/dtype.h"
#include "engines/cpu/kernels/simd/vector.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// a·b + c, rounded once where fma_rounds_once.
SOFTDELTA_INLINE F fma(F a, F b, F c) {
    return vectors::fma(a, b, c);
}

// x, or the bound when that is more; NaN stays NaN.
SOFTDELTA_INLINE F at_least(float bound, F x) {
    return select(x < F(bound), F(bound), x);
}

// x, or the bound when that is less; NaN stays NaN.
SOFTDELTA_INLINE F at_most(float bound, F x) {
    return select(x > F(bound), F(bound), x);
}

SOFTDELTA_INLINE F round_to_nearest(F x) {
    return vectors::nearbyint(x);
}

// p·2^n, n whole, −200 ≤ n ≤ 200. By two factors: ±200 are beyond the exponents of f32.
SOFTDELTA_INLINE F scale_by_power_of_two(F p, F n) {
    const I whole = vectors::to_int(n);
    const I half = whole >> 1;
    const auto power = [](I e) { return bits_as<F>(bits_as<U>((e + I(127)) << 23)); };
    return p * power(half) * power(whole - half);
}

// The lowest four bits of each word, less 8.
SOFTDELTA_INLINE F halves_to_floats(U words) {
    return to_floats(bits_as<I>(words & U(15U)) - I(8));
}

SOFTDELTA_INLINE void store_u16(std::uint16_t* p, U x) {  // the lower halves of words
    alignas(64) std::uint32_t words[W];
    store(words, x);
    for (Index i = 0; i < W; ++i) p[i] = static_cast<std::uint16_t>(words[i]);
}

// The first n ≤ W words, zeros after them; nothing beyond them is read.
SOFTDELTA_INLINE U load_partial(const std::uint32_t* p, Index n) {
    alignas(64) std::uint32_t part[W] = {};
    for (Index i = 0; i < n; ++i) part[i] = p[i];
    return load(part);
}

SOFTDELTA_INLINE Mask nonzero_bytes(const std::uint8_t* p) {
    alignas(64) float flags[W];
    for (Index i = 0; i < W; ++i) flags[i] = p[i] != 0 ? 1.0F : 0.0F;
    return load(flags) != splat(0.0F);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
