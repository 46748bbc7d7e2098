// Levels avx512 and above: AVX-512 F, BW, DQ and VL, vectors of 512 bits.
#pragma once

#include "core/dtype.h"
#include "engines/cpu/kernels/simd/x86/x86.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr int vector_registers = 32;
inline constexpr bool fma_rounds_once = true;

SOFTDELTA_INLINE U as_words(F x) {
    return _mm512_castps_si512(x);
}
SOFTDELTA_INLINE F as_floats(U x) {
    return _mm512_castsi512_ps(x);
}

// a·b + c, rounded once.
SOFTDELTA_INLINE F fma(F a, F b, F c) {
    return _mm512_fmadd_ps(a, b, c);  // xsimd 8.1 multiplies and adds
}

// x, or the bound when that is more; NaN stays NaN.
SOFTDELTA_INLINE F at_least(float bound, F x) {
    return _mm512_max_ps(_mm512_set1_ps(bound), x);  // the second operand when one is NaN
}

// x, or the bound when that is less; NaN stays NaN.
SOFTDELTA_INLINE F at_most(float bound, F x) {
    return _mm512_min_ps(_mm512_set1_ps(bound), x);
}

SOFTDELTA_INLINE F round_to_nearest(F x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// p·2^n, n whole.
SOFTDELTA_INLINE F scale_by_power_of_two(F p, F n) {
    return _mm512_scalef_ps(p, n);
}

// The exp2 of mathematics.h by instructions that look up and scale: x = n + k/16 + r with 0 ≤ r ≤ 1/16 gives
// 2^n, a table of 2^(k/16), and a cubic with relative error 3e-9.
#define SOFTDELTA_LEVEL_HAS_EXP2
inline constexpr bool exp2_has_subnormals = true;
alignas(64) inline constexpr float powers_of_sixteenths[16] = {
    0x1.000000p0F, 0x1.0b5586p0F, 0x1.172b84p0F, 0x1.2387a6p0F, 0x1.306fe0p0F, 0x1.3dea64p0F,
    0x1.4bfdaep0F, 0x1.5ab07ep0F, 0x1.6a09e6p0F, 0x1.7a1148p0F, 0x1.8ace54p0F, 0x1.9c4918p0F,
    0x1.ae89fap0F, 0x1.c199bep0F, 0x1.d5818ep0F, 0x1.ea4afap0F};

SOFTDELTA_INLINE F exp2(F x) {
    // 1.5·2^19 leaves sixteenths, rounded down, in the last bits.
    const F shifted = _mm512_add_round_ps(x, F(0x1.8p19F), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const F power = _mm512_permutexvar_ps(_mm512_castps_si512(shifted), load(powers_of_sixteenths));
    const F r = _mm512_reduce_ps(x, 4 << 4 | _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 of ±∞
    F p = fma(F(0x1.d043cap-5F), r, F(0x1.ebe594p-3F));
    p = fma(p, r, F(0x1.62e43ep-1F));
    p = fma(power, p * r, power);
    return _mm512_scalef_ps(p, x);  // by 2^n, n = x rounded down
}

// 2^x with relative error 5e-7: r is at most 1/32, its square is enough. Additions where exp2 has reductions: beside
// matrix tiles Intel's second unit for multiplications rests, and additions have two units.
#define SOFTDELTA_LEVEL_HAS_EXP2_FOR_BF16
SOFTDELTA_INLINE F exp2_for_bf16(F x) {
    const F shifted = x + F(0x1.8p19F);
    const F power = _mm512_permutexvar_ps(_mm512_castps_si512(shifted), load(powers_of_sixteenths));
    const F n = shifted - F(0x1.8p19F);
    const F r = x - n;  // NaN of ±∞, which scalef passes over
    const F p = fma(F(0x1.ebfbe0p-3F), r, F(0x1.62e98ap-1F));
    return _mm512_scalef_ps(fma(power * r, p, power), n);
}

#define SOFTDELTA_LEVEL_HAS_RECIPROCAL_FOR_BF16
SOFTDELTA_INLINE F reciprocal_for_bf16(F x) {  // relative error 2^-14
    return _mm512_rcp14_ps(x);
}

SOFTDELTA_INLINE U load_u16(const std::uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
SOFTDELTA_INLINE void store_u16(std::uint16_t* p, U x) {  // the lower halves of words
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
SOFTDELTA_INLINE U load_u8(const std::uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
SOFTDELTA_INLINE I load_i8(const std::int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// p[0] … p[3] in every four lanes.
SOFTDELTA_INLINE F splat_four(const float* p) {
    return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
}
// The lowest four bits of each word, less 8: one look-up.
SOFTDELTA_INLINE F halves_to_floats(U words) {
    alignas(64) static constexpr float values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return _mm512_permutexvar_ps(words, load(values));
}
SOFTDELTA_INLINE F load(const core::f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Lane i is f(i), or the f16 of bits(i): of what lies apart in memory.
template <class Value>
SOFTDELTA_INLINE F lanes_of(const Value& f) {
    return _mm512_setr_ps(f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14),
                          f(15));
}
template <class Bits>
SOFTDELTA_INLINE F lanes_of_f16(const Bits& bits) {
    const auto b = [&](Index i) { return static_cast<std::int16_t>(bits(i)); };
    return _mm512_cvtph_ps(_mm256_setr_epi16(b(0), b(1), b(2), b(3), b(4), b(5), b(6), b(7), b(8), b(9), b(10), b(11),
                                             b(12), b(13), b(14), b(15)));
}
SOFTDELTA_INLINE void store(core::f16* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
SOFTDELTA_INLINE D load_double(const float* p) {
    return _mm512_cvtps_pd(_mm256_loadu_ps(p));
}

// The first n ≤ W words, zeros after them; nothing beyond them is read.
SOFTDELTA_INLINE U load_partial(const std::uint32_t* p, Index n) {
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << n) - 1), p);
}

SOFTDELTA_INLINE Mask nonzero_bytes(const std::uint8_t* p) {
    const __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return Mask(_mm512_test_epi32_mask(words, words));
}

// W × W words: row r in rows[r] becomes column r.
SOFTDELTA_INLINE void transpose(U (&rows)[W]) {
    __m512i a[16];
    __m512i b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    }
}

SOFTDELTA_INLINE float sum(F x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    return _mm_cvtss_f32(sum_of_four(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1))));
}
SOFTDELTA_INLINE float maximum(F x) {
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    return _mm_cvtss_f32(maximum_of_four(_mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1))));
}

// Lane i of the result is op over the lanes of rows[i]; overwrites rows. Every step joins halves of two vectors.
template <class Op>
SOFTDELTA_INLINE F reduce_rows(F (&rows)[W], Op op) {
    for (Index i = 0; i < 8; ++i)
        rows[i] = op(F(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1])),
                     F(_mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1])));
    const auto pairs = [](F x) { return _mm512_castps_pd(x); };
    for (Index i = 0; i < 4; ++i)
        rows[i] = op(F(_mm512_castpd_ps(_mm512_unpacklo_pd(pairs(rows[2 * i]), pairs(rows[2 * i + 1])))),
                     F(_mm512_castpd_ps(_mm512_unpackhi_pd(pairs(rows[2 * i]), pairs(rows[2 * i + 1])))));
    const auto quarters = [&](F x, F y) {
        return op(F(_mm512_shuffle_f32x4(x, y, 0x88)), F(_mm512_shuffle_f32x4(x, y, 0xdd)));
    };
    return quarters(quarters(rows[0], rows[1]), quarters(rows[2], rows[3]));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
