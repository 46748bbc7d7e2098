// Rows of a tensor against its elements one by one, and rounding of f32 against that of f64.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/rows.h"

namespace softdelta::core {
namespace {

// Every sign, exponent and 11 bits of the mantissa, with rests below, at and above half a unit of what they round to.
TEST(Rounding, OfFloatsIsThatOfDoubles) {
    for (std::uint32_t high = 0; high < 1u << 20; ++high)
        for (const std::uint32_t low : {0x000u, 0x001u, 0x7ffu, 0x800u, 0x801u, 0xfffu}) {
            const auto x = std::bit_cast<float>(high << 12 | low);
            ASSERT_EQ(round_to_bf16(x).bits, to_bf16(static_cast<double>(x)).bits) << x;
            ASSERT_EQ(round_to_f16(x).bits, to_f16(static_cast<double>(x)).bits) << x;
        }
}

TEST(Rounding, OfFloatsIsNearest) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    EXPECT_EQ(to_float(round_to_f16(65519.0F)), 65504);
    EXPECT_EQ(to_float(round_to_f16(65520.0F)), infinity);
    EXPECT_EQ(to_float(round_to_f16(-1e30F)), -infinity);
    EXPECT_EQ(to_float(round_to_f16(0x1p-25F)), 0);  // half of the smallest, to even
    EXPECT_EQ(to_float(round_to_f16(0x1.8p-25F)), 0x1p-24F);
    EXPECT_EQ(to_float(round_to_f16(-0x1p-14F)), -0x1p-14F);
    EXPECT_EQ(to_float(round_to_bf16(1 + 0x1p-8F)), 1);
    EXPECT_EQ(to_float(round_to_bf16(1 + 0x1.8p-8F)), 1 + 0x1p-7F);
    EXPECT_EQ(to_float(round_to_bf16(std::numeric_limits<float>::max())), infinity);
    for (std::uint32_t bits = 0; bits < 1u << 16; ++bits) {
        const bf16 b{static_cast<std::uint16_t>(bits)};
        const f16 h{static_cast<std::uint16_t>(bits)};
        ASSERT_EQ(std::bit_cast<std::uint32_t>(widen(h)), std::bit_cast<std::uint32_t>(to_float(h)));
        ASSERT_TRUE(std::isnan(to_float(b)) || round_to_bf16(to_float(b)).bits == bits) << bits;
        ASSERT_TRUE(std::isnan(to_float(h)) || round_to_f16(to_float(h)).bits == bits) << bits;
    }
}

template <class T>
void check_rows(DType type, Index step) {
    constexpr Index n = 37, begin = 3 * (n + 1);
    const auto values = [&](double scale) {
        std::vector<double> memory(2 * begin, 0);
        Tensor t;
        t.data = memory.data();
        t.dtype = type;
        t.rank = 1;
        t.shape[0] = n;
        t.stride[0] = step;
        for (Index i = 0; i < n; ++i) store(t, begin + i * step, scale * std::exp(static_cast<double>(i)));
        return std::pair(std::move(memory), t);
    };
    const auto [given, from] = values(-0.37);
    std::vector<T> row(n);
    read_row(from, begin, 0, n, row.data());
    for (Index i = 0; i < n; ++i)
        EXPECT_EQ(row[static_cast<std::size_t>(i)], static_cast<T>(load(from, begin + i * step)));

    const auto [zeros, to] = values(0);
    write_row(to, begin, 0, n, row.data());
    if (step == 0) return;
    const auto [expected, one_by_one] = values(0);
    for (Index i = 0; i < n; ++i)
        store(one_by_one, begin + i * step, static_cast<double>(row[static_cast<std::size_t>(i)]));
    EXPECT_EQ(zeros, expected);
}

TEST(Rows, AreTheirElements) {
    for (const DType type : {DType::f64, DType::f32, DType::bf16, DType::f16})
        for (const Index step : {1, 2, 0, -3}) {
            check_rows<float>(type, step);
            check_rows<double>(type, step);
        }
}

}  // namespace
}  // namespace softdelta::core
