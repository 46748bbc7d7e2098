// Quantised numbers, of 8 or 4 bits with a scale for 32 of them (core/quantised.h), made into floats.
#pragma once

#include <type_traits>

#include "engines/cpu/kernels/quantised.h"
#include "engines/cpu/kernels/simd/simd.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

static_assert(core::quantised_block % W == 0 && core::bytes_of_halves % W == 0, "a vector has one scale");

// W numbers of each type, without their scale: `in` says where in its block the first stands, a multiple of W, and
// `block` where the block begins.
SOFTDELTA_INLINE F load_in_block(const std::int8_t* block, Index in) {
    return to_floats(load_i8(block + in));
}
SOFTDELTA_INLINE F load_in_block(const std::uint8_t* block, Index in) {
    const U bytes = load_u8(block + in % core::bytes_of_halves);
    return halves_to_floats(in < core::bytes_of_halves ? bytes : bytes >> 4);
}
// Exponents of f8 are 120 less than those of f32. Numbers below 2^-6 are their last three bits times 2^-9.
SOFTDELTA_INLINE F load_in_block(const core::f8* block, Index in) {
    const U bits = load_u8(&block->bits + in);
    const U size = bits & U(0x7fU), sign = (bits & U(0x80U)) << 24;
    const F normal = as_floats((size << 20) + U(120U << 23)), tiny = to_floats(bits_as<I>(size)) * splat(0x1p-9F);
    const F number = select(to_floats(bits_as<I>(size)) < splat(8.0F), tiny, normal);
    const F nan = select(number == splat(480.0F), as_floats(U(0x7fc00000U)), number);  // 0x7f
    return as_floats(as_words(nan) | sign);
}

inline float load_scale(core::DType dtype, const void* scale, Index at) {
    if (dtype == core::DType::f32) return static_cast<const float*>(scale)[at];
    if (dtype == core::DType::bf16) return core::to_float(static_cast<const core::bf16*>(scale)[at]);
    return core::to_float(static_cast<const core::f16*>(scale)[at]);
}

// Elements i … i + W − 1 of a row, i a multiple of W; zeros beyond the first n.
template <class T>
SOFTDELTA_INLINE F load_quantised(const T* row, Index step, const void* scale, const Scales& scales, Index i, Index n) {
    const Index block = i / core::quantised_block, in = i % core::quantised_block;
    const T* at = row + block * scales.block_step;
    const F factor = splat(load_scale(scales.dtype, scale, block * scales.step));
    if (step == 1 && n >= W) return load_in_block(at, in) * factor;
    constexpr Index period = std::is_same_v<T, std::uint8_t> ? core::bytes_of_halves : core::quantised_block;
    alignas(64) T part[core::quantised_block] = {};
    for (Index j = 0; j < W && j < n; ++j) part[in % period + j] = at[(in % period + j) * step];
    const F x = load_in_block(part, in) * factor;
    return n >= W ? x : select(iota() < splat(static_cast<float>(n)), x, splat(0.0F));
}

SOFTDELTA_INLINE F load_quantised(core::DType dtype, const void* row, Index step, const void* scale,
                                  const Scales& scales, Index i, Index n) {
    if (dtype == core::DType::i8)
        return load_quantised(static_cast<const std::int8_t*>(row), step, scale, scales, i, n);
    if (dtype == core::DType::u8)
        return load_quantised(static_cast<const std::uint8_t*>(row), step, scale, scales, i, n);
    return load_quantised(static_cast<const core::f8*>(row), step, scale, scales, i, n);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
