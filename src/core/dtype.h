// Storage types and the conversions between them and f64. Every conversion rounds once, to nearest even.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace softdelta::core {

enum class DType : std::uint8_t { f64, f32, bf16, f16, boolean, i32, i64, i8, u8, f8 };  // f8 is e4m3

struct bf16 {
    std::uint16_t bits;
};
struct f16 {
    std::uint16_t bits;
};
// Eight bits of sign, exponent and mantissa: 1, 4 and 3, without infinity; 0x7f is NaN (e4m3fn).
struct f8 {
    std::uint8_t bits;
};

constexpr std::size_t size_of(DType type) {
    switch (type) {
        case DType::f64:
        case DType::i64:
            return 8;
        case DType::f32:
        case DType::i32:
            return 4;
        case DType::bf16:
        case DType::f16:
            return 2;
        case DType::boolean:
        case DType::i8:
        case DType::u8:
        case DType::f8:
            return 1;
    }
    return 0;
}

constexpr bool is_float(DType type) {
    return type <= DType::f16;
}
constexpr bool is_integer(DType type) {
    return type == DType::i32 || type == DType::i64;
}

// Numbers of 8 or 4 bits that are multiplied by a scale. A u8 holds two of 4 bits.
constexpr bool is_quantised(DType type) {
    return type >= DType::i8;
}

constexpr const char* name_of(DType type) {
    constexpr const char* names[] = {"f64", "f32", "bf16", "f16", "bool", "i32", "i64", "i8", "u8", "f8_e4m3"};
    return names[static_cast<std::size_t>(type)];
}

// The machine epsilon: the spacing of numbers just above 1, 2^-(explicit mantissa bits).
constexpr double epsilon_of(DType type) {
    switch (type) {
        case DType::f64:
            return 0x1p-52;
        case DType::f32:
            return 0x1p-23;
        case DType::bf16:
            return 0x1p-7;
        case DType::f16:
            return 0x1p-10;
        default:
            return 0;
    }
}

inline float to_float(bf16 x) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

inline float to_float(f16 x) {
    const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
    const std::uint32_t rest = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
    if (rest >= 0x0f800000u) return std::bit_cast<float>(sign | rest | 0x7f800000u);  // infinity, NaN
    // Read as f32, the exponent is 112 too small; the product is exact and also right for subnormals.
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest) * 0x1p112f));
}

inline float to_float(f8 x) {
    const int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
    const float power = std::bit_cast<float>(static_cast<std::uint32_t>((exponent == 0 ? 1 : exponent) + 117) << 23);
    const float size = static_cast<float>(exponent == 0 ? mantissa : 8 + mantissa) * power;
    if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(0x7fc00000u);
    return (x.bits & 0x80) != 0 ? -size : size;
}

// Rounds an f64 to a 16-bit format with `mantissa` explicit bits; exponents as of f32 (bf16) or 5 bits (f16).
template <int mantissa, int max_exponent>
std::uint16_t round_to_16_bits(double x) {
    constexpr int bias = max_exponent;
    constexpr std::uint16_t infinity = static_cast<std::uint16_t>((2 * bias + 1) << mantissa);
    const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
    const auto sign = static_cast<std::uint16_t>(bits >> 63 << 15);
    const std::uint64_t magnitude = bits & ~(std::uint64_t{1} << 63);
    if (magnitude > 0x7ff0000000000000u) return static_cast<std::uint16_t>(sign | infinity | (1u << (mantissa - 1)));
    const int exponent = static_cast<int>(magnitude >> 52) - 1023;
    if (exponent > max_exponent) return static_cast<std::uint16_t>(sign | infinity);
    const bool subnormal = exponent < 1 - bias;
    const int shift = 52 - mantissa + (subnormal ? (1 - bias) - exponent : 0);
    if (shift > 54) return sign;
    const std::uint64_t significand = (magnitude & 0xfffffffffffffu) | (std::uint64_t{1} << 52);
    const std::uint64_t half = std::uint64_t{1} << (shift - 1);
    const std::uint64_t kept = significand >> shift;
    const std::uint64_t lost = significand & (2 * half - 1);
    const std::uint64_t up = lost > half || (lost == half && (kept & 1)) ? 1 : 0;
    const std::uint64_t lead = subnormal ? 0 : static_cast<std::uint64_t>(exponent + bias - 1) << mantissa;
    return static_cast<std::uint16_t>(sign | (lead + kept + up));  // a carry runs into the exponent, and to infinity
}

inline bf16 to_bf16(double x) {
    return {round_to_16_bits<7, 127>(x)};
}
inline f16 to_f16(double x) {
    return {round_to_16_bits<10, 15>(x)};
}

// Nearest even; what is beyond 464, half a step above the largest number, is NaN.
inline f8 to_f8(double x) {
    const auto sign = static_cast<std::uint8_t>(std::signbit(x) ? 0x80 : 0);
    const double size = std::abs(x);
    if (!(size <= 464)) return {static_cast<std::uint8_t>(sign | 0x7f)};
    const int exponent = size < 0x1p-6 ? -6 : std::ilogb(size);
    const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));  // 8 to 16, or subnormal
    return {static_cast<std::uint8_t>(sign | (steps < 8 ? steps : ((exponent + 7) << 3) + steps - 8))};
}

}  // namespace softdelta::core
