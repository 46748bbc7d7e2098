// The fast convolution and norm on every level against the reference, over drawn calls: types, layouts, widths, tails,
// packed and empty sequences, states in pools, elements that are not finite; beside unreadable pages.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include "support/levels.h"
#include "support/random_layer.h"

namespace softdelta::test {
namespace {

template <class Draw>
void check(Index count, const Draw& draw, bool backward) {
    check_calls(
        call_count(count), [&](std::uint64_t seed) { return draw(seed, backward); },
        [&](const auto& call, std::uint64_t seed) {
            return check_call(call, backward, fast_layer_ranges(seed).dtypes);
        });
}

LayerCall<Convolution> convolution(std::uint64_t seed, bool backward) {
    LayerRanges ranges = fast_layer_ranges(seed);
    if (backward) ranges.pools = false;
    return draw_convolution(seed, ranges);
}
LayerCall<Norm> norm(std::uint64_t seed, bool /*backward*/) {
    return draw_norm(seed, fast_layer_ranges(seed));
}

TEST(LayerFast, ConvolutionForward) {
    check(500, convolution, false);
}
TEST(LayerFast, ConvolutionBackward) {
    check(350, convolution, true);
}
TEST(LayerFast, NormForward) {
    check(150, norm, false);
}
TEST(LayerFast, NormBackward) {
    check(150, norm, true);
}

// Without an epsilon the norm of a row is 1, however small its numbers are.
TEST(LayerFast, NormOfSubnormalRows) {
    for_each_level([](const std::string& level) {
        for (const float size : {1e-40F, 1e-20F, 1.0F, 1e20F, 2e38F}) {
            std::vector<float> x(48), y(48);
            for (std::size_t i = 0; i < x.size(); ++i) x[i] = i % 3 == 0 ? size : -size;
            Execution execution;
            execution.engine = "fast";
            gated_norm_forward({.x = Tensor(x.data(), DType::f32, {1, 1, 1, 48})},
                               {.y = Tensor(y.data(), DType::f32, {1, 1, 1, 48})},
                               {.gate = Activation::none, .epsilon = 0}, execution);
            for (std::size_t i = 0; i < y.size(); ++i)
                EXPECT_NEAR(y[i], i % 3 == 0 ? 1 : -1, 1e-6) << level << ", " << size;
        }
    });
}

}  // namespace
}  // namespace softdelta::test
