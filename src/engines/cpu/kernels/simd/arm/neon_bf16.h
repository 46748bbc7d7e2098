// Level neon_bf16: armv8.2-a with BF16. Pairs of bf16 are made and multiplied by instructions.
#pragma once

#include "engines/cpu/kernels/simd/arm/neon.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

#define SOFTDELTA_LEVEL_HAS_BF16_PRODUCTS
#define SOFTDELTA_LEVEL_HAS_BF16_PAIRS
inline constexpr bool has_bf16_products = true;

// Two vectors as words {first, second}, rounded to nearest even.
SOFTDELTA_INLINE U bf16_pairs(F first, F second) {
    const uint16x8_t low = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(first));
    const uint16x8_t high = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(second));
    return vreinterpretq_u32_u16(vzip1q_u16(low, high));
}

// W floats as W/2 words of neighbours, rounded to nearest even.
SOFTDELTA_INLINE void store_bf16(std::uint32_t* p, F x) {
    vst1_u32(p, vreinterpret_u32_bf16(vcvt_bf16_f32(x)));
}

// Two vectors as W words of neighbours.
SOFTDELTA_INLINE void store_bf16(std::uint32_t* p, F x, F y) {
    vst1q_u32(p, vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x), y)));
}

// c + a₀·b₀ + a₁·b₁ in each lane, a and b words of two bf16.
SOFTDELTA_INLINE F multiply_add_pairs(F a, F b, F c) {
    return vbfdotq_f32(c, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
}
template <int lane = 0>
SOFTDELTA_INLINE F multiply_add_pairs_by_factor(F factors, F b, F c) {
    return vbfdotq_laneq_f32(c, vreinterpretq_bf16_f32(b), vreinterpretq_bf16_f32(factors), lane);
}

#define SOFTDELTA_LEVEL_HAS_BLOCKS
struct Blocks {
    static constexpr bool exist = true;
    struct Two {
        U low, high;
    };

    // c + a·bᵀ, 2 × 2 sums row by row, a and b two rows of two words each.
    SOFTDELTA_INLINE static F multiply_add(U a, U b, F c) {
        return vbfmmlaq_f32(c, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
    }
    // {x0, x1, y0, y1} and {x2, x3, y2, y3}
    SOFTDELTA_INLINE static Two join(U x, U y) {
        const uint64x2_t a = vreinterpretq_u64_u32(x), b = vreinterpretq_u64_u32(y);
        return {vreinterpretq_u32_u64(vzip1q_u64(a, b)), vreinterpretq_u32_u64(vzip2q_u64(a, b))};
    }
    // {x0, y0, x1, y1} and {x2, y2, x3, y3}
    SOFTDELTA_INLINE static Two interleave(U x, U y) { return {vzip1q_u32(x, y), vzip2q_u32(x, y)}; }
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
