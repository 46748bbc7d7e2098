// The vectors that kernels are written in, W lanes of f32 or of 32-bit words; the only file that knows an instruction
// set. Everything here is inlined into its caller: nothing that is compiled for one instruction set may be shared.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <xsimd/xsimd.hpp>

#include "core/dtype.h"
#include "core/tensor.h"

#define SOFTDELTA_INLINE __attribute__((always_inline)) inline

// NOLINTNEXTLINE: one namespace for each instruction set
namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

using core::Index;

using F = xsimd::batch<float>;          // W floats
using Mask = xsimd::batch_bool<float>;  // W flags
using I = xsimd::batch<std::int32_t>;
using U = xsimd::batch<std::uint32_t>;  // W words; each may hold two bf16, the first in the lower half
inline constexpr Index W = static_cast<Index>(F::size);
using xsimd::abs;
using xsimd::all;
using xsimd::any;
using xsimd::bitwise_cast;
using xsimd::log1p;
using xsimd::max;
using xsimd::min;
using xsimd::select;

constexpr Index min(Index a, Index b) {
    return a < b ? a : b;
}
constexpr Index max(Index a, Index b) {
    return a > b ? a : b;
}
constexpr Index round_up(Index n, Index multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// Registers that hold vectors.
#if defined(__AVX512F__)
inline constexpr int vector_registers = 32;
#else
inline constexpr int vector_registers = 16;
#endif

// The register tile of products: MR × NR_vectors accumulators, NR_vectors operands and one broadcast.
#if defined(__AVX512F__)
inline constexpr int MR = 12;
#else
inline constexpr int MR = 6;
#endif
inline constexpr int NR_vectors = 2;
inline constexpr Index NR = NR_vectors * W;

#if defined(__AVX512BF16__)
inline constexpr bool has_bf16_products = true;
#else
inline constexpr bool has_bf16_products = false;
#endif

SOFTDELTA_INLINE F splat(float x) {
    return F(x);
}
SOFTDELTA_INLINE F load(const float* p) {
    return F::load_unaligned(p);
}
SOFTDELTA_INLINE void store(float* p, F x) {
    x.store_unaligned(p);
}
SOFTDELTA_INLINE U load(const std::uint32_t* p) {
    return U::load_unaligned(p);
}
SOFTDELTA_INLINE void store(std::uint32_t* p, U x) {
    x.store_unaligned(p);
}

// a·b + c, rounded once where the instruction set has it
SOFTDELTA_INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);  // xsimd 8.1 multiplies and adds
#else
    return xsimd::fma(a, b, c);
#endif
}

// p + step, computed here and now: compilers would rather prepare the addresses of a whole unrolled loop and spill
// them.
template <class T>
SOFTDELTA_INLINE T* advance_pointer(T* p, Index step) {
    p += step;
    asm("" : "+r"(p));
    return p;
}

// Asks for the cache line at p. Written out: g++ 12 takes a function that only does this for one that does nothing.
SOFTDELTA_INLINE void prefetch_line(const void* p) {
    asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p)));
}

SOFTDELTA_INLINE F iota() {  // 0, 1, …, W − 1
    alignas(64) static constexpr float index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(index);
}

SOFTDELTA_INLINE U as_words(F x) {
#if defined(__AVX512F__)
    return _mm512_castps_si512(x);
#elif defined(__AVX2__)
    return _mm256_castps_si256(x);
#else
    return _mm_castps_si128(x);
#endif
}

SOFTDELTA_INLINE F as_floats(U x) {
#if defined(__AVX512F__)
    return _mm512_castsi512_ps(x);
#elif defined(__AVX2__)
    return _mm256_castsi256_ps(x);
#else
    return _mm_castsi128_ps(x);
#endif
}

// --- exponentials ---

// x, or the bound when that is more; NaN stays NaN.
SOFTDELTA_INLINE F at_least(float bound, F x) {
#if defined(__AVX512F__)
    return _mm512_max_ps(_mm512_set1_ps(bound), x);  // the second operand when one is NaN
#else
    return xsimd::select(x < F(bound), F(bound), x);
#endif
}

// x, or the bound when that is less; NaN stays NaN.
SOFTDELTA_INLINE F at_most(float bound, F x) {
#if defined(__AVX512F__)
    return _mm512_min_ps(_mm512_set1_ps(bound), x);
#else
    return xsimd::select(x > F(bound), F(bound), x);
#endif
}

SOFTDELTA_INLINE F round_to_nearest(F x) {
#if defined(__AVX512F__)
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return xsimd::nearbyint(x);
#endif
}

// 2^(f + n), |f| ≤ 1/2, n whole, −200 ≤ n ≤ 200. Degree 6, relative error 9e-9.
SOFTDELTA_INLINE F exp2_of_parts(F f, F n) {
    F p = fma(F(0x1.44138ap-13F), f, F(0x1.5f0890p-10F));
    p = fma(p, f, F(0x1.3b2a54p-7F));
    p = fma(p, f, F(0x1.c6af6cp-5F));
    p = fma(p, f, F(0x1.ebfbe0p-3F));
    p = fma(p, f, F(0x1.62e430p-1F));
    p = fma(p, f, F(1.0F));
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, n);
#else
    // 2^n as two factors: ±200 are beyond the exponents of f32
    const I whole = xsimd::to_int(n);
    const I half = whole >> 1;
    const auto power = [](I e) { return as_floats(xsimd::bitwise_cast<U>((e + I(127)) << 23)); };
    return p * power(half) * power(whole - half);
#endif
}

// 2^x within 1 unit in the last place, 1.5 where fma rounds twice; 0 for x below −150 and for −∞, ∞ from 128 on, NaN
// stays NaN.
SOFTDELTA_INLINE F exp2(F x) {
#if defined(__AVX512F__)
    // x = n + k/16 + r with 0 ≤ r ≤ 1/16: 2^n, a table of 2^(k/16), and a cubic with relative error 3e-9.
    alignas(64) static constexpr float sixteenths[16] = {0x1.000000p0F, 0x1.0b5586p0F, 0x1.172b84p0F, 0x1.2387a6p0F,
                                                         0x1.306fe0p0F, 0x1.3dea64p0F, 0x1.4bfdaep0F, 0x1.5ab07ep0F,
                                                         0x1.6a09e6p0F, 0x1.7a1148p0F, 0x1.8ace54p0F, 0x1.9c4918p0F,
                                                         0x1.ae89fap0F, 0x1.c199bep0F, 0x1.d5818ep0F, 0x1.ea4afap0F};
    // 1.5·2^19 leaves sixteenths, rounded down, in the last bits.
    const F shifted = _mm512_add_round_ps(x, F(0x1.8p19F), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const F power = _mm512_permutexvar_ps(_mm512_castps_si512(shifted), load(sixteenths));
    const F r = _mm512_reduce_ps(x, 4 << 4 | _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 of ±∞
    F p = fma(F(0x1.d043cap-5F), r, F(0x1.ebe594p-3F));
    p = fma(p, r, F(0x1.62e43ep-1F));
    p = fma(power, p * r, power);
    return _mm512_scalef_ps(p, x);  // by 2^n, n = x rounded down
#else
    const F bounded = at_most(200.0F, at_least(-200.0F, x));
    const F n = round_to_nearest(bounded);
    return exp2_of_parts(bounded - n, n);
#endif
}

inline constexpr float log2_e = 1.44269504F;
SOFTDELTA_INLINE F exp(F x) {
    return exp2(x * F(log2_e));
}

// e^(x + rest) within 2 units in the last place, however large |x|; rest is small beside it. From x = 89 on ∞.
SOFTDELTA_INLINE F exp_of_sum(F x, F rest) {
    const F bounded = at_most(138.0F, at_least(-138.0F, x));
    const F n = round_to_nearest(bounded * F(log2_e));
    const F f = fma(n, F(2.12194440e-4F), fma(n, F(-0.693359375F), bounded)) +
                rest;  // n·log 2 less, in an exact part and a small one
    return exp2_of_parts(f * F(log2_e), n);
}

// Within 2 units in the last place: odd polynomial near 0, where 1 − e^(−2|x|) would cancel.
SOFTDELTA_INLINE F tanh(F x) {
    const F size = xsimd::abs(x);
    const F e = exp(F(-2.0F) * size);
    const F far = (F(1.0F) - e) / (F(1.0F) + e);
    const F y = x * x;
    F p = fma(F(-6.09668652e-03F), y, F(2.09971600e-02F));
    p = fma(p, y, F(-5.38509056e-02F));
    p = fma(p, y, F(1.33327697e-01F));
    p = fma(p, y, F(-3.33333289e-01F));
    const F near = fma(p * y, size, size);
    return xsimd::copysign(xsimd::select(size < F(0.625F), near, far), x);
}

// --- storage types ---

SOFTDELTA_INLINE U load_u16(const std::uint16_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    return _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#endif
}

SOFTDELTA_INLINE void store_u16(std::uint16_t* p, U x) {  // the lower halves of words
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
#else
    alignas(64) std::uint32_t words[W];
    store(words, x);
    for (Index i = 0; i < W; ++i) p[i] = static_cast<std::uint16_t>(words[i]);
#endif
}

SOFTDELTA_INLINE F load(const core::bf16* p) {
    return as_floats(load_u16(&p->bits) << 16);
}

// bf16 in the lower halves of words: nearest even; NaN stays NaN.
SOFTDELTA_INLINE U round_to_bf16(F x) {
    const U bits = as_words(x);
    const U rounded = (bits + U(0x7fffU) + ((bits >> 16) & U(1U))) >> 16;
    const U nan = (bits >> 16) | U(0x40U);
    return as_words(xsimd::select(x == x, as_floats(rounded), as_floats(nan)));
}

SOFTDELTA_INLINE void store(core::bf16* p, F x) {
    store_u16(&p->bits, round_to_bf16(x));
}

SOFTDELTA_INLINE F load(const core::f16* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    alignas(64) float x[W];
    for (Index i = 0; i < W; ++i) x[i] = core::to_float(p[i]);
    return load(x);
#endif
}

SOFTDELTA_INLINE void store(core::f16* p, F x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
    alignas(64) float values[W];
    store(values, x);
    for (Index i = 0; i < W; ++i) p[i] = core::to_f16(static_cast<double>(values[i]));
#endif
}

// In f64.
using D = xsimd::batch<double>;
SOFTDELTA_INLINE D exp(D x) {
    return xsimd::exp(x);
}
inline constexpr Index double_width = static_cast<Index>(D::size);

SOFTDELTA_INLINE D load_double(const float* p) {
#if defined(__AVX512F__)
    return _mm512_cvtps_pd(_mm256_loadu_ps(p));
#elif defined(__AVX2__)
    return _mm256_cvtps_pd(_mm_loadu_ps(p));
#else
    return _mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
}

// The first n ≤ W elements, zeros after them; nothing beyond them is read or written.
template <class T>
SOFTDELTA_INLINE F load_partial(const T* p, Index n) {
    alignas(64) T part[W] = {};
    for (Index i = 0; i < n; ++i) part[i] = p[i];
    return load(part);
}
SOFTDELTA_INLINE U load_partial(const std::uint32_t* p, Index n) {
#if defined(__AVX512F__)
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << n) - 1), p);
#else
    alignas(64) std::uint32_t part[W] = {};
    for (Index i = 0; i < n; ++i) part[i] = p[i];
    return load(part);
#endif
}
template <class T>
SOFTDELTA_INLINE void store_partial(T* p, F x, Index n) {
    alignas(64) T part[W];
    store(part, x);
    for (Index i = 0; i < n; ++i) p[i] = part[i];
}

SOFTDELTA_INLINE Mask nonzero_bytes(const std::uint8_t* p) {
#if defined(__AVX512F__)
    const __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return Mask(_mm512_test_epi32_mask(words, words));
#else
    alignas(64) float flags[W];
    for (Index i = 0; i < W; ++i) flags[i] = p[i] != 0 ? 1.0F : 0.0F;
    return load(flags) != splat(0.0F);
#endif
}

// --- pairs of bf16: words that hold two neighbours along the depth of a product, the first in the lower half ---

// Two vectors as words {first, second}, rounded to nearest even.
SOFTDELTA_INLINE U bf16_pairs(F first, F second) {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr std::uint16_t alternate[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(alternate),
                                    std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
#else
    return round_to_bf16(first) | (round_to_bf16(second) << 16);
#endif
}

// W floats as W/2 words of neighbours, rounded to nearest even.
SOFTDELTA_INLINE void store_bf16(std::uint32_t* p, F x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), std::bit_cast<__m256i>(_mm512_cvtneps_pbh(x)));
#else
    store(reinterpret_cast<core::bf16*>(p), x);
#endif
}

// --- W × W words: row r in rows[r] becomes column r ---

SOFTDELTA_INLINE void transpose(U (&rows)[W]) {
#if defined(__AVX512F__)
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
#elif defined(__AVX2__)
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
#else
    const __m128i a0 = _mm_unpacklo_epi32(rows[0], rows[1]);
    const __m128i a1 = _mm_unpackhi_epi32(rows[0], rows[1]);
    const __m128i a2 = _mm_unpacklo_epi32(rows[2], rows[3]);
    const __m128i a3 = _mm_unpackhi_epi32(rows[2], rows[3]);
    rows[0] = _mm_unpacklo_epi64(a0, a2);
    rows[1] = _mm_unpackhi_epi64(a0, a2);
    rows[2] = _mm_unpacklo_epi64(a1, a3);
    rows[3] = _mm_unpackhi_epi64(a1, a3);
#endif
}

// --- sums and maxima over lanes, in a fixed order ---

SOFTDELTA_INLINE __m128 lower_half_sum(__m128 x) {
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_add_ss(x, _mm_shuffle_ps(x, x, 1));
}
SOFTDELTA_INLINE __m128 lower_half_max(__m128 x) {
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_max_ss(x, _mm_shuffle_ps(x, x, 1));
}

SOFTDELTA_INLINE float sum(F x) {
#if defined(__AVX512F__)
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    return _mm_cvtss_f32(lower_half_sum(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1))));
#elif defined(__AVX2__)
    return _mm_cvtss_f32(lower_half_sum(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1))));
#else
    return _mm_cvtss_f32(lower_half_sum(x));
#endif
}

SOFTDELTA_INLINE float maximum(F x) {
#if defined(__AVX512F__)
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    return _mm_cvtss_f32(lower_half_max(_mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1))));
#elif defined(__AVX2__)
    return _mm_cvtss_f32(lower_half_max(_mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1))));
#else
    return _mm_cvtss_f32(lower_half_max(x));
#endif
}

// Lane i of the result is op over the lanes of rows[i]; overwrites rows. Every step puts two vectors' halves together.
template <class Op>
SOFTDELTA_INLINE F reduce_rows(F (&rows)[W], Op op) {
#if defined(__AVX512F__)
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
#elif defined(__AVX2__)
    for (Index i = 0; i < 4; ++i)
        rows[i] = op(F(_mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1])),
                     F(_mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1])));
    const auto pairs = [](F x) { return _mm256_castps_pd(x); };
    for (Index i = 0; i < 2; ++i)
        rows[i] = op(F(_mm256_castpd_ps(_mm256_unpacklo_pd(pairs(rows[2 * i]), pairs(rows[2 * i + 1])))),
                     F(_mm256_castpd_ps(_mm256_unpackhi_pd(pairs(rows[2 * i]), pairs(rows[2 * i + 1])))));
    return op(F(_mm256_permute2f128_ps(rows[0], rows[1], 0x20)), F(_mm256_permute2f128_ps(rows[0], rows[1], 0x31)));
#else
    for (Index i = 0; i < 2; ++i)
        rows[i] =
            op(F(_mm_unpacklo_ps(rows[2 * i], rows[2 * i + 1])), F(_mm_unpackhi_ps(rows[2 * i], rows[2 * i + 1])));
    return op(F(_mm_movelh_ps(rows[0], rows[1])), F(_mm_movehl_ps(rows[1], rows[0])));
#endif
}

SOFTDELTA_INLINE F row_sums(F (&rows)[W]) {
    return reduce_rows(rows, [](F x, F y) { return x + y; });
}
SOFTDELTA_INLINE F row_maxima(F (&rows)[W]) {
    return reduce_rows(rows, [](F x, F y) { return xsimd::max(x, y); });
}

// --- matrix tiles ---

struct NoTiles {
    static constexpr bool exist = false;
};

inline constexpr Index tile_pairs = 16;  // pairs of the depth that a tile of A or B holds

#if defined(__AMX_BF16__)

// Registers of 16 rows of 16 words. What a thread must have while it multiplies pairs: tiles 0, 1 and 5 to 7 are sums,
// 2 is A, of MR rows each; 3 and 4 are B, 16 pairs of the depth. The assembly tells the compiler that memory is
// read and written, which headers do not.
class MatrixTiles {
  public:
    static constexpr bool exist = true;
    MatrixTiles() {
        struct alignas(64) {
            std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
            std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            std::uint8_t rows[16] = {MR, MR, MR, tile_pairs, tile_pairs, MR, MR, MR};
        } const layout;
        asm volatile("ldtilecfg %0" ::"m"(layout));
    }
    ~MatrixTiles() { asm volatile("tilerelease"); }
    MatrixTiles(const MatrixTiles&) = delete;
    MatrixTiles& operator=(const MatrixTiles&) = delete;

    template <int tile>
    SOFTDELTA_INLINE static void clear() {
        asm volatile("tilezero %%tmm%c0" ::"i"(tile));
    }
    template <int tile, class T>
    SOFTDELTA_INLINE static void read(const T* p, Index row) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row * 4), "i"(tile) : "memory");
    }
    template <int tile>
    SOFTDELTA_INLINE static void write(float* p, Index row) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row * 4), "i"(tile) : "memory");
    }
    template <int sums, int a, int b>
    SOFTDELTA_INLINE static void multiply_add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
    }
};

#endif

// --- products: c + a·b, each lane, for floats and for pairs ---

// A unit has an object of its product's Tiles while it multiplies.
struct FloatProduct {
    using Element = float;  // one element of the depth
    using Tiles = NoTiles;
    static constexpr Index depth = 1;
    SOFTDELTA_INLINE static F multiply_add(F a, F b, F c) { return fma(a, b, c); }
};

struct PairProduct {
    using Element = std::uint32_t;  // two elements of the depth
    static constexpr Index depth = 2;
#if defined(__AMX_BF16__)
    using Tiles = MatrixTiles;
#else
    using Tiles = NoTiles;
#endif
#if defined(__AVX512BF16__)
    SOFTDELTA_INLINE static F multiply_add(F a, F b, F c) {
        return _mm512_dpbf16_ps(c, std::bit_cast<__m512bh>(static_cast<__m512>(a)),
                                std::bit_cast<__m512bh>(static_cast<__m512>(b)));
    }
#endif
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
