// Rounding of products' operands and stored tensors to the storage type, as a low-precision kernel does. Stochastic:
// up with the probability of what is cut off, so that the mean over seeds is exact and no lucky run sets a limit.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/dtype.h"

namespace softdelta::stages {

// One per work unit (head, sequence): its numbers come from the call's seed and the unit, never from a thread.
class Rounding {
  public:
    // seed 0: no rounding at all
    Rounding(std::uint64_t seed, std::uint64_t unit, core::DType storage)
        : state_(mix(seed ^ mix(unit + 1))), storage_(storage), active_(seed != 0 && storage != core::DType::f64) {}

    bool active() const { return active_; }
    // Whether operands may be as small and as large as f32 has them.
    bool has_exponents_of_f32() const { return storage_ != core::DType::f16; }

    // In place: n numbers that a kernel would hold in the storage type.
    template <class T>
    void operand(T* x, std::int64_t n) {
        if (active_) round(x, n, storage_);
    }

    // A tensor that is stored in `type`.
    template <class T>
    void stored(T* x, std::int64_t n, core::DType type) {
        if (active_ && type != core::DType::f64) round(x, n, type);
    }

    // A number that a kernel keeps in f32.
    double in_float(double x) {
        const float nearest = static_cast<float>(x);
        const double rest = x - static_cast<double>(nearest);
        if (!active_ || rest == 0 || !std::isfinite(rest)) return static_cast<double>(nearest);
        const float other = std::nextafter(nearest, rest > 0 ? HUGE_VALF : -HUGE_VALF);
        const double gap = static_cast<double>(other) - static_cast<double>(nearest);
        const double draw = static_cast<double>((state_ = mix(state_)) >> 11) * 0x1p-53;
        return static_cast<double>(draw < rest / gap ? other : nearest);
    }

  private:
    static std::uint64_t mix(std::uint64_t x) {  // splitmix64
        x += 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return x ^ (x >> 31);
    }

    template <class T>
    void round(T* x, std::int64_t n, core::DType type) {
        const std::uint32_t key = static_cast<std::uint32_t>(state_ = mix(state_));
        for (std::int64_t i = 0; i < n; ++i) {
            std::uint32_t r = key ^ static_cast<std::uint32_t>(i) * 0x9e3779b9u;  // a hash, so that the loop vectorises
            r = (r ^ (r >> 16)) * 0x7feb352du;
            r = (r ^ (r >> 15)) * 0x846ca68bu;
            r ^= r >> 16;
            const float y = static_cast<float>(x[i]);
            x[i] = static_cast<T>(type == core::DType::bf16  ? to_bf16(y, r)
                                  : type == core::DType::f16 ? to_f16(y, r)
                                                             : dither(y, r));
        }
    }

    static float to_bf16(float x, std::uint32_t r) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
        const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
        return std::bit_cast<float>(finite ? (bits + (r >> 16)) & 0xffff0000u : bits);
    }

    // Below half of its smallest number a kernel has 0. Stochastic rounding would make it that number once in a while,
    // an error of any size next to x, and too rare for a few seeds to show.
    static float to_f16(float x, std::uint32_t r) {
        if (!(std::abs(x) <= 65504.0f)) return x;
        if (std::abs(x) < 0x1p-25f) return 0;
        const std::uint32_t exponent = std::bit_cast<std::uint32_t>(x) & 0x7f800000u;
        const float ulp = exponent <= 0x38800000u ? 0x1p-24f : std::bit_cast<float>(exponent) * 0x1p-10f;
        return std::floor(x / ulp + static_cast<float>(r >> 19) * 0x1p-13f) * ulp;  // 13 bits: the sum is exact
    }

    // f32 arithmetic has already rounded: what is left of stochastic rounding is one unit up or down, each with
    // probability 1/12, which has its variance, ulp²/6.
    static float dither(float x, std::uint32_t r) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
        if ((bits & 0x7f800000u) == 0x7f800000u || (bits & 0x7fffffffu) == 0) return x;
        constexpr std::uint32_t twelfth = 0xffffffffu / 12;
        return std::bit_cast<float>(r < twelfth ? bits + 1 : r > 0xffffffffu - twelfth ? bits - 1 : bits);
    }

    std::uint64_t state_;
    core::DType storage_;
    bool active_;
};

}  // namespace softdelta::stages
