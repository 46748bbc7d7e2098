// A rule is what its row of core::Rule says: every combination of facts, given to reference and kernels as they are.
// Neither the chunk scan nor its adjoint knows which rule it computes.
#include <gtest/gtest.h>

#include "core/rule_facts.h"
#include "support/levels.h"
#include "support/rule_call.h"

namespace softdelta::test {
namespace {

// Mild gates but for some of −1000. Of several steps a chunk ends within tokens.
RuleCall make_call(const Rule& rule, DType dtype, Index steps) {
    return RuleCall(rule, {steps == 1 ? 150 : 47, 2, 4, 36, 20, steps}, dtype, 1, [](Index, std::mt19937_64& random) {
        std::uniform_real_distribution<double> unit;
        return unit(random) < 0.02 ? -1000 : -unit(random);
    });
}

// Each with one step; and all that there are with three.
std::vector<std::pair<Rule, Index>> calls() {
    std::vector<std::pair<Rule, Index>> all;
    for (const Rule& rule : core::rules_of_facts) all.emplace_back(rule, 1);
    for (const Rule& rule : core::rules) all.emplace_back(rule, 3);
    return all;
}

TEST(DeltaNewRule, KernelsComputeItFromItsRowAlone) {
    for_each_level([](const std::string& level) {
        for (const auto& [rule, steps] : calls()) {
            SCOPED_TRACE(std::string(rule.name) + ", " + std::to_string(steps) + " steps, " + level);
            const RuleCall call = make_call(rule, DType::f32, steps);
            const NumbersByName outputs = call.fast_outputs(), gradients = call.fast_gradients();
            for (const auto& [name, truth] : call.true_outputs())
                EXPECT_LE(error_ratio(outputs.at(name), truth), 3e-6) << name;
            for (const auto& [name, truth] : call.true_gradients())
                EXPECT_LE(error_ratio(gradients.at(name), truth), 3e-6) << name;
        }
    });
}

// The recurrence's own gradients: the derivative of ⟨o, do⟩ + ⟨final_state, dfinal_state⟩ along a random direction.
TEST(DeltaNewRule, ReferenceHasItsGradients) {
    for (const auto& [rule, steps] : calls()) {
        SCOPED_TRACE(std::string(rule.name) + ", " + std::to_string(steps) + " steps");
        const RuleCall call = make_call(rule, DType::f64, steps);
        std::mt19937_64 random(2);
        std::normal_distribution<double> normal;
        NumbersByName at, along;
        for (const std::string& name : call.operands()) {
            at[name] = call.values(name);
            for (const double value : at[name]) along[name].push_back(value < -500 ? 0 : normal(random));
        }
        double analytic = 0;
        for (const auto& [name, gradient] : call.true_gradients())
            for (std::size_t i = 0; i < gradient.size(); ++i) analytic += gradient[i] * along[name.substr(1)][i];
        const auto loss = [&](double step) {
            for (const auto& [name, values] : at) {
                Numbers moved = values;
                for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += step * along[name][i];
                call.set(name, moved);
            }
            double sum = 0;
            for (const auto& [name, result] : call.true_outputs()) {
                const Numbers weight = call.values("d" + name);
                for (std::size_t i = 0; i < result.size(); ++i) sum += weight[i] * result[i];
            }
            return sum;
        };
        const double step = 1e-5;
        EXPECT_NEAR((loss(step) - loss(-step)) / (2 * step), analytic, 1e-6 * std::abs(analytic));
    }
}

}  // namespace
}  // namespace softdelta::test
