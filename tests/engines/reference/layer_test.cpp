// The reference's causal convolution and gated norm: by the formula, written out; gradients by central differences; a
// sequence in parts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/random_layer.h"

namespace softdelta::test {
namespace {

double gate(Activation activation, double x) {
    const double sigmoid = 1 / (1 + std::exp(-x));
    return activation == Activation::none ? 1 : activation == Activation::silu ? x * sigmoid : sigmoid;
}

TEST(LayerReference, ConvolutionIsItsFormula) {
    for (std::uint64_t seed = first_seed(), end = seed + 300; seed < end; ++seed) {
        const LayerCall<Convolution> call = draw_convolution(seed, {.repeats = true});
        const NumbersByName results = truth(call, {"y", "final_state"}, false);
        const Array &x = call["x"], &weight = call["weight"];
        const Index T = x.view().shape(1), C = x.view().shape(2), W = weight.view().shape(1), S = call.state_shape[2];
        for (Index n = 0; n < call.state_shape[0]; ++n) {
            const bool packed = call.has("cu_seqlens");
            const Index begin = packed ? static_cast<Index>(call["cu_seqlens"].get(n)) : 0;
            const Index count = packed ? static_cast<Index>(call["cu_seqlens"].get(n + 1)) - begin : T;
            const Index batch = packed ? 0 : n;
            for (Index c = 0; c < C; ++c) {
                const auto token = [&](Index t) {
                    if (t >= 0) return x.get({batch, begin + t, c});
                    return call.has("initial_state") && S + t >= 0 ? call["initial_state"].get({n, c, S + t}) : 0.0;
                };
                for (Index t = 0; t < count; ++t) {
                    double z = call.has("bias") ? call["bias"].get(c) : 0;
                    for (Index i = 0; i < W; ++i) z += weight.get({c, i}) * token(t - W + 1 + i);
                    const double y = call.options.activation == Activation::silu ? gate(Activation::silu, z) : z;
                    ASSERT_NEAR(results.at("y")[static_cast<std::size_t>((batch * T + begin + t) * C + c)], y, 1e-12)
                        << call.describe();
                }
                for (Index j = 0; j < S; ++j)
                    ASSERT_EQ(results.at("final_state")[static_cast<std::size_t>((n * C + c) * S + j)],
                              token(count - S + j))
                        << call.describe();
            }
        }
    }
}

TEST(LayerReference, NormIsItsFormula) {
    for (std::uint64_t seed = first_seed(), end = seed + 200; seed < end; ++seed) {
        const LayerCall<Norm> call = draw_norm(seed, {.row_sizes = true, .repeats = true});
        const Numbers y = truth(call, {"y"}, false).at("y"), x = call["x"].values();
        const Index D = call["x"].view().shape(3);
        for (std::size_t i = 0; i < y.size(); ++i) {
            const auto at = static_cast<Index>(i), row = at / D * D;
            double squares = 0;
            for (Index d = 0; d < D; ++d) squares += std::pow(x[static_cast<std::size_t>(row + d)], 2);
            const double n = x[i] / std::sqrt(squares / static_cast<double>(D) + call.options.epsilon);
            const double w = call.has("weight") ? call["weight"].get(at % D) : 1;
            const double z = call.has("z") ? call["z"].get(at) : 0;
            ASSERT_NEAR(y[i], w * n * gate(call.options.gate, z), 1e-12) << call.describe();
        }
    }
}

// <y, dy> + <final_state, dfinal_state>
template <class Family>
double loss(const LayerCall<Family>& call) {
    double sum = 0;
    const auto add = [&](const char* result, const char* gradient) {
        if (!call.has(gradient)) return;
        const Numbers numbers = truth(call, {result}, false).at(result);
        for (std::size_t i = 0; i < numbers.size(); ++i) sum += numbers[i] * call[gradient].get(static_cast<Index>(i));
    };
    add("y", "dy");
    add("final_state", "dfinal_state");
    return sum;
}

template <class Family>
void check_gradients(LayerCall<Family> call, std::vector<std::string> inputs) {
    inputs.erase(std::remove_if(inputs.begin(), inputs.end(), [&](const auto& name) { return !call.has(name); }),
                 inputs.end());
    std::vector<std::string> names;
    for (const std::string& name : inputs) names.push_back("d" + name);
    const NumbersByName gradients = truth(call, names, true);
    constexpr double step = 1e-3, weights[] = {1, -8, 8, -1};
    constexpr int steps[] = {-2, -1, 1, 2};
    Random random(call.seed);
    for (const std::string& name : inputs) {
        const Array& input = call[name];
        for (Index k = 0; k < std::min<Index>(input.count(), 12); ++k) {
            const Index i = std::uniform_int_distribution<Index>(0, input.count() - 1)(random);
            const double at = input.get(i);
            double slope = 0;
            for (int j = 0; j < 4; ++j) {
                input.set(i, at + steps[j] * step);
                slope += weights[j] * loss(call) / (12 * step);
            }
            input.set(i, at);
            const double gradient = gradients.at("d" + name)[static_cast<std::size_t>(i)];
            ASSERT_NEAR(gradient, slope, 1e-7 * (1 + std::abs(slope))) << "d" << name << ", " << call.describe();
        }
    }
}

TEST(LayerReference, ConvolutionGradientsEqualCentralDifferences) {
    for (std::uint64_t seed = first_seed(), end = seed + 200; seed < end; ++seed) {
        check_gradients(draw_convolution(seed), {"x", "weight", "bias", "initial_state"});
        if (HasFatalFailure()) return;
    }
}

TEST(LayerReference, NormGradientsEqualCentralDifferences) {
    for (std::uint64_t seed = first_seed(), end = seed + 200; seed < end; ++seed) {
        LayerCall<Norm> call = draw_norm(seed);
        call.options.epsilon = 0.3;  // else rows of one channel are their sign, which no difference sees
        check_gradients(std::move(call), {"x", "z", "weight"});
        if (HasFatalFailure()) return;
    }
}

}  // namespace
}  // namespace softdelta::test
