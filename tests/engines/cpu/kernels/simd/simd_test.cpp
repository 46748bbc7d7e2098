// Vectors: exponentials, conversions, transposes and reductions against the standard library and core/dtype.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "engines/cpu/kernels/simd/sixteen_bits.h"
#include "engines/cpu/kernels/tiles.h"

namespace softdelta::test {
namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

template <class Function>
float in_first_lane(const Function& f, float x) {
    float out[W];
    store(out, f(splat(x)));
    for (const float y : out) EXPECT_EQ(std::memcmp(&y, out, sizeof y), 0) << "lanes differ at " << x;
    return out[0];
}

std::uint32_t bits(float x) {
    return std::bit_cast<std::uint32_t>(x);
}

// Errors in ulp of f32, subnormals included.
double ulps(float actual, double exact) {
    const double size = std::max(std::abs(exact), 0x1p-126);
    return std::abs(static_cast<double>(actual) - exact) / std::exp2(std::floor(std::log2(size)) - 23);
}

TEST(Simd, Exp2IsAccurate) {
    const auto f = [](F x) { return exp2(x); };
    const float least = exp2_has_subnormals ? -152 : -126;
    for (float x = -152; x < least; x += 0.0007F)
        ASSERT_LE(std::abs(in_first_lane(f, x) - std::exp2(static_cast<double>(x))), 0x1p-127) << x;
    for (float x = least; x <= 127; x += 0.0007F)
        ASSERT_LE(ulps(in_first_lane(f, x), std::exp2(static_cast<double>(x))), fma_rounds_once ? 1 : 1.5) << x;
    for (const float x : {0.0F, -0.0F, 1e-30F, -1e-30F, 127.0F, -126.0F, -149.0F})
        if (x >= least) {
            EXPECT_EQ(in_first_lane(f, x), static_cast<float>(std::exp2(static_cast<double>(x)))) << x;
        }
    for (const float x : {-151.0F, -200.0F, -1e4F, -1e30F, -inf}) EXPECT_EQ(bits(in_first_lane(f, x)), 0u) << x;
    EXPECT_TRUE(std::isnan(in_first_lane(f, nan)));
}

// Beyond the exponents of f32 there is 0 or ∞, never a number that wrapped around.
TEST(Simd, ExponentialsSaturate) {
    const auto exp2_of = [](F x) { return exp2(x); };
    const auto exp_of = [](F x) { return exp(x); };
    const auto exp_of_sum_of = [](F x) { return exp_of_sum(x, splat(0.0F)); };
    for (float x = 127; x < 128; x += 0.001F)
        ASSERT_LE(ulps(in_first_lane(exp2_of, x), std::exp2(static_cast<double>(x))), fma_rounds_once ? 1 : 1.5) << x;
    for (float x = 80; x < 88.7F; x += 0.01F)
        ASSERT_LE(ulps(in_first_lane(exp_of_sum_of, x), std::exp(static_cast<double>(x))), 2) << x;
    for (const float x : {128.0F, 129.0F, 180.0F, 200.0F, 201.0F, 254.5F, 400.0F, 1e4F, 1e10F, 3e38F, inf}) {
        EXPECT_EQ(in_first_lane(exp2_of, x), inf) << x;
        EXPECT_EQ(in_first_lane(exp_of, x), inf) << x;
        EXPECT_EQ(in_first_lane(exp_of_sum_of, x), inf) << x;
        EXPECT_EQ(bits(in_first_lane(exp_of, -x)), 0u) << x;
        EXPECT_EQ(bits(in_first_lane(exp_of_sum_of, -x)), 0u) << x;
    }
    EXPECT_TRUE(std::isnan(in_first_lane(exp_of, nan)));
    EXPECT_TRUE(std::isnan(in_first_lane(exp_of_sum_of, nan)));
}

TEST(Simd, ExpAndTanhAreAccurate) {
    const auto tanh_of = [](F x) { return tanh(x); };
    const auto exp_of = [](F x) { return exp(x); };
    for (float x = -20; x <= 20; x += 0.00013F) {
        ASSERT_LE(ulps(in_first_lane(tanh_of, x), std::tanh(static_cast<double>(x))), 2) << x;
        // x·log2 e is rounded once: an error of half a unit of it
        ASSERT_LE(ulps(in_first_lane(exp_of, x), std::exp(static_cast<double>(x))), 2 + 2 * std::abs(x)) << x;
    }
    const auto of_sum = [](F x) { return exponentials_of_sum(x, splat(0.0F)).of_sum; };
    const auto of_negative = [](F x) { return exponentials_of_sum(x, splat(0.0F)).of_negative; };
    for (float x = -80; x <= 80; x += 0.0013F) {
        const auto exact = static_cast<double>(x);
        ASSERT_LE(ulps(in_first_lane(of_sum, x), std::exp(exact)), 3) << x;
        ASSERT_LE(ulps(in_first_lane(of_negative, x), std::exp(-exact)), 3) << x;
    }
    EXPECT_TRUE(std::isnan(in_first_lane(of_sum, nan)));
    EXPECT_TRUE(std::isnan(in_first_lane(of_negative, nan)));
    for (const float x : {1e-38F, -1e-20F, 1e-5F, -1e-3F})
        EXPECT_LE(ulps(in_first_lane(tanh_of, x), std::tanh(static_cast<double>(x))), 2) << x;
    EXPECT_EQ(bits(in_first_lane(tanh_of, 0.0F)), bits(0.0F));
    EXPECT_EQ(bits(in_first_lane(tanh_of, -0.0F)), bits(-0.0F));
    EXPECT_EQ(in_first_lane(tanh_of, inf), 1);
    EXPECT_EQ(in_first_lane(tanh_of, -1e30F), -1);
    EXPECT_TRUE(std::isnan(in_first_lane(tanh_of, nan)));
}

TEST(Simd, ReciprocalsForBf16) {
    const auto f = [](F x) { return reciprocal_for_bf16(x); };
    for (float x = 1; x > 0x1p-90F; x *= 0.973F) ASSERT_NEAR(in_first_lane(f, x) * x, 1, 0x1p-13F) << x;
}

TEST(Simd, FmaRoundsAsItSays) {
    const float x = 1 + 0x1p-12F, exact = 0x1p-24F;  // x² = 1 + 2^-11 + 2^-24
    const float rest = in_first_lane([](F a) { return fma(a, a, splat(-1 - 0x1p-11F)); }, x);
    EXPECT_TRUE(rest == exact || (!fma_rounds_once && rest == 0)) << rest;
}

template <class T>
void expect_all_are_loaded() {
    std::vector<T> all(1 << 16);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = T{static_cast<std::uint16_t>(i)};
    for (std::size_t i = 0; i < all.size(); i += W) {
        float out[W];
        store(out, load(all.data() + i));
        for (std::size_t l = 0; l < W; ++l) {
            const float exact = core::to_float(all[i + l]);
            if (std::isnan(exact))
                EXPECT_TRUE(std::isnan(out[l])) << i + l;
            else
                EXPECT_EQ(bits(out[l]), bits(exact)) << i + l;
        }
    }
}

// Numbers around every number of a 16-bit type and every midpoint between two.
std::vector<float> hard_to_round() {
    std::vector<float> all{0.0F, -0.0F, inf, -inf, nan, 3.4e38F, -3.4e38F, 65519.0F, 65520.0F, 1e-40F, 0x1p-25F};
    for (std::uint32_t upper = 0; upper < (1u << 16); ++upper)
        for (const std::uint32_t lower : {0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
            all.push_back(std::bit_cast<float>(upper << 16 | lower));
    all.resize(all.size() / W * W);
    return all;
}

template <class T>
void expect_rounding_to_nearest() {
    const std::vector<float> all = hard_to_round();
    for (std::size_t i = 0; i < all.size(); i += W) {
        T out[W];
        store(out, load(all.data() + i));
        for (std::size_t l = 0; l < W; ++l) {
            const float x = all[i + l];
            if (std::isnan(x))
                ASSERT_TRUE(std::isnan(core::to_float(out[l])));
            else
                ASSERT_EQ(out[l].bits, to_stored<T>(static_cast<double>(x)).bits) << x;
        }
    }
}

TEST(Simd, StorageTypesAreConvertedExactly) {
    expect_all_are_loaded<core::bf16>();
    expect_all_are_loaded<core::f16>();
    expect_rounding_to_nearest<core::bf16>();
    expect_rounding_to_nearest<core::f16>();
}

TEST(Simd, PairsAreRoundedToNearest) {
    const std::vector<float> all = hard_to_round();
    const auto expect_rounded = [](std::uint16_t actual, float x) {
        if (std::isnan(x)) {
            ASSERT_TRUE(std::isnan(core::to_float(core::bf16{actual})));
        } else if (std::abs(x) < 0x1p-126F && actual != core::to_bf16(static_cast<double>(x)).bits) {
            ASSERT_EQ(actual & 0x7fffu, 0u) << x;  // bf16 instructions take subnormals for 0
        } else {
            ASSERT_EQ(actual, core::to_bf16(static_cast<double>(x)).bits) << x;
        }
    };
    for (std::size_t i = 0; i + 2 * W <= all.size(); i += W) {
        std::uint32_t words[W], row[W];
        store(words, bf16_pairs(load(all.data() + i), load(all.data() + i + W)));
        store_bf16(row, load(all.data() + i));
        for (std::size_t l = 0; l < W; ++l) {
            expect_rounded(static_cast<std::uint16_t>(words[l]), all[i + l]);
            expect_rounded(static_cast<std::uint16_t>(words[l] >> 16), all[i + W + l]);
            std::uint16_t in_row = 0;
            std::memcpy(&in_row, reinterpret_cast<const char*>(row) + 2 * l, 2);
            expect_rounded(in_row, all[i + l]);
        }
    }
}

TEST(Simd, PartsReadAndWriteNothingElse) {
    for_each_type([](auto type) {
        using T = decltype(type);
        for (Index n = 0; n <= W; ++n) {
            const Buffer<T> in(n), out(n);
            for (Index i = 0; i < n; ++i) in[i] = to_stored<T>(static_cast<double>(i + 1));
            float all[W];
            store(all, load_partial(in.data(), n));
            for (Index i = 0; i < W; ++i) EXPECT_EQ(all[i], i < n ? static_cast<float>(i + 1) : 0.0F);
            store_partial(out.data(), load(all), n);
            for (Index i = 0; i < n; ++i) EXPECT_EQ(to_f32(out[i]), static_cast<float>(i + 1));
        }
    });
}

TEST(Simd, BytesAreFlags) {
    for (unsigned pattern = 0; pattern < (1u << std::min<Index>(W, 10)); ++pattern) {
        const Buffer<std::uint8_t> bytes(W);
        for (Index i = 0; i < W; ++i)
            bytes[i] = (pattern >> (i % 10)) % 2 == 0 ? 0 : static_cast<std::uint8_t>(1 + i * 37);
        float out[W];
        store(out, vectors::select(nonzero_bytes(bytes.data()), splat(1.0F), splat(0.0F)));
        for (Index i = 0; i < W; ++i) ASSERT_EQ(out[i], bytes[i] != 0 ? 1.0F : 0.0F);
    }
}

TEST(Simd, LanesComeFromApart) {
    const float four[4] = {3, -1, 0.5F, 7};
    float out[W];
    store(out, splat_four(four));
    for (Index i = 0; i < W; ++i) EXPECT_EQ(out[i], four[i % 4]);
    store(out, lanes_of([](Index i) { return static_cast<float>(10 - i); }));
    for (Index i = 0; i < W; ++i) EXPECT_EQ(out[i], static_cast<float>(10 - i));
    for (std::uint32_t first = 0; first < (1u << 16); first += W) {
        store(out, lanes_of_f16([&](Index i) { return static_cast<std::uint16_t>(first + i); }));
        for (Index i = 0; i < W; ++i) {
            const float exact = core::to_float(core::f16{static_cast<std::uint16_t>(first + i)});
            if (std::isnan(exact)) continue;
            ASSERT_EQ(bits(out[i]), bits(exact)) << first + i;
        }
    }
}

TEST(Simd, HalvesAreTheLowestFourBits) {
    for (std::uint32_t first = 0; first < 256; first += W) {
        std::uint32_t words[W];
        for (Index i = 0; i < W; ++i) words[i] = first + static_cast<std::uint32_t>(i);
        float out[W];
        store(out, halves_to_floats(load(words)));
        for (Index i = 0; i < W; ++i) EXPECT_EQ(out[i], static_cast<float>(words[i] % 16) - 8);
    }
}

TEST(Simd, TransposeSwapsRowsAndColumns) {
    U rows[W];
    for (Index r = 0; r < W; ++r) {
        std::uint32_t row[W];
        for (Index c = 0; c < W; ++c) row[c] = static_cast<std::uint32_t>(1000 * r + c);
        rows[r] = load(row);
    }
    transpose(rows);
    for (Index r = 0; r < W; ++r) {
        std::uint32_t row[W];
        store(row, rows[r]);
        for (Index c = 0; c < W; ++c) ASSERT_EQ(row[c], 1000 * c + r);
    }
}

TEST(Simd, ReductionsTakeEveryLane) {
    std::mt19937_64 random(1);
    for (int repeat = 0; repeat < 200; ++repeat) {
        F rows[2][W];
        double sum_of[W], largest[W];
        for (Index r = 0; r < W; ++r) {
            float x[W];
            for (float& e : x) e = static_cast<float>(static_cast<int>(random() % 2000) - 1500);  // sums are exact
            rows[0][r] = rows[1][r] = load(x);
            sum_of[r] = 0, largest[r] = -1e9;
            for (const float e : x) {
                sum_of[r] += static_cast<double>(e);
                largest[r] = std::max(largest[r], static_cast<double>(e));
            }
            ASSERT_EQ(static_cast<double>(sum(load(x))), sum_of[r]);
            ASSERT_EQ(static_cast<double>(maximum(load(x))), largest[r]);
        }
        float totals[W], maxima_of[W];
        store(totals, row_sums(rows[0]));
        store(maxima_of, row_maxima(rows[1]));
        for (Index r = 0; r < W; ++r) {
            ASSERT_EQ(static_cast<double>(totals[r]), sum_of[r]);
            ASSERT_EQ(static_cast<double>(maxima_of[r]), largest[r]);
        }
    }
}

TEST(Simd, LanesCount) {
    float out[W];
    store(out, iota());
    for (Index i = 0; i < W; ++i) EXPECT_EQ(out[i], static_cast<float>(i));
}

// Exponentials of matrix tiles: 2^x of 2·W numbers.
template <class Tiles, bool bounded>
std::vector<float> exponentials_in_16_bits(const float* x) {
    const typename Tiles::Exponentials of(splat(kernels::sixteen_bits::one));
    const U pairs = of.template of<bounded>(load(x), load(x + W), splat(kernels::sixteen_bits::magic));
    std::uint32_t words[W];
    store(words, pairs);
    std::vector<float> p;
    for (int i = 0; i < 2 * W; ++i) {
        const int at = kernels::sixteen_bits::place(i);
        EXPECT_EQ(kernels::sixteen_bits::key_at(at), i);
        p.push_back(half_of(words[at / 2], at % 2));
    }
    double sums = 0;
    for (const float y : p) sums += static_cast<double>(y);
    if (std::isfinite(sums)) {
        EXPECT_NEAR(sum(of.add(pairs, splat(1.0F))), sums + W, 1e-4 * (sums + W));
    }
    return p;
}

template <class Tiles>
void check_exponentials_in_16_bits() {
    double squares = 0, total = 0, count = 0;
    float x[2 * W];
    for (int n = -4000; n < 8 * 4000; n += 2 * W) {
        for (int i = 0; i < 2 * W; ++i) x[i] = -0.001F * static_cast<float>(n + i);
        const std::vector<float> p = exponentials_in_16_bits<Tiles, true>(x);
        EXPECT_EQ(p, (exponentials_in_16_bits<Tiles, false>(x)));
        for (int i = 0; i < 2 * W; ++i) {
            const double error = static_cast<double>(p[static_cast<std::size_t>(i)]) / std::exp2(x[i]) - 1;
            ASSERT_LT(std::abs(error), 6.5e-3) << x[i];
            squares += error * error, total += error, ++count;
        }
    }
    EXPECT_LT(std::sqrt(squares / count), 2.1e-3);
    EXPECT_LT(std::abs(total / count), 1e-4);
    for (int i = 0; i < 2 * W; ++i) x[i] = static_cast<float>(i);
    std::uint32_t words[W];
    store(words, Tiles::Exponentials::round(load(x), load(x + W)));
    for (int i = 0; i < 2 * W; ++i) {
        const int at = kernels::sixteen_bits::place(i);
        EXPECT_EQ(half_of(words[at / 2], at % 2), x[i]);
    }
    const auto one = [&](float y) {
        for (float& e : x) e = y;
        return exponentials_in_16_bits<Tiles, false>(x)[0];
    };
    for (const float y : {-130.0F, -3e4F, -5e4F, -8e4F, -98303.0F, -98304.0F, -1e5F, -1e30F, -3.4e38F, -inf})
        EXPECT_LT(one(y), 0x1p-126F) << y;
    for (const float y : {200.0F, 1e5F, 1e30F, inf, nan, -nan}) EXPECT_FALSE(std::isfinite(one(y))) << y;
    EXPECT_EQ(one(0), 1);
    EXPECT_EQ(one(8), 256);
}

// Halves go apart in the order of place().
template <class Tiles>
void check_halves() {
    std::uint32_t words[2 * W], parts[2][W];
    for (std::uint32_t i = 0; i < 2 * W; ++i) words[i] = i | (1000 + i) << 16;
    U first, second;
    Tiles::separate(load(words), load(words + W), first, second);
    store(parts[0], first);
    store(parts[1], second);
    for (int i = 0; i < 2 * W; ++i) {
        const int at = kernels::sixteen_bits::place(i);
        EXPECT_EQ(parts[0][at / 2] >> at % 2 * 16 & 0xffff, static_cast<std::uint32_t>(i));
        EXPECT_EQ(parts[1][at / 2] >> at % 2 * 16 & 0xffff, static_cast<std::uint32_t>(1000 + i));
    }
}

template <class Tiles>
void check_tiles() {
    if constexpr (Tiles::exist) check_exponentials_in_16_bits<Tiles>(), check_halves<Tiles>();
}

TEST(Simd, ExponentialsAndHalvesOf16Bits) {
    check_tiles<MatrixTiles>();
}

}  // namespace
}  // namespace softdelta::test
