// The fast delta rules against the f64 recurrence: random calls with every option of the contract, on every instruction
// set, in every storage type, judged by the limits that a right kernel of that precision sets (docs/math.md). Memory
// that is not written holds NaN; buffers end at unreadable pages.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <utility>

#include "io/file/core_view.h"
#include "support/fast_delta.h"
#include "support/levels.h"
#include "support/takes.h"

namespace softdelta::test {
namespace {

// Some rules make states grow; f16 ends at 65504.
bool exceeds_f16(const FastDelta& call) {
    if (call.drawn().v.view().dtype() != DType::f16) return false;
    Execution reference;
    reference.engine = "reference";
    const std::vector<double> o = forward_results(call.drawn(), reference).at("o").values();
    return std::any_of(o.begin(), o.end(), [](double x) { return std::abs(x) > 60000; });
}

std::string check_forward(const FastDelta& call, std::uint64_t seed) {
    if (exceeds_f16(call)) return "";
    return judge_results(call, call.forward(call.some(call.forward_names()), fast(seed)));
}

TEST(DeltaFast, ForwardIsRight) {
    check_calls(
        call_count(200), [](std::uint64_t seed) { return draw_fast_delta(seed); }, check_forward);
}

std::string check_bf16_products(const FastDelta& call, std::uint64_t seed) {
    Execution execution = fast(seed);
    execution.bf16_products = Bf16Products::bf16;
    return judge_results(call, call.forward(call.forward_names(), execution));
}

TEST(DeltaFast, KeysOfTheirOwnByTiles) {
    check_calls(call_count(18), draw_own_keys_by_tiles, check_bf16_products);
}

TEST(DeltaFast, LongSequencesByTiles) {
    check_calls(call_count(6), draw_long_sequence_by_tiles, check_bf16_products);
}

// A head of this call writes one row, and all that it reads is one product of rows, whose terms cancel.
TEST(DeltaFast, BlockOfOneProductOfNearRows) {
    check_calls(
        1, [](std::uint64_t) { return draw_own_keys_by_tiles(100); }, check_bf16_products);
}

TEST(DeltaFast, RulesOfFacts) {
    check_calls(call_count(15), draw_rule_of_facts, [](const FastDelta& call, std::uint64_t seed) {
        FastDelta::Names gradients = call.gradient_names();
        if (call.has("first gate surges")) std::erase(gradients, "dinitial_state");
        return check_bf16_products(call, seed) + judge_results(call, call.backward(gradients, fast(seed)));
    });
}

// Facts of the table's rules give their results, bit by bit.
TEST(DeltaFast, FactsOfARuleAreTheRule) {
    const DeltaRanges ranges{.tokens = 80, .dtypes = {DType::f32, DType::bf16}, .steps = true};
    for (const core::Rule& rule : core::rules) {
        std::uint64_t seed = 1;
        for (bool found = false; !found; seed += !found) {
            const RandomDelta drawn = draw_delta(seed, ranges);
            found = drawn.rule().name == rule.name && !drawn.g.view() == (rule.gate == core::Gate::none);
        }
        RandomDelta drawn = draw_delta(seed, ranges);
        drawn.options.rule =
            rule_of({static_cast<RuleGate>(rule.gate), static_cast<RuleErases>(rule.erase), takes(rule, "p")});
        const FastDelta by_name(draw_delta(seed, ranges)), by_facts(std::move(drawn));
        const auto expect_same = [&](const FastDelta::Results& named, const FastDelta::Results& facts) {
            for (const auto& [name, result] : named)
                EXPECT_EQ(std::memcmp(result.data(), facts.at(name).data(), result.bytes()), 0)
                    << rule.name << ", " << name;
        };
        expect_same(by_name.forward(by_name.forward_names(), fast(0)),
                    by_facts.forward(by_name.forward_names(), fast(0)));
        expect_same(by_name.backward(by_name.gradient_names(), fast(0)),
                    by_facts.backward(by_name.gradient_names(), fast(0)));
    }
}

// The CPU's conversion to bf16 makes a number below 2^-126 zero; nothing that is computed from it in f32 shows.
constexpr double smallest_normal = 0x1p-126;

double error_ratio(const Tensor& actual, const Array& expected) {
    const core::Tensor t = io::core_view(actual);
    double error = 0, size = 0;
    for (Index i = 0; i < expected.count(); ++i) {
        Index at = 0, rest = i;
        for (auto dim = static_cast<std::size_t>(t.rank); dim-- > 0; rest /= t.shape[dim])
            at += rest % t.shape[dim] * t.stride[dim];
        const double e = expected.get(i), a = core::load(t, at);
        size += e * e;
        if (!(std::abs(a - e) < smallest_normal)) error += (a - e) * (a - e);
    }
    return error == 0 ? 0 : std::sqrt(error / size);
}

// What the low-precision baseline errs in states, which may be what erasing leaves of far larger ones (docs/math.md,
// "Limits of error").
double baseline_of_states(const FastDelta& call, const DeltaOptions& options, const Array& states) {
    constexpr int runs = 8;
    const Array low(DType::f32, call.drawn().states_shape(options.state_interval));
    double squares = 0;
    Execution baseline;
    baseline.engine = "stages_f32";
    baseline.threads = 1;
    for (int run = 1; run <= runs; ++run) {
        baseline.rounding.seed = static_cast<std::uint64_t>(run);
        delta_forward(call.drawn().inputs(), {.states = low.view()}, options, baseline);
        const double ratio = error_ratio(low.view(), states);
        squares += ratio * ratio / runs;
    }
    return std::sqrt(squares);
}

// What the backward pass need not compute again: u and the states, against the f64 recurrence.
std::string check_kept(const FastDelta& call, std::uint64_t seed) {
    for (const char* grows : {"positive gate", "surging gate", "comba", "large initial_state", "extreme raw gate"})
        if (call.has(grows)) return "";
    const Keep keep{.interval = 64};
    const Array states(DType::f64, call.drawn().states_shape(keep.interval)), u(DType::f64, call.drawn().u_shape());
    DeltaOptions options = call.drawn().options;
    options.state_interval = keep.interval;
    Execution reference;
    reference.engine = "reference";
    delta_forward(call.drawn().inputs(), {.states = states.view(), .u = u.view()}, options, reference);
    const FastDelta::Kept kept = call.kept(keep, fast(seed));
    const double limit =
        call.drawn().v.view().dtype() == DType::f32 && call.drawn().k.view().dtype() == DType::f32 ? 1e-4 : 0.03;
    std::string wrong;
    if (!(error_ratio(kept.u.view(), u) <= limit))
        wrong += call.describe() + ": u " + std::to_string(error_ratio(kept.u.view(), u)) + "\n";
    const double error = error_ratio(kept.states.view(), states);
    if (!(error <= limit) && !(error <= 2 * baseline_of_states(call, options, states)))
        wrong += call.describe() + ": states " + std::to_string(error) + "\n";
    return wrong;
}

TEST(DeltaFast, KeepsStatesAndWhatTokensWrite) {
    check_calls(
        call_count(100), [](std::uint64_t seed) { return draw_fast_delta(seed); }, check_kept);
}

// Rows of this call write up to 150 times what the states between its chunks hold.
TEST(DeltaFast, KeepsStatesThatErasingLeaves) {
    check_calls(
        1, [](std::uint64_t) { return draw_fast_delta(126); },
        [](const FastDelta& call, std::uint64_t) { return check_kept(call, 126); });
}

// l2norm does not know how large rows are, and a gradient is as much smaller: Σx² is beyond f32 here.
TEST(DeltaFast, NormsOfHugeRows) {
    constexpr double large = 0x1p20, huge = 0x1p80;
    constexpr Index B = 1, H = 2, K = 32, V = 32;
    struct Results {
        std::vector<double> o, state, dq, dk, dp;
    };
    const auto compute = [&](Rule rule, DType dtype, Index T, double size) {
        Random random(static_cast<std::uint64_t>(T));
        const auto normal = [&](const Shape& shape, double factor) {
            Array a(dtype, shape);
            fill_normal(a, random);
            for (Index i = 0; i < a.count(); ++i) a.set(i, a.get(i) * factor);
            return a;
        };
        const Array q = normal({B, T, H, K}, size), k = normal({B, T, H, K}, size), p = normal({B, T, H, K}, size);
        const Array v = normal({B, T, H, V}, 1), d_o = normal({B, T, H, V}, 1);
        const Array state(DType::f32, {B, H, K, V}), g(DType::f32, {B, T, H}), beta(DType::f32, {B, T, H});
        fill_normal(state, random);
        for (Index i = 0; i < beta.count(); ++i) beta.set(i, 0.5), g.set(i, -0.1);
        const Array o(dtype, {B, T, H, V}), dq(dtype, {B, T, H, K}), dk(dtype, {B, T, H, K}), dp(dtype, {B, T, H, K});
        DeltaInputs in{.q = q.view(), .k = k.view(), .v = v.view(), .initial_state = state.view()};
        DeltaGradients grad{.d_o = d_o.view(), .dq = dq.view(), .dk = dk.view()};
        if (rule != Rule::delta_rule) in.g = g.view();
        if (rule != Rule::simple_gla) in.beta = beta.view();
        if (rule == Rule::comba) in.p = p.view(), grad.dp = dp.view();
        const DeltaOptions options{.rule = rule, .use_qk_l2norm_in_kernel = true};
        delta_backward(in, grad, options, fast(0));
        delta_forward(in, {.o = o.view(), .final_state = state.view()}, options, fast(1));
        Results all{o.values(), state.values(), dq.values(), dk.values(), dp.values()};
        for (std::vector<double>* x : {&all.dq, &all.dk, &all.dp})
            for (double& d : *x) d *= size;
        return all;
    };
    const auto differ = [](const std::vector<double>& a, const std::vector<double>& b) {
        double error = 0, size = 1e-300;
        for (std::size_t i = 0; i < a.size(); ++i) error += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
        return std::sqrt(error / size);
    };
    for_each_level([&](const std::string& level) {
        for (const Rule rule : {Rule::delta_rule, Rule::gated_delta_rule, Rule::comba, Rule::simple_gla})
            for (const auto& [dtype, limit] : {std::pair{DType::f32, 1e-5}, {DType::bf16, 0.03}})
                for (const Index T : {1, 7, 40, 150}) {  // a step, and chunks
                    const Results expected = compute(rule, dtype, T, large), actual = compute(rule, dtype, T, huge);
                    const std::string what = level + ", T " + std::to_string(T) + ", rule " +
                                             std::to_string(static_cast<int>(rule)) +
                                             (dtype == DType::f32 ? ", f32" : ", bf16");
                    EXPECT_LE(differ(actual.o, expected.o), limit) << "o, " << what;
                    EXPECT_LE(differ(actual.state, expected.state), limit) << "final_state, " << what;
                    EXPECT_LE(differ(actual.dq, expected.dq), limit) << "dq, " << what;
                    EXPECT_LE(differ(actual.dk, expected.dk), limit) << "dk, " << what;
                    EXPECT_LE(differ(actual.dp, expected.dp), limit) << "dp, " << what;
                }
    });
}

// All queries are tiny, so that nothing else hides what is lost of them: times decays they may be beyond what f32
// holds, though what is read of near tokens is not.
TEST(DeltaFast, TinyQueriesKeepTheirDigits) {
    constexpr Index T = 45, H = 1, K = 32, V = 32;
    const auto draw = [](Rule rule, DType dtype, bool l2norm, double size, double steepest) {
        Random random(3);
        std::uniform_real_distribution<double> unit;
        const auto filled = [](DType type, const Shape& shape, const auto& number) {
            Array a(type, shape);
            for (Index i = 0; i < a.count(); ++i) a.set(i, number());
            return a;
        };
        const auto key = [&](double norm) {
            return filled(dtype, {1, T, H, K}, [&] { return norm * (unit(random) < 0.5 ? -0.2 : 0.2); });
        };
        RandomDelta call;
        call.sequences = 1, call.options.rule = rule, call.options.use_qk_l2norm_in_kernel = l2norm;
        call.q = key(size), call.k = key(1);
        call.v = Array(dtype, {1, T, H, V}), call.d_o = Array(dtype, {1, T, H, V});
        fill_normal(call.v, random), fill_normal(call.d_o, random);
        const auto gate = [&] { return steepest * unit(random); };
        call.g = filled(DType::f32, rule == Rule::kda ? Shape{1, T, H, K} : Shape{1, T, H}, gate);
        call.beta = filled(DType::f32, {1, T, H}, [&] { return unit(random); });
        return call;
    };
    Execution reference;
    reference.engine = "reference";
    for_each_level([&](const std::string& level) {
        for (const Rule rule : {Rule::kda, Rule::gated_delta_rule})
            for (const auto& [dtype, limit] : {std::pair{DType::f32, 1e-4}, {DType::bf16, 0.05}})
                for (const bool l2norm : {false, true})
                    for (const double size : {1e-6, 1e-12, 1e-20, 1e-30})
                        for (const double steepest : {-1.0, -3.0, -9.0}) {
                            const RandomDelta call = draw(rule, dtype, l2norm, size, steepest);
                            Results truth = forward_results(call, reference);
                            truth.merge(backward_results(call, reference));
                            std::map<std::string, Array> fast_results;
                            for (const char* name : {"o", "dq", "dk", "dv", "dg", "dbeta"})
                                fast_results[name] = Array(
                                    DType::f32, {truth[name].view().shape().begin(), truth[name].view().shape().end()});
                            const auto result = [&](const char* name) { return fast_results[name].view(); };
                            delta_forward(call.inputs(), {.o = result("o")}, call.options, fast(0));
                            delta_backward(call.inputs(),
                                           {.d_o = call.d_o.view(),
                                            .dq = result("dq"),
                                            .dk = result("dk"),
                                            .dv = result("dv"),
                                            .dg = result("dg"),
                                            .dbeta = result("dbeta")},
                                           call.options, fast(0));
                            for (const auto& [name, actual] : fast_results)
                                EXPECT_LE(error_ratio(actual.view(), truth[name]), limit)
                                    << name << ", " << level << ", rule " << static_cast<int>(rule)
                                    << (dtype == DType::f32 ? ", f32" : ", bf16") << (l2norm ? ", l2norm" : "")
                                    << ", rows of " << size << ", gates to " << steepest;
                        }
    });
}

}  // namespace
}  // namespace softdelta::test
