// Level neon: armv8-a, vectors of 128 bits.
#pragma once

#include <arm_neon.h>

#include "core/dtype.h"
#include "engines/cpu/kernels/simd/vector.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr int vector_registers = 32;
inline constexpr bool fma_rounds_once = true;

// The second operand when one is NaN, as on x86: fmax would give NaN, fmaxnm the number.
SOFTDELTA_INLINE F max(F x, F y) {
    return vbslq_f32(vcgtq_f32(x, y), x, y);
}
SOFTDELTA_INLINE F min(F x, F y) {
    return vbslq_f32(vcltq_f32(x, y), x, y);
}

SOFTDELTA_INLINE U as_words(F x) {
    return vreinterpretq_u32_f32(x);
}
SOFTDELTA_INLINE F as_floats(U x) {
    return vreinterpretq_f32_u32(x);
}

// a·b + c, rounded once.
SOFTDELTA_INLINE F fma(F a, F b, F c) {
    return vfmaq_f32(c, a, b);
}

// A factor of all lanes stands in one lane: a load brings it there alone, where one that repeats it takes a unit for
// vectors as well. Both are written as instructions: compilers repeat the factor, and copy sums between registers.
#define SOFTDELTA_LEVEL_HAS_FACTORS
inline constexpr bool multiplies_by_lane = true;
SOFTDELTA_INLINE F load_factor(const float* p) {
    float32x4_t x;
    asm("ldr %s0, %1" : "=w"(x) : "m"(*p));
    return x;
}
template <int lane = 0>
SOFTDELTA_INLINE F multiply_add_factor(F factors, F b, F c) {
    float32x4_t sum = c;
    asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(float32x4_t(b)), "w"(float32x4_t(factors)), "i"(lane));
    return sum;
}

// Vectors from p + offset on, two by one instruction: compilers take two, and one register for both.
template <int offset>
SOFTDELTA_INLINE void load_neighbours(const float* p, F (&x)[2]) {
    float32x4_t first, second;
    asm("ldp %q0, %q1, [%2, %3]"
        : "=w"(first), "=w"(second)
        : "r"(p), "i"(offset * sizeof(float)), "m"(*reinterpret_cast<const float(*)[offset + 2 * W]>(p)));
    x[0] = first;
    x[1] = second;
}
template <int offset>
SOFTDELTA_INLINE void load_neighbours(const float* p, F (&x)[1]) {
    x[0] = load(p + offset);
}

// Rounded once: xsimd's steps from an estimate err by an ulp more.
#define SOFTDELTA_LEVEL_HAS_DIVISION
SOFTDELTA_INLINE F divide(F a, F b) {
    return vdivq_f32(a, b);
}

// x, or the bound when that is more; NaN stays NaN.
SOFTDELTA_INLINE F at_least(float bound, F x) {
    return vmaxq_f32(x, vdupq_n_f32(bound));
}

// x, or the bound when that is less; NaN stays NaN.
SOFTDELTA_INLINE F at_most(float bound, F x) {
    return vminq_f32(x, vdupq_n_f32(bound));
}

SOFTDELTA_INLINE F round_to_nearest(F x) {
    return vrndnq_f32(x);
}

// p·2^n, n whole, −200 ≤ n ≤ 200. By two factors: ±200 are beyond the exponents of f32.
SOFTDELTA_INLINE F scale_by_power_of_two(F p, F n) {
    const int32x4_t whole = vcvtq_s32_f32(n), half = vshrq_n_s32(whole, 1), rest = vsubq_s32(whole, half);
    const auto power = [](int32x4_t e) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(127)), 23));
    };
    return vmulq_f32(vmulq_f32(p, power(half)), power(rest));
}

// 2^x within 1 ulp from 2^-126 on, and within 2^-127 below: x = n + f, and n is added to the exponent of 2^f.
// Even and odd powers apart, for a multiplication needs no copy of its factor, as an addition of a constant would.
#define SOFTDELTA_LEVEL_HAS_EXP2
inline constexpr bool exp2_has_subnormals = false;
SOFTDELTA_INLINE F exp2(F x) {
    const float32x4_t bounded = at_most(128.0F, at_least(-127.0F, x));
    const float32x4_t n = vrndnq_f32(bounded), f = vsubq_f32(bounded, n), y = vmulq_f32(f, f);
    const float32x4_t odd = {0x1.62e430p-1F, 0x1.c6af7cp-5F, 0x1.5f082ep-10F, 0};
    const float32x4_t even = {0x1.ebfbdcp-3F, 0x1.3b2de0p-7F, 0x1.416b52p-13F, 0};
    const float32x4_t high = vfmaq_laneq_f32(vmulq_laneq_f32(f, odd, 2), y, even, 2);
    const float32x4_t middle = vfmaq_f32(vfmaq_laneq_f32(vmulq_laneq_f32(f, odd, 1), y, even, 1), high, y);
    const float32x4_t low = vfmaq_f32(vmulq_laneq_f32(y, even, 0), middle, y);
    const float32x4_t p = vaddq_f32(vfmaq_laneq_f32(low, f, odd, 0), vdupq_n_f32(1));
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vcvtq_n_s32_f32(n, 23)));  // n·2^23; 0 of NaN
}

SOFTDELTA_INLINE U load_u16(const std::uint16_t* p) {
    return vmovl_u16(vld1_u16(p));
}
SOFTDELTA_INLINE void store_u16(std::uint16_t* p, U x) {  // the lower halves of words
    vst1_u16(p, vmovn_u32(x));
}
SOFTDELTA_INLINE U load_u8(const std::uint8_t* p) {
    std::uint32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
SOFTDELTA_INLINE I load_i8(const std::int8_t* p) {
    std::uint32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
}
// p[0] … p[3] in every four lanes.
SOFTDELTA_INLINE F splat_four(const float* p) {
    return load(p);
}
// The lowest four bits of each word, less 8.
SOFTDELTA_INLINE F halves_to_floats(U words) {
    const uint32x4_t low = vandq_u32(words, vdupq_n_u32(15));
    return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(low), vdupq_n_s32(8)));
}
SOFTDELTA_INLINE F load(const core::f16* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
}
SOFTDELTA_INLINE void store(core::f16* p, F x) {
    vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
// Lane i is f(i), or the f16 of bits(i): of what lies apart in memory.
template <class Value>
SOFTDELTA_INLINE F lanes_of(const Value& f) {
    const float lanes[W] = {f(0), f(1), f(2), f(3)};
    return load(lanes);
}
template <class Bits>
SOFTDELTA_INLINE F lanes_of_f16(const Bits& bits) {
    const core::f16 lanes[W] = {{bits(0)}, {bits(1)}, {bits(2)}, {bits(3)}};
    return load(lanes);
}
SOFTDELTA_INLINE D load_double(const float* p) {
    return vcvt_f64_f32(vld1_f32(p));
}

// The first n ≤ W words, zeros after them; nothing beyond them is read.
SOFTDELTA_INLINE U load_partial(const std::uint32_t* p, Index n) {
    std::uint32_t part[W] = {};
    for (Index i = 0; i < n; ++i) part[i] = p[i];
    return load(part);
}

SOFTDELTA_INLINE Mask nonzero_bytes(const std::uint8_t* p) {
    const uint32x4_t bytes = load_u8(p);
    return vtstq_u32(bytes, bytes);
}

// W × W words: row r in rows[r] becomes column r.
SOFTDELTA_INLINE void transpose(U (&rows)[W]) {
    const uint64x2_t a0 = vreinterpretq_u64_u32(vtrn1q_u32(rows[0], rows[1]));
    const uint64x2_t a1 = vreinterpretq_u64_u32(vtrn2q_u32(rows[0], rows[1]));
    const uint64x2_t a2 = vreinterpretq_u64_u32(vtrn1q_u32(rows[2], rows[3]));
    const uint64x2_t a3 = vreinterpretq_u64_u32(vtrn2q_u32(rows[2], rows[3]));
    rows[0] = vreinterpretq_u32_u64(vtrn1q_u64(a0, a2));
    rows[1] = vreinterpretq_u32_u64(vtrn1q_u64(a1, a3));
    rows[2] = vreinterpretq_u32_u64(vtrn2q_u64(a0, a2));
    rows[3] = vreinterpretq_u32_u64(vtrn2q_u64(a1, a3));
}

SOFTDELTA_INLINE float sum(F x) {
    return vaddvq_f32(x);
}
SOFTDELTA_INLINE float maximum(F x) {
    const F pairs = max(x, F(vextq_f32(x, x, 2)));
    return vgetq_lane_f32(max(pairs, F(vextq_f32(pairs, pairs, 1))), 0);
}

// Lane i of the result is op over the lanes of rows[i]; overwrites rows. Every step joins halves of two vectors.
template <class Op>
SOFTDELTA_INLINE F reduce_rows(F (&rows)[W], Op op) {
    const auto pairs = [](F x) { return vreinterpretq_f64_f32(x); };
    for (Index i = 0; i < 2; ++i)
        rows[i] = op(F(vtrn1q_f32(rows[2 * i], rows[2 * i + 1])), F(vtrn2q_f32(rows[2 * i], rows[2 * i + 1])));
    return op(F(vreinterpretq_f32_f64(vtrn1q_f64(pairs(rows[0]), pairs(rows[1])))),
              F(vreinterpretq_f32_f64(vtrn2q_f64(pairs(rows[0]), pairs(rows[1])))));
}

// Fetches the cache line at p to all levels of the cache.
SOFTDELTA_INLINE void prefetch_line(const void* p) {
    asm volatile("prfm pldl1keep, %a0" : : "p"(p));
}

// To the second cache alone.
SOFTDELTA_INLINE void prefetch_line_to_second(const void* p) {
    asm volatile("prfm pldl2keep, %a0" : : "p"(p));
}

// The same as prefetch_line() for a line that is going to be written.
SOFTDELTA_INLINE void prefetch_for_write(const void* p) {
    asm volatile("prfm pstl1keep, %a0" : : "p"(p));
}

// Nothing: numbers below 2^-126 cost these cores no time, and their switch (FPCR.FZ) would take such operands for 0,
// too.
class FlushSubnormals {
  public:
    FlushSubnormals() {}   // NOLINT: an object that is not trivial counts as used
    ~FlushSubnormals() {}  // NOLINT
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
