// Factors of all lanes, of an operand that lies in memory. Where an instruction multiplies by a lane of a vector
// (multiplies_by_lane), a vector of W factors serves W products, and a single one stands in the first lane.
#pragma once

#include "engines/cpu/kernels/simd/level.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

#if !defined(SOFTDELTA_LEVEL_HAS_FACTORS)
inline constexpr bool multiplies_by_lane = false;

SOFTDELTA_INLINE F load_factor(const float* p) {
    return splat(*p);
}

// factor·b + c
template <int lane = 0>
SOFTDELTA_INLINE F multiply_add_factor(F factor, F b, F c) {
    return fma(factor, b, c);
}

// Vectors from p + offset on.
template <int offset, int vectors>
SOFTDELTA_INLINE void load_neighbours(const float* p, F (&x)[vectors]) {
    for (int n = 0; n < vectors; ++n) x[n] = load(p + offset + n * W);
}

// A template: only levels with has_bf16_products have what it calls.
template <int lane = 0, class Vector>
SOFTDELTA_INLINE Vector multiply_add_pairs_by_factor(Vector factor, Vector b, Vector c) {
    return multiply_add_pairs(factor, b, c);
}
#endif

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
