// What AVX512_BF16 has and portable code goes without.
#pragma once

#include "engines/cpu/kernels/simd/storage.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

#define SOFTDELTA_LEVEL_HAS_BF16_PRODUCTS
inline constexpr bool has_bf16_products = true;

// Two vectors as W words of neighbours.
SOFTDELTA_INLINE void store_bf16(std::uint32_t* p, F x, F y) {
    auto* halves = reinterpret_cast<core::bf16*>(p);
    store(halves, x);
    store(halves + W, y);
}

// c + a₀·b₀ + a₁·b₁ in each lane, a and b words of two bf16.
SOFTDELTA_INLINE F multiply_add_pairs(F a, F b, F c) {
    const auto first = [](F x) { return as_floats(as_words(x) << 16); };
    const auto second = [](F x) { return as_floats(as_words(x) & U(0xffff0000U)); };
    return fma(first(a), first(b), fma(second(a), second(b), c));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
