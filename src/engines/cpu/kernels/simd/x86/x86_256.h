// Level avx2: AVX2, FMA and F16C, vectors of 256 bits.
#pragma once

#include "engines/cpu/kernels/simd/portable.h"
#include "engines/cpu/kernels/simd/x86/x86.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr int vector_registers = 16;
inline constexpr bool fma_rounds_once = true;

SOFTDELTA_INLINE U as_words(F x) {
    return _mm256_castps_si256(x);
}
SOFTDELTA_INLINE F as_floats(U x) {
    return _mm256_castsi256_ps(x);
}

SOFTDELTA_INLINE U load_u16(const std::uint16_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
SOFTDELTA_INLINE U load_u8(const std::uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
SOFTDELTA_INLINE I load_i8(const std::int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
// p[0] … p[3] in every four lanes.
SOFTDELTA_INLINE F splat_four(const float* p) {
    return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
}
SOFTDELTA_INLINE F load(const core::f16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Lane i is f(i), or the f16 of bits(i): of what lies apart in memory.
template <class Value>
SOFTDELTA_INLINE F lanes_of(const Value& f) {
    return _mm256_setr_ps(f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7));
}
template <class Bits>
SOFTDELTA_INLINE F lanes_of_f16(const Bits& bits) {
    const auto b = [&](Index i) { return static_cast<std::int16_t>(bits(i)); };
    return _mm256_cvtph_ps(_mm_setr_epi16(b(0), b(1), b(2), b(3), b(4), b(5), b(6), b(7)));
}
SOFTDELTA_INLINE void store(core::f16* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
SOFTDELTA_INLINE D load_double(const float* p) {
    return _mm256_cvtps_pd(_mm_loadu_ps(p));
}

// W × W words: row r in rows[r] becomes column r.
SOFTDELTA_INLINE void transpose(U (&rows)[W]) {
    __m256i a[8];
    __m256i b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        rows[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}

SOFTDELTA_INLINE float sum(F x) {
    return _mm_cvtss_f32(sum_of_four(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1))));
}
SOFTDELTA_INLINE float maximum(F x) {
    return _mm_cvtss_f32(maximum_of_four(_mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1))));
}

// Lane i of the result is op over the lanes of rows[i]; overwrites rows. Every step joins halves of two vectors.
template <class Op>
SOFTDELTA_INLINE F reduce_rows(F (&rows)[W], Op op) {
    for (Index i = 0; i < 4; ++i)
        rows[i] = op(F(_mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1])),
                     F(_mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1])));
    const auto pairs = [](F x) { return _mm256_castps_pd(x); };
    for (Index i = 0; i < 2; ++i)
        rows[i] = op(F(_mm256_castpd_ps(_mm256_unpacklo_pd(pairs(rows[2 * i]), pairs(rows[2 * i + 1])))),
                     F(_mm256_castpd_ps(_mm256_unpackhi_pd(pairs(rows[2 * i]), pairs(rows[2 * i + 1])))));
    return op(F(_mm256_permute2f128_ps(rows[0], rows[1], 0x20)), F(_mm256_permute2f128_ps(rows[0], rows[1], 0x31)));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
