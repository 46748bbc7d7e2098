// The reference's delta rules at their edges: no tokens, nothing to write, states that are wiped, saturated and
// infinite gates, a pool of states in place.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "engines/reference/reference_calls.h"
#include "support/random_delta.h"

namespace softdelta::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

void expect_finite(const Results& results) {
    for (const auto& [name, a] : results)
        for (Index i = 0; i < a.count(); ++i) ASSERT_TRUE(std::isfinite(a.get(i))) << name << '[' << i << ']';
}

void expect_all(const Array& a, double x) {
    for (Index i = 0; i < a.count(); ++i) ASSERT_EQ(a.get(i), x) << i;
}

void fill(const Array& a, double x) {
    for (Index i = 0; i < a.count(); ++i) a.set(i, x);
}

TEST(DeltaEdges, HasFiniteGradientsOfZeroOperands) {
    for (std::uint64_t n = 0; n < 30; ++n)
        for (const DeltaOperand& operand : delta_operands()) {
            const RandomDelta call = draw_any(first_seed() + n);
            SCOPED_TRACE(call.describe() + ", zero " + operand.name);
            fill(call.*operand.array, 0);
            expect_finite(backward_results(call, reference_engine()));
        }
}

TEST(DeltaEdges, PassesStatesThroughWhereThereAreNoTokens) {
    DeltaRanges ranges;
    ranges.tokens = 0;
    for (std::uint64_t n = 0; n < 40; ++n) {
        const RandomDelta call = draw_delta(first_seed() + n, ranges);
        SCOPED_TRACE(call.describe());
        const Results results = forward_results(call, reference_engine());
        const Results gradients = backward_results(call, reference_engine());
        for (Index i = 0; i < results.at("final_state").count(); ++i) {
            EXPECT_EQ(results.at("final_state").get(i), call.initial_state.view() ? call.initial_state.get(i) : 0);
            EXPECT_EQ(gradients.at("dinitial_state").get(i), call.dfinal_state.view() ? call.dfinal_state.get(i) : 0);
        }
        for (const char* name : {"dA_log", "ddt_bias", "dg_gamma"})
            if (const auto sum = gradients.find(name); sum != gradients.end()) expect_all(sum->second, 0);
    }
}

// A gate of −∞, or so steep that e^g is 0, forgets everything before it.
TEST(DeltaEdges, WipesTheState) {
    DeltaRanges ranges;
    ranges.tokens = ranges.shortest = 7;
    constexpr Index wiping = 3;  // the token
    const auto token_of = [](const Array& a, Index i) {
        const Index tokens = a.view().shape(1);
        return i / (a.count() / (a.view().shape(0) * tokens)) % tokens;
    };
    int checked = 0;
    for (std::uint64_t n = 0; n < 60; ++n)
        for (const double steep : {-1000.0, -1e30, -infinity}) {
            const RandomDelta call = draw_delta(first_seed() + n, ranges);
            // Its correction sees the state before the wipe
            if (!call.g.view() || call.cu_seqlens.view() || call.options.use_gate_in_kernel ||
                call.rule().erase == core::Erase::from_previous_state)
                continue;
            SCOPED_TRACE(call.describe());
            for (Index i = 0; i < call.g.count(); ++i)
                if (token_of(call.g, i) == wiping) call.g.set(i, steep);
            for (Index i = 0; i < call.d_o.count(); ++i)
                if (token_of(call.d_o, i) < wiping) call.d_o.set(i, 0);
            const Results before = forward_results(call, reference_engine());
            const Results gradients = backward_results(call, reference_engine());
            expect_finite(gradients);
            expect_all(gradients.at("dinitial_state"), 0);
            const Array& dg = gradients.at("dg");
            for (Index i = 0; i < dg.count(); ++i) ASSERT_TRUE(token_of(dg, i) > wiping || dg.get(i) == 0) << i;

            fill(call.initial_state, 5);
            for (Index i = 0; i < call.v.count(); ++i)
                if (token_of(call.v, i) < wiping) call.v.set(i, -2);
            const Results after = forward_results(call, reference_engine());
            const Array& o = after.at("o");
            for (Index i = 0; i < o.count(); ++i)
                ASSERT_TRUE(token_of(o, i) < wiping || o.get(i) == before.at("o").get(i)) << i;
            EXPECT_EQ(after.at("final_state").values(), before.at("final_state").values());
            ++checked;
        }
    EXPECT_GE(checked, 15);
}

// One token, one channel, no state: everything has a short formula.
struct OneToken {
    explicit OneToken(Rule rule) {
        call.sequences = 1;
        call.options.rule = rule;
        for (Array RandomDelta::*a : {&RandomDelta::q, &RandomDelta::k, &RandomDelta::v, &RandomDelta::d_o}) {
            call.*a = Array(DType::f64, {1, 1, 1, 1});
            fill(call.*a, 1);
        }
    }
    double gradient(const char* name) const { return backward_results(call, reference_engine()).at(name).get(0); }
    RandomDelta call;
};

TEST(DeltaEdges, KeepsDigitsOfSaturatedBeta) {
    OneToken one(Rule::delta_rule);
    one.call.options.use_beta_sigmoid_in_kernel = true;
    one.call.beta = Array(DType::f64, {1, 1, 1});
    for (const bool doubled : {false, true})
        for (const double x : {-700.0, -40.0, 0.0, 40.0, 700.0}) {
            one.call.options.allow_neg_eigval = doubled;
            one.call.beta.set(0, x);
            const double e = std::exp(-std::abs(x)), expected = (doubled ? 2 : 1) * e / ((1 + e) * (1 + e));
            EXPECT_NEAR(one.gradient("dbeta"), expected, 1e-14 * expected) << x;
        }
}

// o = e^g S + 1, so dg = e^g S.
TEST(DeltaEdges, KeepsDigitsOfSaturatedGates) {
    OneToken one(Rule::simple_gla);
    one.call.options.use_gate_in_kernel = true;
    for (Array RandomDelta::*a : {&RandomDelta::A_log, &RandomDelta::dt_bias}) one.call.*a = Array(DType::f64, {1});
    one.call.g = Array(DType::f64, {1, 1, 1});
    one.call.initial_state = Array(DType::f64, {1, 1, 1, 1});
    fill(one.call.initial_state, 3);
    fill(one.call.A_log, std::log(0.5));
    for (const double x : {-1000.0, -600.0, -40.0, 40.0, 600.0}) {
        one.call.g.set(0, x);
        const double e = std::exp(-std::abs(x)), sigma = (x > 0 ? 1 : e) / (1 + e);
        const double g = -0.5 * (std::max(x, 0.0) + std::log1p(e)), dg = 3 * std::exp(g);
        one.call.options.lower_bound = std::nan("");
        EXPECT_NEAR(one.gradient("dg"), -0.5 * sigma * dg, 1e-14 * std::abs(0.5 * sigma * dg)) << x;
        EXPECT_NEAR(one.gradient("dA_log"), dg * g, 1e-14 * std::abs(dg * g)) << x;
        const double h = std::exp(-0.5 * std::abs(x)), bounded = -2 * (x > 0 ? 1 : h) / (1 + h);
        const double dx = 3 * std::exp(bounded) * -2 * h / ((1 + h) * (1 + h)) * 0.5;
        one.call.options.lower_bound = -2;
        EXPECT_NEAR(one.gradient("dg"), dx, 1e-14 * std::abs(dx)) << x;
        EXPECT_NEAR(one.gradient("dA_log"), dx * x, 1e-14 * std::abs(dx * x)) << x;
    }
}

TEST(DeltaEdges, HasFiniteGradientsOfInfiniteGates) {
    for (std::uint64_t n = 0; n < 60; ++n)
        for (const double x : {1e300, infinity, -infinity}) {
            const RandomDelta call = draw_any(first_seed() + n);
            if (!call.options.use_gate_in_kernel) continue;
            SCOPED_TRACE(call.describe());
            fill(call.g, x);
            expect_finite(forward_results(call, reference_engine()));
            expect_finite(backward_results(call, reference_engine()));
        }
}

// e^g is near the largest number: only what is 0 stays finite.
TEST(DeltaEdges, TakesLargeGatesWhereTheStateIsZero) {
    for (const Rule rule : {Rule::gated_delta_rule, Rule::simple_gla}) {
        OneToken one(rule);
        one.call.g = Array(DType::f64, {1, 1, 1});
        fill(one.call.g, 709);
        fill(one.call.k, 30);
        EXPECT_EQ(forward_results(one.call, reference_engine()).at("o").get(0), 30);
        EXPECT_EQ(one.gradient("dg"), 0);
        EXPECT_EQ(one.gradient("dv"), 30);
        fill(one.call.g, 1e4);  // 0·e^g is 0
        EXPECT_EQ(forward_results(one.call, reference_engine()).at("o").get(0), 30);
        EXPECT_EQ(one.gradient("dg"), 0);
    }
}

// State index −1: no sequence. Its tokens give 0, whatever they hold; nothing else changes.
TEST(DeltaEdges, LeavesOutSequencesThatAreNotThere) {
    for (std::uint64_t n = 0; n < 60; ++n)
        for (const std::string engine : {"reference", "stages_f64", "fast"}) {
            DeltaRanges ranges;
            ranges.dtypes = {DType::f32};
            if (n % 4 == 0) ranges.tokens = 150, ranges.value_channels = 40;
            RandomDelta call = draw_delta(first_seed() + n, ranges);
            SCOPED_TRACE(call.describe());
            const Index N = call.sequences;
            if (!call.initial_state.view() || call.v.count() == 0) continue;
            Execution execution = reference_engine();
            execution.engine = engine;
            const Array o(DType::f32, call.o_shape()), states(DType::f32, call.states_shape()),
                state(DType::f32, call.state_shape()), indices(DType::i64, {N});
            const Array o_all(DType::f32, call.o_shape()), states_all(DType::f32, call.states_shape()),
                state_all(DType::f32, call.state_shape());
            for (const Array* a : {&state, &state_all})
                for (Index i = 0; i < a->count(); ++i) a->set(i, call.initial_state.get(i));
            const auto is_padding = [&](Index sequence) { return (sequence + static_cast<Index>(n)) % 2 == 0; };
            for (Index i = 0; i < N; ++i) indices.set(i, is_padding(i) ? -1 : static_cast<double>(i));
            DeltaInputs in = call.inputs();
            in.initial_state = state_all.view();
            delta_forward(in, {.o = o_all.view(), .final_state = state_all.view(), .states = states_all.view()},
                          call.options, execution);
            const Index tokens = call.v.view().shape(1), row = call.v.count() / (call.v.view().shape(0) * tokens);
            for (Index i = 0; i < N; ++i)
                for (Index t = call.begin(i); is_padding(i) && t < call.begin(i) + call.length(i); ++t)
                    for (Index c = 0; c < row; ++c) call.v.set((call.batch(i) * tokens + t) * row + c, std::nan(""));
            in.initial_state = state.view(), in.state_indices = indices.view();
            delta_forward(in, {.o = o.view(), .final_state = state.view(), .states = states.view()}, call.options,
                          execution);
            Index first_state = 0;
            for (Index i = 0; i < N; ++i) {
                for (Index t = call.begin(i); t < call.begin(i) + call.length(i); ++t)
                    for (Index c = 0; c < row; ++c) {
                        const Index at = (call.batch(i) * tokens + t) * row + c;
                        ASSERT_EQ(o.get(at), is_padding(i) ? 0 : o_all.get(at));
                    }
                const Index size = state.count() / N, intervals = (call.length(i) + call.options.state_interval - 1) /
                                                                  call.options.state_interval;
                for (Index j = i * size; j < (i + 1) * size; ++j)
                    ASSERT_EQ(state.get(j), is_padding(i) ? call.initial_state.get(j) : state_all.get(j));
                for (Index j = first_state * size; j < (first_state + intervals) * size; ++j)
                    ASSERT_EQ(states.get(j), is_padding(i) ? 0 : states_all.get(j));
                first_state += intervals;
            }
        }
}

TEST(DeltaEdges, UpdatesAPoolOfStatesInPlace) {
    Random random(first_seed());
    for (std::uint64_t n = 0; n < 60; ++n) {
        RandomDelta call = draw_any(first_seed() + n);
        if (!call.initial_state.view()) continue;
        SCOPED_TRACE(call.describe());
        const Results expected = forward_results(call, reference_engine());
        Shape shape = call.state_shape();
        const Index states = shape[0], size = call.initial_state.count() / states;
        shape[0] = states + 2;
        const Array pool(DType::f64, shape, random), indices(DType::i32, {states}), o(DType::f64, call.o_shape());
        for (Index i = 0; i < pool.count(); ++i) pool.set(i, 17);
        for (Index i = 0; i < states; ++i) {
            indices.set(i, static_cast<double>(states - i));  // entries 0 and states + 1 stay
            for (Index j = 0; j < size; ++j) pool.set((states - i) * size + j, call.initial_state.get(i * size + j));
        }
        DeltaInputs in = call.inputs();
        in.initial_state = pool.view();
        in.state_indices = indices.view();
        delta_forward(in, {.o = o.view(), .final_state = pool.view()}, call.options, reference_engine());
        EXPECT_EQ(o.values(), expected.at("o").values());
        for (Index i = 0; i < pool.count(); ++i) {
            const Index sequence = states - i / size;
            const bool used = sequence >= 0 && sequence < states;
            ASSERT_EQ(pool.get(i), used ? expected.at("final_state").get(sequence * size + i % size) : 17) << i;
        }
    }
}

}  // namespace
}  // namespace softdelta::test
