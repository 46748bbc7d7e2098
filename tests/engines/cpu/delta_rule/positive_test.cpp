// Gates that rise, in the fast delta rules: results are finite wherever all states and outputs of the f64 recurrence
// fit f32, and right where the state that e^g multiplies is small, or 0.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "support/fast_delta.h"
#include "support/levels.h"
#include "support/takes.h"

namespace softdelta::test {
namespace {

constexpr Rule all_rules[] = {
    Rule::delta_rule, Rule::gated_delta_rule, Rule::kda, Rule::comba, Rule::simple_gla, Rule::gla, Rule::gdn2};

Execution with(const std::string& engine) {
    Execution e;
    e.engine = engine;
    e.threads = 1;
    return e;
}

// One sequence of one head: keys of length one, β in (0, 1), gates (token, channel), an initial state of this size.
RandomDelta make_call(Rule rule, Index tokens, double state, const std::function<double(Index, Index)>& gate) {
    constexpr Index K = 24, V = 40;
    RandomDelta call;
    Random random(5);
    std::uniform_real_distribution<double> unit;
    call.seed = 5, call.sequences = 1, call.options.rule = rule;
    const auto normal = [&](const Shape& shape, double size) {
        Array a(DType::f32, shape);
        fill_normal(a, random);
        for (Index i = 0; i < a.count(); ++i) a.set(i, size * a.get(i));
        return a;
    };
    const double row = 1 / std::sqrt(static_cast<double>(K));
    call.q = normal({1, tokens, 1, K}, 1), call.k = normal({1, tokens, 1, K}, row);
    call.v = normal({1, tokens, 1, V}, 1);
    if (takes(call.rule(), "p")) call.p = normal({1, tokens, 1, K}, row);
    if (call.rule().erases()) {
        call.beta = Array(DType::f32, {1, tokens, 1});
        for (Index i = 0; i < tokens; ++i) call.beta.set(i, unit(random));
    }
    if (call.rule().gate != core::Gate::none) {
        const Index channels = call.rule().has_channel_gate() ? K : 1;
        call.g = Array(DType::f32, call.rule().has_channel_gate() ? Shape{1, tokens, 1, K} : Shape{1, tokens, 1});
        for (Index i = 0; i < call.g.count(); ++i) call.g.set(i, gate(i / channels, i % channels));
    }
    if (state > 0) call.initial_state = normal({1, 1, K, V}, state);
    call.d_o = normal({1, tokens, 1, V}, 1);
    call.dfinal_state = normal({1, 1, K, V}, 1);
    return call;
}

// Operands are of order 1; a result that is a small difference of such numbers counts as 0.1.
void expect_near(const Results& actual, const Results& truth, const std::string& what) {
    for (const auto& [name, array] : truth) {
        double error = 0, size = 0;
        for (Index i = 0; i < array.count(); ++i) {
            ASSERT_TRUE(std::isfinite(actual.at(name).get(i))) << name << '[' << i << "], " << what;
            error += std::pow(actual.at(name).get(i) - array.get(i), 2);
            size += std::pow(array.get(i), 2);
        }
        EXPECT_LE(std::sqrt(error), 1e-5 * std::max(std::sqrt(size), 0.1)) << name << ", " << what;
    }
}

// Results as the fast engine stores them, in f32.
Results fast_forward(const RandomDelta& call) {
    Results results;
    results["o"] = Array(DType::f32, call.o_shape());
    results["final_state"] = Array(DType::f32, call.state_shape());
    delta_forward(call.inputs(), {.o = results["o"].view(), .final_state = results["final_state"].view()}, call.options,
                  with("fast"));
    return results;
}

Results fast_backward(const RandomDelta& call) {
    Results results;
    DeltaGradients grad;
    grad.d_o = call.d_o.view(), grad.dfinal_state = call.dfinal_state.view();
    for (const DeltaOperand& operand : delta_operands()) {
        const Array& input = call.*operand.array;
        const bool state = operand.array == &RandomDelta::initial_state;
        if (!input.view() && !state) continue;
        const Shape shape =
            state ? call.state_shape() : Shape(input.view().shape().begin(), input.view().shape().end());
        Array& gradient = results[std::string("d") + operand.name] = Array(DType::f32, shape);
        grad.*operand.gradient = gradient.view();
    }
    delta_backward(call.inputs(), grad, call.options, with("fast"));
    return results;
}

// The first token has no state, or one that is as small as e^g is large.
TEST(DeltaPositiveGates, MultiplyStatesThatAreZeroOrSmall) {
    for_each_level([&](const std::string& level) {
        for (const Rule rule : all_rules)
            for (const Index tokens : {1, 2, 5, 70})
                for (const double g : {2.0, 60.0, 87.0, 89.0, 95.0, 128.0, 180.0, 200.0, 1e4}) {
                    const auto gate = [g](Index i, Index m) { return i == 0 ? g : -0.01 * static_cast<double>(m % 7); };
                    for (const double state : {0.0, std::exp(-g)}) {
                        if (state > 0 && state < 1e-37) continue;
                        const RandomDelta call = make_call(rule, tokens, state, gate);
                        const std::string what = level + ", rule " + std::to_string(static_cast<int>(rule)) + ", T " +
                                                 std::to_string(tokens) + ", g " + std::to_string(g) + ", state " +
                                                 std::to_string(state);
                        Results truth = forward_results(call, with("reference"));
                        truth.erase("states");
                        expect_near(fast_forward(call), truth, what);
                        Results gradients = backward_results(call, with("reference")), fast = fast_backward(call);
                        if (rule != Rule::delta_rule && g > 80) gradients.erase("dinitial_state");  // beyond f32
                        expect_near(fast, gradients, what);
                        if (HasFailure()) return;
                    }
                }
    });
}

// Decode on states that are 0, of any type and either order.
TEST(DeltaPositiveGates, InSteps) {
    for_each_level([&](const std::string& level) {
        for (const Rule rule : all_rules)
            for (const bool v_first : {false, true})
                for (const DType dtype : {DType::f32, DType::bf16})
                    for (const Index tokens : {1, 3, 8}) {
                        if (dtype != DType::f32 && tokens > 1) continue;
                        RandomDelta call =
                            make_call(rule, tokens, 0, [](Index i, Index) { return i == 0 ? 150 : 1.5; });
                        call.options.state_v_first = v_first;
                        const Array state(dtype, call.state_shape());
                        const Results truth = forward_results(call, with("reference"));
                        DeltaInputs in = call.inputs();
                        in.initial_state = state.view();
                        Results fast;
                        fast["o"] = Array(DType::f32, call.o_shape());
                        delta_forward(in, {.o = fast["o"].view(), .final_state = state.view()}, call.options,
                                      with("fast"));
                        Results o;
                        o["o"] = dense_copy(truth.at("o"));
                        expect_near(fast, o, level + ", rule " + std::to_string(static_cast<int>(rule)));
                        for (Index i = 0; i < state.count(); ++i)
                            ASSERT_NEAR(state.get(i), truth.at("final_state").get(i),
                                        1e-2 * (1 + std::abs(truth.at("final_state").get(i))));
                    }
    });
}

// Gates anywhere from −∞ to +200: finite up to the token at which a state or an output leaves f32.
std::string check_reach(const RandomDelta& call) {
    const Results fast = fast_forward(call), truth = forward_results(call, with("reference"));
    const Array &o = truth.at("o"), &states = truth.at("states"), &last = truth.at("final_state");
    const Index T = o.view().shape(1), HV = o.view().shape(2), V = o.view().shape(3);
    const auto fits = [](double x) { return std::abs(x) < 3e38; };
    for (Index b = 0; b < o.view().shape(0); ++b)
        for (Index h = 0; h < HV; ++h) {
            const Index size = last.count() / (call.sequences * HV);
            bool all_fit = true;
            for (Index t = 0; t < T && all_fit; ++t) {
                for (Index c = 0; c < V; ++c) all_fit = all_fit && fits(o.get({b, t, h, c}));
                for (Index i = 0; i < size; ++i)  // after the token
                    all_fit = all_fit && fits(t + 1 < T ? states.get(((b * T + t + 1) * HV + h) * size + i)
                                                        : last.get((b * HV + h) * size + i));
                for (Index c = 0; c < V && all_fit; ++c)
                    if (!std::isfinite(fast.at("o").get({b, t, h, c})))
                        return call.describe() + ": o[" + std::to_string(t) + "] of head " + std::to_string(h) +
                               " is not finite, expected " + std::to_string(o.get({b, t, h, c}));
            }
            for (Index i = 0; i < size && all_fit; ++i)
                if (!std::isfinite(fast.at("final_state").get((b * HV + h) * size + i)))
                    return call.describe() + ": final_state is not finite";
        }
    return "";
}

TEST(DeltaPositiveGates, AreFiniteWhereTheRecurrenceFits) {
    const auto draw = [](std::uint64_t seed) {
        DeltaRanges ranges{.batch = 2, .tokens = 75, .heads = 2, .group = 2, .key_channels = 20, .value_channels = 36};
        ranges.dtypes = {DType::f32};
        RandomDelta call;
        for (std::uint64_t at = seed * 64; !call.g.view() || call.cu_seqlens.view() || call.options.use_gate_in_kernel;
             ++at)
            call = draw_delta(at, ranges);
        call.options.state_interval = 1;
        Random random(seed);
        std::uniform_real_distribution<double> unit;
        const double rising = 0.3 * unit(random), wiping = 0.5 * unit(random), size = std::pow(10, -30 * unit(random));
        for (Index i = 0; i < call.g.count(); ++i) {
            const double x = unit(random), y = unit(random);
            call.g.set(i, x < rising            ? 200 * y
                          : x < rising + wiping ? (y < 0.3 ? -std::numeric_limits<double>::infinity() : -1e4 * y)
                                                : -3 * y);
        }
        for (Array* a : {&call.v, &call.initial_state})
            for (Index i = 0; i < a->count(); ++i) a->set(i, size * a->get(i));
        return call;
    };
    check_calls(call_count(100), draw, [](const RandomDelta& call, std::uint64_t) { return check_reach(call); });
}

}  // namespace
}  // namespace softdelta::test
