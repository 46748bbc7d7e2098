// Exponentials in fixed point of 16 bits, for probabilities that are rounded to bf16 anyway. An exponent of 2 has 8
// bits before and 8 behind the point. With the exponent's bias these are a float's first 16 bits, had 2^f the mantissa
// f. So a correction is subtracted, and half of the rest are the bits of bf16. The error is 2.0e-3 RMS, 5e-5 on
// average, where rounding errs by 1.7e-3.
#pragma once

#include <array>
#include <cstdint>

namespace softdelta::kernels::sixteen_bits {

inline constexpr int one = 256;            // of an exponent
inline constexpr int bias = 127 * one;     // of 2^0
inline constexpr float magic = 0x1.8p23F;  // its sum with a smaller number ends with that number, rounded to whole
inline constexpr int magic_bits = 0x4b400000;
inline constexpr float largest = 0x1p21F;  // exponents and bases in these units: their sums with magic stay above 0

// Where key k of 32 lies among its 32 numbers of 16 bits, and which lies there: instructions that make these of 16 and
// 16 numbers of 32 bits put four of the first before four of the others.
constexpr int place(int k) {
    return k / 4 % 4 * 8 + k / 16 * 4 + k % 4;
}
constexpr int key_at(int place) {
    return place / 4 % 2 * 16 + place / 8 * 4 + place % 4;
}

constexpr double power_of_two(double x) {  // 0 ≤ x < 1, by its series
    double sum = 1, term = 1;
    for (int i = 1; i < 30; ++i) sum += term *= x * 0.69314718055994531 / i;
    return sum;
}

// What is subtracted where the first six bits behind the point are j: the best for all fractions that begin so.
constexpr std::array<std::uint8_t, 64> best_corrections() {
    std::array<std::uint8_t, 64> best{};
    for (int j = 0; j < 64; ++j) {
        double least = 1;
        for (int c = 0; c <= 30; ++c) {
            double squares = 0;
            for (int f = 4 * j; f < 4 * j + 4; ++f) {
                const int half = (one + f - c) >> 1;  // below 128: of the binade before
                const double value = half >= 128 ? half / 128.0 : (half + 128) / 256.0;
                const double error = value / power_of_two(f / 256.0) - 1;
                squares += error * error;
            }
            if (squares >= least) continue;
            least = squares;
            best[static_cast<std::size_t>(j)] = static_cast<std::uint8_t>(c);
        }
    }
    return best;
}
alignas(64) inline constexpr std::array<std::uint8_t, 64> corrections = best_corrections();

}  // namespace softdelta::kernels::sixteen_bits
