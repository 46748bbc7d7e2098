// Layers whose result is their operand itself: the same bits as apart, on every instruction set and by the reference.
#include <gtest/gtest.h>

#include <vector>

#include "support/array.h"
#include "support/levels.h"
#include "support/parts.h"

namespace softdelta::test {
namespace {

Array copy(const Array& a) {
    Array to(a.view().dtype(), {a.view().shape().begin(), a.view().shape().end()});
    for (Index i = 0; i < a.count(); ++i) to.set(i, a.get(i));
    return to;
}

void check_convolution(const Execution& execution, std::uint64_t seed, const std::string& where) {
    Random random(seed);
    const Index width = 1 + static_cast<Index>(random() % 8), C = 1 + static_cast<Index>(random() % 300);
    const Index T = static_cast<Index>(random() % 700), S = width - 1 + static_cast<Index>(random() % 3);
    constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f16};
    const DType dtype = dtypes[random() % 3];
    const bool packed = random() % 2 == 0, pool = random() % 2 == 0;
    const Index B = packed ? 1 : 3;
    Array x = random() % 2 == 0 ? Array(dtype, {B, T, C}) : Array(dtype, {B, T, C}, random);
    Array weight(DType::f32, {C, width}), state(random() % 2 == 0 ? DType::f32 : dtype, {pool ? 5 : 3, C, S});
    Array lengths(DType::i32, {4}), entries(DType::i32, {3});
    lengths.set(1, static_cast<double>(T / 3)), lengths.set(2, static_cast<double>(T / 3)),
        lengths.set(3, static_cast<double>(T));
    entries.set(0, 4), entries.set(1, random() % 2 == 0 ? -1 : 1), entries.set(2, 2);
    for (const Array* a : {&x, &weight, &state}) fill_normal(*a, random);
    const Array in_place = copy(x), apart_state = copy(state), y(dtype, {B, T, C});
    ConvolutionInputs in{.x = x.view(), .weight = weight.view(), .initial_state = apart_state.view()};
    if (packed) in.cu_seqlens = lengths.view();
    if (pool) in.state_indices = entries.view();
    const ConvolutionOptions options{random() % 2 == 0 ? Activation::silu : Activation::none};
    const auto final_state = [&](const Array& of) { return S > 0 ? of.view() : Tensor(); };
    causal_convolution_forward(in, {.y = y.view(), .final_state = final_state(apart_state)}, options, execution);
    in.x = in_place.view();
    in.initial_state = state.view();
    causal_convolution_forward(in, {.y = in_place.view(), .final_state = final_state(state)}, options, execution);
    const std::string what = where + ", seed " + std::to_string(seed) + ", " + std::to_string(C) + " channels, width " +
                             std::to_string(width) + ", " + std::to_string(T) + " tokens";
    ASSERT_EQ(first_difference(in_place, y), -1) << what;
    ASSERT_EQ(first_difference(state, apart_state), -1) << what;
}

void check_norm(const Execution& execution, std::uint64_t seed, const std::string& where) {
    Random random(seed);
    const DType dtype = random() % 2 == 0 ? DType::f32 : DType::bf16;
    const Shape shape{2, static_cast<Index>(random() % 40), 3, 1 + static_cast<Index>(random() % 200)};
    const Array x(dtype, shape), z(dtype, shape), y(dtype, shape);
    for (const Array* a : {&x, &z}) fill_normal(*a, random);
    gated_norm_forward({.x = x.view(), .z = z.view()}, {.y = y.view()}, {}, execution);
    const Array same_x = copy(x), same_z = copy(z);
    gated_norm_forward({.x = same_x.view(), .z = z.view()}, {.y = same_x.view()}, {}, execution);
    gated_norm_forward({.x = x.view(), .z = same_z.view()}, {.y = same_z.view()}, {}, execution);
    ASSERT_EQ(first_difference(same_x, y), -1) << where << ", seed " << seed;
    ASSERT_EQ(first_difference(same_z, y), -1) << where << ", seed " << seed;
}

void check_calls(const Execution& execution, int calls, const std::string& where) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(calls); ++seed) {
        check_convolution(execution, seed, where);
        check_norm(execution, seed, where);
        if (testing::Test::HasFatalFailure()) return;
    }
}

TEST(Layers, InPlace) {
    for_each_level([&](const std::string& level) {
        for (const int threads : {1, 4})
            check_calls({.engine = "fast", .threads = threads}, static_cast<int>(call_count(60)), level);
    });
    check_calls({.engine = "reference"}, 10, "reference");
}

TEST(Layers, ThatOverlapInPartAreRefused) {
    std::vector<float> memory(64, 1.0F);
    const Tensor x(memory.data(), DType::f32, {1, 4, 8}), y(memory.data() + 8, DType::f32, {1, 4, 8}),
        weight(memory.data() + 48, DType::f32, {8, 2});
    try {
        causal_convolution_forward({.x = x, .weight = weight}, {.y = y});
        FAIL();
    } catch (const std::invalid_argument& e) {
        EXPECT_STREQ(e.what(), "y: memory is shared with x, expected the same elements, or none of them");
    }
}

}  // namespace
}  // namespace softdelta::test
