// Level x86-64-v2: SSE4.2, vectors of 128 bits.
#pragma once

#include "engines/cpu/kernels/simd/portable.h"
#include "engines/cpu/kernels/simd/x86/x86.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr int vector_registers = 16;
inline constexpr bool fma_rounds_once = false;

SOFTDELTA_INLINE U as_words(F x) {
    return _mm_castps_si128(x);
}
SOFTDELTA_INLINE F as_floats(U x) {
    return _mm_castsi128_ps(x);
}

SOFTDELTA_INLINE U load_u16(const std::uint16_t* p) {
    return _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
SOFTDELTA_INLINE U load_u8(const std::uint8_t* p) {
    std::int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm_cvtepu8_epi32(_mm_cvtsi32_si128(four));
}
SOFTDELTA_INLINE I load_i8(const std::int8_t* p) {
    std::int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm_cvtepi8_epi32(_mm_cvtsi32_si128(four));
}
// p[0] … p[3] in every four lanes.
SOFTDELTA_INLINE F splat_four(const float* p) {
    return load(p);
}
SOFTDELTA_INLINE F load(const core::f16* p) {
    alignas(64) float x[W];
    for (Index i = 0; i < W; ++i) x[i] = core::to_float(p[i]);
    return load(x);
}
// Lane i is f(i), or the f16 of bits(i): of what lies apart in memory.
template <class Value>
SOFTDELTA_INLINE F lanes_of(const Value& f) {
    return _mm_setr_ps(f(0), f(1), f(2), f(3));
}
template <class Bits>
SOFTDELTA_INLINE F lanes_of_f16(const Bits& bits) {
    return lanes_of([&](Index i) { return core::to_float(core::f16{bits(i)}); });
}
SOFTDELTA_INLINE void store(core::f16* p, F x) {
    alignas(64) float values[W];
    store(values, x);
    for (Index i = 0; i < W; ++i) p[i] = core::to_f16(static_cast<double>(values[i]));
}
SOFTDELTA_INLINE D load_double(const float* p) {
    return _mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// W × W words: row r in rows[r] becomes column r.
SOFTDELTA_INLINE void transpose(U (&rows)[W]) {
    const __m128i a0 = _mm_unpacklo_epi32(rows[0], rows[1]);
    const __m128i a1 = _mm_unpackhi_epi32(rows[0], rows[1]);
    const __m128i a2 = _mm_unpacklo_epi32(rows[2], rows[3]);
    const __m128i a3 = _mm_unpackhi_epi32(rows[2], rows[3]);
    rows[0] = _mm_unpacklo_epi64(a0, a2);
    rows[1] = _mm_unpackhi_epi64(a0, a2);
    rows[2] = _mm_unpacklo_epi64(a1, a3);
    rows[3] = _mm_unpackhi_epi64(a1, a3);
}

SOFTDELTA_INLINE float sum(F x) {
    return _mm_cvtss_f32(sum_of_four(x));
}
SOFTDELTA_INLINE float maximum(F x) {
    return _mm_cvtss_f32(maximum_of_four(x));
}

// Lane i of the result is op over the lanes of rows[i]; overwrites rows. Every step joins halves of two vectors.
template <class Op>
SOFTDELTA_INLINE F reduce_rows(F (&rows)[W], Op op) {
    for (Index i = 0; i < 2; ++i)
        rows[i] =
            op(F(_mm_unpacklo_ps(rows[2 * i], rows[2 * i + 1])), F(_mm_unpackhi_ps(rows[2 * i], rows[2 * i + 1])));
    return op(F(_mm_movelh_ps(rows[0], rows[1])), F(_mm_movehl_ps(rows[1], rows[0])));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
