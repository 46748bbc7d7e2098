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

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
