// Vectors of W lanes: their types, and what the compiler's library does on every instruction set alike. Everything in
// this folder is inlined into its caller: nothing that is compiled for one instruction set may be shared.
#pragma once

#include <cstdint>

#include "core/tensor.h"

#define SOFTDELTA_INLINE __attribute__((always_inline)) inline

#if defined(SOFTDELTA_LEVEL_VECTORS)
#include SOFTDELTA_LEVEL_VECTORS
#else
#include <xsimd/xsimd.hpp>
#endif

// NOLINTNEXTLINE: one namespace for each instruction set
namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

using core::Index;

#if defined(SOFTDELTA_LEVEL_VECTORS)
namespace vectors = emulated;
#else
namespace vectors = xsimd;
#endif

using F = vectors::batch<float>;          // W floats
using Mask = vectors::batch_bool<float>;  // W flags
using I = vectors::batch<std::int32_t>;
using U = vectors::batch<std::uint32_t>;  // W words; each may hold two bf16, the first in the lower half
using D = vectors::batch<double>;         // double_width numbers in f64
inline constexpr Index W = static_cast<Index>(F::size);
inline constexpr Index double_width = static_cast<Index>(D::size);

using vectors::abs;
using vectors::all;
using vectors::any;
using vectors::max;  // the second operand when one is NaN
using vectors::min;
using vectors::select;
using vectors::sqrt;

// Of whole numbers.
constexpr Index min(Index a, Index b) {
    return a < b ? a : b;
}
constexpr Index max(Index a, Index b) {
    return a > b ? a : b;
}
constexpr Index round_up(Index n, Index multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// The bits of x as another type of vector. xsimd after version 8 wants the type of its numbers.
template <class To, class From>
SOFTDELTA_INLINE To bits_as(From x) {
#if XSIMD_VERSION_MAJOR > 8
    return vectors::bitwise_cast<typename To::value_type>(x);
#else
    return vectors::bitwise_cast<To>(x);
#endif
}

// Whole numbers as floats.
SOFTDELTA_INLINE F to_floats(I x) {
    return vectors::to_float(x);
}
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

SOFTDELTA_INLINE F iota() {  // 0, 1, …, W − 1
    alignas(64) static constexpr float index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static_assert(W <= 16);
    return load(index);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
