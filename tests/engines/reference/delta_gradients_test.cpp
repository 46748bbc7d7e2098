// Gradients of the reference's delta rules against central differences of its forward pass, over random calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "engines/reference/reference_calls.h"
#include "support/random_delta.h"

namespace softdelta::test {
namespace {

// Results that the loss <o, do> + <final_state, dfinal_state> is made of, one product each.
std::vector<double> loss_terms(const RandomDelta& call) {
    const Results results = forward_results(call, reference_engine());
    std::vector<double> terms;
    const auto multiply = [&terms](const Array& x, const Array& dx) {
        for (Index i = 0; i < dx.count(); ++i) terms.push_back(x.get(i) * dx.get(i));
    };
    multiply(results.at("o"), call.d_o);
    multiply(results.at("final_state"), call.dfinal_state);
    return terms;
}

struct Slope {
    double value;
    double noise;  // what the rounding of the terms may add to it
};

// The derivative of the loss by one element, error O(step⁴); terms that it does not touch cancel exactly.
Slope central_difference(const RandomDelta& call, const Array& input, Index element) {
    constexpr double weights[] = {1, -8, 8, -1};
    const double step = 1e-3 / (1 + 0.05 * static_cast<double>(call.v.view().shape(1)));  // gates multiply over tokens
    constexpr int steps[] = {-2, -1, 1, 2};
    const double at = input.get(element);
    std::vector<double> slopes;
    double largest = 0;
    for (int i = 0; i < 4; ++i) {
        input.set(element, at + steps[i] * step);
        const std::vector<double> terms = loss_terms(call);
        slopes.resize(terms.size());
        for (std::size_t j = 0; j < terms.size(); ++j) {
            slopes[j] += weights[i] * terms[j];
            largest = std::max(largest, std::abs(terms[j]));
        }
    }
    input.set(element, at);
    double sum = 0;
    for (const double slope : slopes) sum += slope;
    return {sum / (12 * step), largest * 1e-14 / step};
}

// All elements of an input, or some of many.
std::vector<Index> elements_to_check(const Array& input, Random& random) {
    constexpr Index most = 20;
    std::vector<Index> elements;
    for (Index i = 0; i < std::min(input.count(), most); ++i)
        elements.push_back(input.count() <= most ? i
                                                 : std::uniform_int_distribution<Index>(0, input.count() - 1)(random));
    return elements;
}

void check_gradients(const RandomDelta& call, std::map<std::string, int>& drawn) {
    Random random(call.seed);
    const Results gradients = backward_results(call, reference_engine());
    for (const DeltaOperand& operand : delta_operands()) {
        const Array& input = call.*operand.array;
        if (!input.view()) continue;
        const std::string name = std::string("d") + operand.name;
        const Array& gradient = gradients.at(name);
        double error = 0, size = 0, noise = 0;
        for (const Index i : elements_to_check(input, random)) {
            const Slope slope = central_difference(call, input, i);
            ASSERT_TRUE(std::isfinite(gradient.get(i))) << name << '[' << i << ']';
            error += std::pow(gradient.get(i) - slope.value, 2);
            size += std::pow(slope.value, 2);
            noise += std::pow(slope.noise, 2);
        }
        ASSERT_LE(std::sqrt(error), 1e-6 * std::sqrt(size) + std::sqrt(noise)) << name;
        drawn[name] += size > 0;
    }
    for (const std::string& feature : call.features) {
        ++drawn[feature];
        ++drawn[call.features.front() + " with " + feature];
    }
}

TEST(DeltaGradients, EqualCentralDifferences) {
    constexpr int draws = 800;
    const std::uint64_t seed = first_seed();
    std::map<std::string, int> drawn;
    for (std::uint64_t n = 0; n < draws; ++n) {
        DeltaRanges ranges;
        ranges.tiled = ranges.steps = true;
        const RandomDelta call = draw_delta(seed + n, ranges);
        SCOPED_TRACE(call.describe());
        check_gradients(call, drawn);
        if (HasFatalFailure()) return;
    }
    for (const char* name :
         {"dq", "dk", "dp", "dv", "dg", "dg_gamma", "dbeta", "dinitial_state", "dA_log", "ddt_bias", "T = 0", "T = 1"})
        EXPECT_GE(drawn[name], 2) << name;
    const std::vector<std::string> everywhere{
        "scale",          "l2norm",  "state_v_first",         "grouped heads",  "tiled heads",   "packed",
        "empty sequence", "strided", "sequence of one token", "V other than K", "initial_state", "dfinal_state"};
    const std::vector<std::string> with_gate{"mild gate",   "zero gate",     "positive gate", "steep gate",
                                             "wiping gate", "softplus",      "lower bound",   "A_log with lower bound",
                                             "dt_bias",     "saturated gate"};
    const std::vector<std::string> with_beta{"no beta", "beta logits", "doubled beta", "saturated beta", "beta = 0"};
    const auto expect_drawn = [&drawn](const std::string& rule, const std::vector<std::string>& features) {
        for (const std::string& feature : features)
            EXPECT_GE(drawn[rule + " with " + feature], 1) << rule << " with " << feature;
    };
    for (const core::Rule& rule : core::rules) {
        const std::string name(rule.name);
        expect_drawn(name, everywhere);
        if (rule.gate != core::Gate::none) expect_drawn(name, with_gate);
        if (rule.erases()) expect_drawn(name, with_beta);
    }
    expect_drawn("simple_gla", {"no gate", "g_gamma"});
}

// Rules by their facts: every combination.
TEST(DeltaGradients, OfFactsEqualCentralDifferences) {
    const std::uint64_t seed = first_seed();
    std::map<std::string, int> drawn;
    for (std::uint64_t n = 0; n < 10 * core::rules_of_facts.size(); ++n) {
        DeltaRanges ranges;
        ranges.facts = ranges.steps = true;
        const RandomDelta call = draw_delta(seed + n, ranges);
        SCOPED_TRACE(call.describe());
        check_gradients(call, drawn);
        if (HasFatalFailure()) return;
    }
    for (const core::Rule& rule : core::rules_of_facts) EXPECT_GE(drawn[std::string(rule.name)], 8) << rule.name;
}

// Sequences beyond one segment of the backward pass and states beyond one tile of columns.
TEST(DeltaGradients, EqualCentralDifferencesForLongSequences) {
    constexpr int draws = 15;
    DeltaRanges ranges;
    ranges.shortest = 63, ranges.tokens = 300, ranges.batch = 1, ranges.heads = 1, ranges.group = 2;
    const std::uint64_t seed = first_seed();
    std::map<std::string, int> drawn;
    for (std::uint64_t n = 0; n < draws; ++n) {
        const RandomDelta call = draw_delta(seed + n, ranges);
        SCOPED_TRACE(call.describe());
        check_gradients(call, drawn);
        if (HasFatalFailure()) return;
    }
}

}  // namespace
}  // namespace softdelta::test
