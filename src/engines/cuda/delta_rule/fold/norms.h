// Norms of rows whose squares may be beyond f32: such a chunk goes token by token.
#pragma once

#include <type_traits>

#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {
// Added to the exponents of two numbers (of f32: of one), it makes Inf and NaN overflow. Of bf16 and f32 it also makes
// numbers from 2^58 on overflow: f32 may not hold the sum of their squares. It holds that of all f16 numbers.
template <class T>
inline constexpr std::uint32_t nonfinite_step = std::is_same_v<T, __half>  ? 0x04000400u
                                                : std::is_same_v<T, float> ? 0x00800000u
                                                                           : 0x00800080u;
template <class T>
inline constexpr std::uint32_t far_step = std::is_same_v<T, __half>  ? nonfinite_step<T>
                                          : std::is_same_v<T, float> ? 0x23800000u
                                                                     : 0x23802380u;

template <class T>
__device__ inline bool overflows(std::uint32_t two, std::uint32_t step) {
    constexpr std::uint32_t exponents = std::is_same_v<T, __half>  ? 0x7c007c00u
                                        : std::is_same_v<T, float> ? 0x7f800000u
                                                                   : 0x7f807f80u;
    return (((two & exponents) + step) & 0x80008000u) != 0;
}
template <class T>
__device__ inline bool is_far(std::uint32_t two) {
    return overflows<T>(two, far_step<T>);
}

template <class T>
__device__ inline float add_squares(std::uint32_t word, float sum) {
    if constexpr (sizeof(T) == 4) return fmaf(__uint_as_float(word), __uint_as_float(word), sum);
    if constexpr (sizeof(T) == 2) {
        const float2 both = ptx::unpack(word, T());
        return fmaf(both.x, both.x, fmaf(both.y, both.y, sum));
    }
}

// 1/√(Σx² + 1e-6); 0, which no norm is, of a row with a number that is far.
__device__ inline float norm_of_squares(float sum, bool far) {
    return far ? 0.0F : 1 / sqrtf(sum + 1e-6F);
}

}  // namespace softdelta::cuda
