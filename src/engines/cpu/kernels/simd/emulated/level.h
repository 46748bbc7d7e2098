// The emulated level: what AVX-512 with products of bf16 does, by vectors that any CPU with AVX2 computes.
#pragma once

#define SOFTDELTA_LEVEL_VECTORS "engines/cpu/kernels/simd/emulated/batch.h"
#include "engines/cpu/kernels/simd/portable.h"
#include "engines/cpu/kernels/simd/x86/x86.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr int vector_registers = 32;
inline constexpr bool fma_rounds_once = true;

SOFTDELTA_INLINE U as_words(F x) {
    return bits_as<U>(x);
}
SOFTDELTA_INLINE F as_floats(U x) {
    return bits_as<F>(x);
}

SOFTDELTA_INLINE U load_u16(const std::uint16_t* p) {
    typedef std::uint16_t Halves __attribute__((vector_size(32)));
    Halves halves;
    __builtin_memcpy(&halves, p, sizeof(halves));
    return __builtin_convertvector(halves, U::Lanes);
}
SOFTDELTA_INLINE U load_u8(const std::uint8_t* p) {
    return U::of([&](std::size_t i) { return p[i]; });
}
SOFTDELTA_INLINE I load_i8(const std::int8_t* p) {
    return I::of([&](std::size_t i) { return p[i]; });
}
// p[0] … p[3] in every four lanes.
SOFTDELTA_INLINE F splat_four(const float* p) {
    return F::of([&](std::size_t i) { return p[i % 4]; });
}
SOFTDELTA_INLINE F load(const core::f16* p) {
    return F::of([&](std::size_t i) { return _cvtsh_ss(p[i].bits); });
}
// Lane i is f(i), or the f16 of bits(i): of what lies apart in memory.
template <class Value>
SOFTDELTA_INLINE F lanes_of(const Value& f) {
    return F::of([&](std::size_t i) { return f(static_cast<Index>(i)); });
}
template <class Bits>
SOFTDELTA_INLINE F lanes_of_f16(const Bits& bits) {
    return F::of([&](std::size_t i) { return _cvtsh_ss(bits(static_cast<Index>(i))); });
}
SOFTDELTA_INLINE void store(core::f16* p, F x) {
    alignas(64) float lanes[W];
    store(lanes, x);
    for (Index i = 0; i < W; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i),
                         _mm256_cvtps_ph(_mm256_load_ps(lanes + i), _MM_FROUND_TO_NEAREST_INT));
}
SOFTDELTA_INLINE D load_double(const float* p) {
    return D::of([&](std::size_t i) { return p[i]; });
}

// W × W words: row r in rows[r] becomes column r.
SOFTDELTA_INLINE void transpose(U (&rows)[W]) {
    std::uint32_t words[W][W];
    for (Index r = 0; r < W; ++r) store(words[r], rows[r]);
    for (Index r = 0; r < W; ++r) rows[r] = U::of([&](std::size_t i) { return words[i][r]; });
}

// The lower half of lanes with the upper one, again and again.
template <class Op>
SOFTDELTA_INLINE float reduce(F x, Op op) {
    alignas(64) float lanes[W];
    store(lanes, x);
    for (Index n = W / 2; n > 0; n /= 2)
        for (Index i = 0; i < n; ++i) lanes[i] = op(lanes[i], lanes[i + n]);
    return lanes[0];
}
SOFTDELTA_INLINE float sum(F x) {
    return reduce(x, [](float a, float b) { return a + b; });
}
SOFTDELTA_INLINE float maximum(F x) {
    return reduce(x, [](float a, float b) { return a > b ? a : b; });
}

// Lane i of the result is op over the lanes of rows[i]; overwrites rows.
template <class Op>
SOFTDELTA_INLINE F reduce_rows(F (&rows)[W], Op op) {
    U words[W];
    for (Index r = 0; r < W; ++r) words[r] = as_words(rows[r]);
    transpose(words);
    for (Index r = 0; r < W; ++r) rows[r] = as_floats(words[r]);
    for (Index n = W / 2; n > 0; n /= 2)
        for (Index i = 0; i < n; ++i) rows[i] = op(rows[i], rows[i + n]);
    return rows[0];
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

// What these vectors make.
#include "engines/cpu/kernels/simd/emulated/bf16_pairs.h"
#include "engines/cpu/kernels/simd/emulated/tiles.h"
