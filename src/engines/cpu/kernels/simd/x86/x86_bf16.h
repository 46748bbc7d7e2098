// Level avx512bf16: AVX512_BF16. Pairs of bf16 are made and multiplied by instructions.
#pragma once

#include <bit>

#include "engines/cpu/kernels/simd/x86/x86_512.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

#define SOFTDELTA_LEVEL_HAS_BF16_PRODUCTS
#define SOFTDELTA_LEVEL_HAS_BF16_PAIRS
inline constexpr bool has_bf16_products = true;

// Two vectors as words {first, second}, rounded to nearest even.
SOFTDELTA_INLINE U bf16_pairs(F first, F second) {
    alignas(64) static constexpr std::uint16_t alternate[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(alternate),
                                    std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
}

// W floats as W/2 words of neighbours, rounded to nearest even.
SOFTDELTA_INLINE void store_bf16(std::uint32_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), std::bit_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

// Two vectors as W words of neighbours.
SOFTDELTA_INLINE void store_bf16(std::uint32_t* p, F x, F y) {
    _mm512_storeu_si512(p, std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)));
}

// c + a₀·b₀ + a₁·b₁ in each lane, a and b words of two bf16.
SOFTDELTA_INLINE F multiply_add_pairs(F a, F b, F c) {
    return _mm512_dpbf16_ps(c, std::bit_cast<__m512bh>(static_cast<__m512>(a)),
                            std::bit_cast<__m512bh>(static_cast<__m512>(b)));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
