// The kernels' gradient of the gate at any steepness (docs/math.md, "The gradient of the gate"): the sum of spans that
// they return, and beside it the difference of q∘dq, p∘dp and k∘dk of their own dq, dp and dk. All other results keep
// their digits whatever the gate.
#include <gtest/gtest.h>

#include <cstdio>

#include "support/levels.h"
#include "support/rule_call.h"

namespace softdelta::test {
namespace {

constexpr RuleSizes sizes{256, 1, 1, 128, 128};
constexpr double largest_error = 3e-6;

double mild(std::mt19937_64& random) {
    return -std::uniform_real_distribution<double>()(random);
}

struct Pattern {
    const char* name;
    RuleCall::GateOf gate;
};
const Pattern patterns[] = {
    {"0 … −1", [](Index, std::mt19937_64& random) { return mild(random); }},
    {"all −5", [](Index, std::mt19937_64&) { return -5.0; }},
    {"all −10", [](Index, std::mt19937_64&) { return -10.0; }},
    {"all −20", [](Index, std::mt19937_64&) { return -20.0; }},
    {"half at −1000", [](Index i, std::mt19937_64& random) { return i % 2 ? -1000.0 : mild(random); }},
};

// The same call with p beside k, so that what dk has from erasing comes apart.
RuleCall with_own_p(const Rule& rule, const Pattern& pattern) {
    Rule other = rule;
    other.own_p = other.erase != Erase::nothing;
    const RuleCall call(rule, sizes, DType::f32, 1, pattern.gate);
    RuleCall same(other, sizes, DType::f32, 1, pattern.gate);
    for (const char* name : {"q", "k", "v", "g", "initial_state", "do", "dfinal_state"})
        same.set(name, call.values(name));
    if (other.own_p) {
        same.set("beta", call.values("beta"));
        same.set("p", call.values(rule.own_p ? "p" : "k"));
    }
    return same;
}

// Σ from the last token to this one of q∘dq + p∘dp − k∘dk, after the final state's own; from f32 results.
Numbers difference_form(const RuleCall& call) {
    const NumbersByName d = call.fast_gradients();
    const Numbers q = call.values("q"), k = call.values("k"), S = call.fast_outputs().at("final_state");
    const bool erases = call.rule().erase != Erase::nothing;
    const Numbers p = erases ? call.values("p") : Numbers(q.size(), 0.0);
    const Numbers dp = erases ? d.at("dp") : Numbers(q.size(), 0.0), dS = call.values("dfinal_state");
    const bool from_previous = call.rule().erase == Erase::from_previous_state;
    const bool channels = call.rule().gate == Gate::channel;
    const auto K = static_cast<std::size_t>(sizes.keys), V = static_cast<std::size_t>(sizes.values);
    const auto T = static_cast<std::size_t>(sizes.tokens);
    Numbers dg(channels ? T * K : T, 0.0);
    for (std::size_t m = 0; m < K; ++m) {
        double sum = 0;
        for (std::size_t c = 0; c < V; ++c) sum += S[m * V + c] * dS[m * V + c];
        for (std::size_t t = T; t-- > 0;) {
            const std::size_t i = t * K + m;
            sum += q[i] * d.at("dq")[i] - k[i] * d.at("dk")[i];
            if (!from_previous) sum += p[i] * dp[i];
            dg[channels ? i : t] += sum;
            if (from_previous) sum += p[i] * dp[i];
        }
    }
    return dg;
}

// dA_log of a softplus gate with as many values as there are
double dA_log_of(const Numbers& dg, const Numbers& g) {
    double sum = 0;
    for (std::size_t i = 0; i < dg.size(); ++i) sum += dg[i] * g[i];
    return sum;
}

TEST(DeltaGateGradient, KeepsItsDigitsAtAnySteepness) {
    std::printf("| rule, gates | dg: difference | spans | dA_log: difference | spans | worst other result |\n");
    for (const core::Rule& rule : core::rules) {
        if (rule.gate == Gate::none) continue;
        for (const Pattern& pattern : patterns) {
            SCOPED_TRACE(std::string(rule.name) + ", " + pattern.name);
            const RuleCall call(rule, sizes, DType::f32, 1, pattern.gate), apart = with_own_p(rule, pattern);
            const NumbersByName true_outputs = call.true_outputs(), true_gradients = call.true_gradients();
            const Numbers& dg = true_gradients.at("dg");
            const Numbers g = call.values("g");
            const double dA_log = dA_log_of(dg, g);
            char row[200] = "";  // of the last level
            for_each_level([&](const std::string& level) {
                SCOPED_TRACE(level);
                double others = 0;
                const NumbersByName outputs = call.fast_outputs(), gradients = call.fast_gradients();
                for (const auto& [name, truth] : true_outputs)
                    others = std::max(others, error_ratio(outputs.at(name), truth));
                for (const auto& [name, truth] : true_gradients)
                    if (name != "dg") others = std::max(others, error_ratio(gradients.at(name), truth));
                EXPECT_LE(others, largest_error);
                const double spans = error_ratio(gradients.at("dg"), dg);
                EXPECT_LE(spans, largest_error);
                const Numbers difference = difference_form(apart);
                std::snprintf(row, sizeof row, "| %s, %s | %.0e | %.0e | %.0e | %.0e | %.0e |", rule.name.data(),
                              pattern.name, error_ratio(difference, dg), spans,
                              std::abs(dA_log_of(difference, g) / dA_log - 1),
                              std::abs(dA_log_of(gradients.at("dg"), g) / dA_log - 1), others);
            });
            std::printf("%s\n", row);
        }
    }
}

}  // namespace
}  // namespace softdelta::test
