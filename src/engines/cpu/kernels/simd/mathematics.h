// Exponentials of vectors, written once for all levels.
#pragma once

#include "engines/cpu/kernels/simd/level.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

#if !defined(SOFTDELTA_LEVEL_HAS_DIVISION)
SOFTDELTA_INLINE F divide(F a, F b) {
    return a / b;
}
#endif

inline constexpr float log2_e = 1.44269504F;

// 2^(f + n), |f| ≤ 1/2, n whole, −200 ≤ n ≤ 200. Degree 6, relative error 9e-9.
SOFTDELTA_INLINE F exp2_of_parts(F f, F n) {
    F p = fma(F(0x1.44138ap-13F), f, F(0x1.5f0890p-10F));
    p = fma(p, f, F(0x1.3b2a54p-7F));
    p = fma(p, f, F(0x1.c6af6cp-5F));
    p = fma(p, f, F(0x1.ebfbe0p-3F));
    p = fma(p, f, F(0x1.62e430p-1F));
    p = fma(p, f, F(1.0F));
    return scale_by_power_of_two(p, n);
}

// 2^x within 1 ulp, 1.5 where fma rounds twice; 0 for x below −150 and for −∞, ∞ from 128 on, NaN
// stays NaN.
#if !defined(SOFTDELTA_LEVEL_HAS_EXP2)
inline constexpr bool exp2_has_subnormals = true;
SOFTDELTA_INLINE F exp2(F x) {
    const F bounded = at_most(200.0F, at_least(-200.0F, x));
    const F n = round_to_nearest(bounded);
    return exp2_of_parts(bounded - n, n);
}
#endif

// The same, less exact where that is faster, for what is rounded to bf16 and its sums.
#if !defined(SOFTDELTA_LEVEL_HAS_EXP2_FOR_BF16)
SOFTDELTA_INLINE F exp2_for_bf16(F x) {
    return exp2(x);
}
#endif

// 1 / x for what is rounded to bf16.
#if !defined(SOFTDELTA_LEVEL_HAS_RECIPROCAL_FOR_BF16)
SOFTDELTA_INLINE F reciprocal_for_bf16(F x) {
    return divide(F(1.0F), x);
}
#endif

SOFTDELTA_INLINE F exp(F x) {
    return exp2(x * F(log2_e));
}

// e^(x + rest) within 2 ulp, however large |x|; |rest| is small compared with |x|. ∞ from x = 89
// on. n·log 2 is subtracted in two parts, n·0.693359375, which is exact, and n·(log 2 − 0.693359375).
SOFTDELTA_INLINE F exp_of_sum(F x, F rest) {
    const F bounded = at_most(138.0F, at_least(-138.0F, x));
    const F n = round_to_nearest(bounded * F(log2_e));
    const F f = fma(n, F(2.12194440e-4F), fma(n, F(-0.693359375F), bounded)) + rest;
    return exp2_of_parts(f * F(log2_e), n);
}

// e^(x + rest) and e^−(x + rest) within 3 ulp, as above: even and odd powers of one polynomial.
struct Exponentials {
    F of_sum, of_negative;
};
SOFTDELTA_INLINE Exponentials exponentials_of_sum(F x, F rest) {
    const F bounded = at_most(138.0F, at_least(-138.0F, x));
    const F n = round_to_nearest(bounded * F(log2_e));
    const F f = (fma(n, F(2.12194440e-4F), fma(n, F(-0.693359375F), bounded)) + rest) * F(log2_e);
    const F y = f * f;
    F even = fma(F(0x1.44138ap-13F), y, F(0x1.3b2a54p-7F));
    even = fma(even, y, F(0x1.ebfbe0p-3F));
    even = fma(even, y, F(1.0F));
    F odd = fma(F(0x1.5f0890p-10F), y, F(0x1.c6af6cp-5F));
    odd = fma(odd, y, F(0x1.62e430p-1F)) * f;
    return {scale_by_power_of_two(even + odd, n), scale_by_power_of_two(even - odd, F(0.0F) - n)};
}

// Within 2 ulp: an odd polynomial near 0, where 1 − e^(−2|x|) would cancel.
SOFTDELTA_INLINE F tanh(F x) {
    const F size = abs(x);
    const F e = exp(F(-2.0F) * size);
    const F far = divide(F(1.0F) - e, F(1.0F) + e);
    const F y = x * x;
    F p = fma(F(-6.09668652e-03F), y, F(2.09971600e-02F));
    p = fma(p, y, F(-5.38509056e-02F));
    p = fma(p, y, F(1.33327697e-01F));
    p = fma(p, y, F(-3.33333289e-01F));
    const F near = fma(p * y, size, size);
    return vectors::copysign(select(size < F(0.625F), near, far), x);
}

// 1 / (1 + e^−x)
SOFTDELTA_INLINE F sigmoid(F x) {
    const F e = exp(splat(0.0F) - abs(x));
    return divide(select(x < splat(0.0F), e, splat(1.0F)), splat(1.0F) + e);
}

// max(x, 0) + log(1 + e^−|x|); log(1 + u) = 2 atanh(u / (2 + u)), a series whose square is at most 1/9.
SOFTDELTA_INLINE F softplus(F x) {
    const F u = exp(splat(0.0F) - abs(x));
    const F s = divide(u, splat(2.0F) + u);
    const F y = s * s;
    F series = splat(2.0F / 15);
    for (const float coefficient : {2.0F / 13, 2.0F / 11, 2.0F / 9, 2.0F / 7, 2.0F / 5, 2.0F / 3, 2.0F})
        series = fma(series, y, splat(coefficient));
    return fma(s, series, select(x < splat(0.0F), splat(0.0F), x));
}

// In f64.
SOFTDELTA_INLINE D exp(D x) {
    return vectors::exp(x);
}
SOFTDELTA_INLINE D log1p(D x) {
    return vectors::log1p(x);
}

// e^−|x|; beyond 750, and for NaN, it is 0: the exponent of two would leave its integer type.
SOFTDELTA_INLINE D exp_of_size(D x) {
    const D size = abs(x);
    return exp(D(0.0) - select(size <= D(750.0), size, D(750.0)));
}

SOFTDELTA_INLINE D sigmoid(D x) {
    const D e = exp_of_size(x);
    const D y = select(x < D(0.0), e, D(1.0)) / (D(1.0) + e);
    return select(x == x, y, x);  // NaN stays NaN
}

SOFTDELTA_INLINE D softplus(D x) {
    return select(x < D(0.0), D(0.0), x) + log1p(exp_of_size(x));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
