// The chunk form of the delta rules against the token recurrence, and its intermediates against each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <set>

#include "support/random_delta.h"
#include "support/takes.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr Index chunk_sizes[] = {16, 32, 64, 96, 128};

Execution stages(const std::string& engine, Index chunk_size = 64, std::uint64_t seed = 0) {
    Execution e;
    e.engine = engine;
    e.stages.chunk_size = chunk_size;
    e.rounding.seed = seed;
    return e;
}

Execution reference() {
    return stages("reference");
}

// RMS(x − truth) / RMS(truth). Operands are of order 1: a result that is erased to far less, and is a difference of
// numbers of order 1 in any chunk form, counts as `smallest`.
double error_ratio(const std::vector<double>& x, const std::vector<double>& truth, double smallest = 1e-3) {
    double error = 0, size = smallest * smallest * static_cast<double>(truth.size());
    for (std::size_t i = 0; i < truth.size(); ++i) {
        if (!std::isfinite(x[i])) return infinity;
        error += (x[i] - truth[i]) * (x[i] - truth[i]);
        size += truth[i] * truth[i];
    }
    return truth.empty() ? 0 : std::sqrt(error / size);
}

void expect_near(const Results& results, const Results& truth, double limit, const std::string& what) {
    for (const auto& [name, array] : truth)
        EXPECT_LE(error_ratio(results.at(name).values(), array.values()), limit) << name << ": " << what;
}

// A call whose intermediates are asked for: all that the rule has, in the backward pass.
class Intermediates {
  public:
    Intermediates(const RandomDelta& call, const std::vector<std::string>& names, Execution execution) {
        for (const std::string& name : names)
            arrays_[name] = Array(DType::f64, shape_of(call, name, execution.stages.chunk_size));
        for (const auto& [name, array] : arrays_) {
            for (Index i = 0; i < array.count(); ++i) array.set(i, std::nan(""));
            execution.stages.wanted.push_back({name, array.view()});
        }
        results = backward_results(call, execution);
    }

    const Array& operator[](const std::string& name) const { return arrays_.at(name); }
    std::vector<double> values(const std::string& name) const { return arrays_.at(name).values(); }

    Results results;

  private:
    static Shape shape_of(const RandomDelta& call, const std::string& name, Index chunk_size) {
        static const std::set<std::string> pairs{"A", "L", "Aqk", "dA", "dL", "dL_solve", "dAqk"};
        static const std::set<std::string> values{"u", "v_new", "dv_local", "du"};
        const auto v = call.v.view().shape();
        const Index K = call.k.view().shape(3);
        if (pairs.contains(name)) return {v[0], v[1], v[2], chunk_size};
        if (values.contains(name)) return {v[0], v[1], v[2], v[3]};
        if (name == "h" || name == "dh") {
            Index chunks = 0;
            for (Index n = 0; n < (call.cu_seqlens.view() ? call.sequences : 1); ++n)
                chunks += (call.length(n) + chunk_size - 1) / chunk_size;
            return {v[0], chunks, v[2], K, v[3]};
        }
        if (name.starts_with("dg_") && !call.rule().has_channel_gate()) return {v[0], v[1], v[2]};
        return {v[0], v[1], v[2], K};
    }

    Results arrays_;
};

DeltaRanges long_sequences() {
    DeltaRanges ranges;
    ranges.tokens = 140;
    ranges.key_channels = 20;
    ranges.value_channels = 11;
    ranges.group = 2;
    ranges.tiled = ranges.repeats = ranges.steps = true;
    return ranges;
}

TEST(DeltaStages, AreTheRecurrence) {
    std::set<std::string> drawn;
    for (std::uint64_t seed = first_seed(), last = seed + 300; seed < last; ++seed) {
        const RandomDelta call = draw_delta(seed, long_sequences());
        const Index chunk_size = chunk_sizes[seed % 3];
        drawn.insert(call.features.begin(), call.features.end());
        drawn.insert("chunks of " + std::to_string(chunk_size));
        const std::string what = call.describe() + ", chunks of " + std::to_string(chunk_size);
        const Execution execution = stages("stages_f64", chunk_size);
        expect_near(forward_results(call, execution), forward_results(call, reference()), 1e-10, what);
        expect_near(backward_results(call, execution), backward_results(call, reference()), 1e-10, what);
        if (testing::Test::HasFailure()) return;
    }
    for (const char* feature :
         {"delta_rule",    "gated_delta_rule", "kda",           "comba",         "simple_gla",  "gla",
          "gdn2",          "l2norm",           "state_v_first", "grouped heads", "packed",      "empty sequence",
          "no gate",       "g_gamma",          "positive gate", "steep gate",    "wiping gate", "softplus",
          "lower bound",   "saturated gate",   "dt_bias",       "no beta",       "beta logits", "doubled beta",
          "initial_state", "dfinal_state",     "chunks of 16",  "chunks of 32",  "chunks of 64"})
        EXPECT_TRUE(drawn.contains(feature)) << feature;
}

TEST(DeltaStages, OfRulesByTheirFactsAreTheRecurrence) {
    for (std::uint64_t seed = first_seed(), last = seed + 60; seed < last; ++seed) {
        DeltaRanges ranges = long_sequences();
        ranges.facts = true;
        const RandomDelta call = draw_delta(seed, ranges);
        const Execution execution = stages("stages_f64", chunk_sizes[seed % 3]);
        expect_near(forward_results(call, execution), forward_results(call, reference()), 1e-10, call.describe());
        expect_near(backward_results(call, execution), backward_results(call, reference()), 1e-10, call.describe());
        if (testing::Test::HasFailure()) return;
    }
}

// f32 loses what f32 must lose: keys stay short, so that no rule amplifies it.
TEST(DeltaStages, InSinglePrecisionAreClose) {
    for (std::uint64_t seed = first_seed(1000), last = seed + 60; seed < last; ++seed) {
        RandomDelta call = draw_delta(seed, long_sequences());
        call.options.use_qk_l2norm_in_kernel = true;
        const Execution execution = stages("stages_f32", chunk_sizes[seed % 3]);
        expect_near(forward_results(call, execution), forward_results(call, reference()), 2e-5, call.describe());
        if (testing::Test::HasFailure()) return;
    }
}

// One sequence with chosen gates: the rest of order 1, keys and queries normalised.
RandomDelta make_call(Rule rule, Index tokens, Index K, const std::function<double(Index)>& gate,
                      DType dtype = DType::f64) {
    RandomDelta call;
    Random random(7);
    call.sequences = 1;
    call.options.rule = rule;
    call.options.use_qk_l2norm_in_kernel = true;
    const auto normal = [&](const Shape& shape) {
        Array a(dtype, shape);
        fill_normal(a, random);
        return a;
    };
    call.q = normal({1, tokens, 1, K});
    call.k = normal({1, tokens, 1, K});
    if (takes(call.rule(), "p")) call.p = normal({1, tokens, 1, K});
    call.v = normal({1, tokens, 1, K});
    call.d_o = normal({1, tokens, 1, K});
    call.initial_state = normal({1, 1, K, K});
    call.dfinal_state = normal({1, 1, K, K});
    if (call.rule().erases()) {
        call.beta = Array(DType::f64, {1, tokens, 1});
        for (Index i = 0; i < tokens; ++i) call.beta.set(i, 1 / (1 + std::exp(-std::sin(static_cast<double>(7 * i)))));
    }
    if (call.rule().gate == core::Gate::none) return call;
    const Index channels = call.rule().has_channel_gate() ? K : 1;
    call.g = Array(DType::f64, call.rule().has_channel_gate() ? Shape{1, tokens, 1, K} : Shape{1, tokens, 1});
    for (Index i = 0; i < tokens; ++i)
        for (Index m = 0; m < channels; ++m) call.g.set(i * channels + m, gate(i * channels + m));
    return call;
}

// Rows normalised beforehand, so that gradients are those of the rows that the rule sees.
void normalise(RandomDelta& call) {
    call.options.use_qk_l2norm_in_kernel = false;
    for (const Array* rows : {&call.q, &call.k, &call.p}) {
        const Index K = call.k.view().shape(3);
        for (Index i = 0; i < rows->count(); i += K) {
            double sum = 0;
            for (Index m = 0; m < K; ++m) sum += rows->get(i + m) * rows->get(i + m);
            for (Index m = 0; m < K; ++m) rows->set(i + m, rows->get(i + m) / std::sqrt(sum));
        }
    }
}

double mild_gate(Index i) {
    return -std::fmod(static_cast<double>(i) * 0.618033988749895, 1.0);
}

bool all_finite(const std::vector<double>& x) {
    return std::all_of(x.begin(), x.end(), [](double y) { return std::isfinite(y); });
}

constexpr Rule all_rules[] = {
    Rule::delta_rule, Rule::gated_delta_rule, Rule::kda, Rule::comba, Rule::simple_gla, Rule::gla, Rule::gdn2};

TEST(DeltaStages, SurviveSteepGates) {
    const std::map<std::string, std::function<double(Index)>> gates{
        {"all -20", [](Index) { return -20.0; }},
        {"all -1000", [](Index) { return -1000.0; }},
        {"some -1000", [](Index i) { return i % 5 == 0 ? -1000.0 : mild_gate(i); }},
        {"some -1e30", [](Index i) { return i % 7 == 3 ? -1e30 : mild_gate(i); }},
        {"some -inf", [](Index i) { return i % 11 == 4 ? -infinity : mild_gate(i); }},
    };
    for (const Rule rule : {Rule::gated_delta_rule, Rule::kda, Rule::comba, Rule::simple_gla, Rule::gla, Rule::gdn2})
        for (const auto& [name, gate] : gates) {
            const RandomDelta call = make_call(rule, 100, 9, gate);
            const std::string what = name + ", rule " + std::to_string(static_cast<int>(rule));
            for (const auto& [engine, limit] : {std::pair{"stages_f64", 1e-10}, {"stages_f32", 1e-4}}) {
                expect_near(forward_results(call, stages(engine)), forward_results(call, reference()), limit, what);
                expect_near(backward_results(call, stages(engine)), backward_results(call, reference()), limit, what);
            }
        }
}

TEST(DeltaStages, StayFiniteWhereTheRecurrenceDoes) {
    for (const Rule rule : {Rule::gated_delta_rule, Rule::kda, Rule::simple_gla}) {
        const Index K = 9, channels = rule == Rule::kda ? K : 1;
        const auto up_and_down = [=](Index i) { return i / channels % 2 == 0 ? 30.0 : -30.0; };
        const RandomDelta call = make_call(rule, 100, K, up_and_down);
        expect_near(forward_results(call, stages("stages_f64")), forward_results(call, reference()), 1e-10, "f64");
        expect_near(backward_results(call, stages("stages_f64")), backward_results(call, reference()), 1e-10, "f64");
        expect_near(forward_results(call, stages("stages_f32")), forward_results(call, reference()), 1e-5, "f32");
    }
    // K = 1, k = β = 1: every token replaces the state, so it stays small while the sum of the gates does not.
    for (const Rule rule : {Rule::gated_delta_rule, Rule::kda}) {
        RandomDelta call = make_call(rule, 100, 1, [](Index) { return 3.0; });
        call.options.use_qk_l2norm_in_kernel = false;
        for (Index i = 0; i < 100; ++i) {
            call.k.set(i, 1);
            call.beta.set(i, 1);
        }
        expect_near(forward_results(call, stages("stages_f64")), forward_results(call, reference()), 1e-10, "f64");
        expect_near(backward_results(call, stages("stages_f64")), backward_results(call, reference()), 1e-10, "f64");
    }
}

// An Inf or NaN at one token changes no result of an earlier one. Gates that are not finite may be summed otherwise.
TEST(DeltaStages, KeepWhatIsNotFiniteFromEarlierTokens) {
    DeltaRanges ranges;
    ranges.batch = 1, ranges.tokens = 100, ranges.shortest = 2, ranges.key_channels = 12;
    for (std::uint64_t seed = first_seed(); seed < first_seed() + 150; ++seed) {
        const RandomDelta clean = draw_delta(seed, ranges), spoiled = draw_delta(seed, ranges);
        Random random(seed);
        std::vector<const Array*> inputs;
        for (const Array* a : {&spoiled.q, &spoiled.k, &spoiled.p, &spoiled.v, &spoiled.g, &spoiled.beta})
            if (a->count() > 0) inputs.push_back(a);
        if (inputs.empty()) continue;
        const Array& spoilt = *inputs[random() % inputs.size()];
        const Index row = spoilt.count() / spoilt.view().shape(1);
        const Index element = static_cast<Index>(random() % static_cast<std::uint64_t>(spoilt.count()));
        spoilt.set(element, random() % 2 == 0 ? infinity : std::nan(""));
        for (const std::string engine : {"stages_f64", "stages_f32"})
            for (const Index chunk_size : chunk_sizes) {
                const Array before = std::move(forward_results(clean, stages(engine, chunk_size)).at("o"));
                const Array after = std::move(forward_results(spoiled, stages(engine, chunk_size)).at("o"));
                const double limit = engine == "stages_f64" ? 1e-10 : 1e-3;
                for (Index i = 0; i < element / row * (before.count() / before.view().shape(1)); ++i)
                    ASSERT_NEAR(after.get(i), before.get(i), limit * (1 + std::abs(before.get(i))))
                        << "token " << element / row << ", element " << i << ": " << clean.describe();
            }
    }
}

// A raw gate of ±∞ is at its bound, and sends nothing to A_log.
TEST(DeltaStages, TakeInfiniteRawGatesWithALowerBound) {
    int taken = 0;
    for (std::uint64_t seed = first_seed(); seed < first_seed() + 300; ++seed) {
        const RandomDelta call = draw_delta(seed);
        if (!call.A_log.view() || !call.options.use_gate_in_kernel || std::isnan(call.options.lower_bound)) continue;
        ++taken;
        Random random(seed);
        for (Index i = 0; i < call.g.count(); ++i)
            if (random() % 4 == 0) call.g.set(i, random() % 2 == 0 ? infinity : -infinity);
        const Results truth = backward_results(call, reference());
        for (const std::string engine : {"stages_f64", "stages_f32"}) {
            const Results results = backward_results(call, stages(engine));
            for (const char* name : {"dA_log", "dg"})
                EXPECT_LE(error_ratio(results.at(name).values(), truth.at(name).values()), 1e-3)
                    << name << ": " << call.describe();
        }
    }
    EXPECT_GT(taken, 5);
}

TEST(DeltaStages, IntermediatesKeepTheirPromises) {
    for (const Rule rule : all_rules) {
        RandomDelta call = make_call(rule, 75, 20, mild_gate);
        const bool erases = call.rule().erases();
        normalise(call);
        call.options.state_interval = 32;
        std::vector<std::string> names{"Aqk",      "qg",       "kg",       "h",        "v_new",    "dv_local",
                                       "du",       "dh",       "dAqk",     "dq_state", "dq_intra", "dk_state",
                                       "dk_intra", "dg_local", "dg_spans", "dg_q",     "dg_k",     "dg_difference",
                                       "dg_terms"};
        if (erases) names.insert(names.end(), {"A", "L", "w", "u", "dw", "dA", "dL", "dL_solve", "dg_p"});
        const Intermediates x(call, names, stages("stages_f64", 32));
        const std::string what = "rule " + std::to_string(static_cast<int>(rule));
        expect_near(x.results, backward_results(call, reference()), 1e-11, what);
        for (const std::string& name : names)
            EXPECT_TRUE(all_finite(x.values(name))) << name << " is not written whole, " << what;
        EXPECT_LE(error_ratio(x.values("dg_difference"), x.values("dg_spans")), 1e-12) << what;
        EXPECT_LE(error_ratio(x.values("h"), forward_results(call, reference())["states"].values()), 1e-12) << what;
        if (rule != Rule::delta_rule) {
            EXPECT_LE(error_ratio(x.values("dg_spans"), x.results.at("dg").values()), 0) << what;
        }
        Array whole(DType::f64, {1, 75, 1, 20});
        for (const char* gradient : {"dq", "dk"}) {  // the parts make the whole
            const std::string part = gradient;
            for (Index i = 0; i < whole.count(); ++i)
                whole.set(i, x[part + "_state"].get(i) + x[part + "_intra"].get(i));
            EXPECT_LE(error_ratio(whole.values(), x.results.at(part).values()), 1e-11) << part << ", " << what;
        }
        if (!erases) continue;
        EXPECT_LE(error_ratio(x.values("dL"), x.values("dL_solve")), 1e-12) << what;
        const Index K = 20, C = 32;
        for (Index i = 0; i < 75; ++i) {  // A (I + L) = I;  v_new = u − w h
            const Index first = i / C * C, rows = std::min(C, 75 - first);
            for (Index j = 0; j < C; ++j) {
                double sum = j < rows ? x["A"].get(i * C + j) : 0;
                for (Index m = 0; m < rows; ++m) sum += x["A"].get(i * C + m) * x["L"].get((first + m) * C + j);
                EXPECT_NEAR(sum, i == first + j ? 1 : 0, 1e-13) << what << ", row " << i << ", column " << j;
            }
            for (Index n = 0; n < K; ++n) {
                double sum = x["u"].get(i * K + n);
                for (Index m = 0; m < K; ++m) sum -= x["w"].get(i * K + m) * x["h"].get((i / C * K + m) * K + n);
                EXPECT_NEAR(sum, x["v_new"].get(i * K + n), 1e-12) << what << ", row " << i;
            }
        }
    }
}

TEST(DeltaStages, NameWhatDoesNotExist) {
    const RandomDelta call = make_call(Rule::simple_gla, 20, 4, mild_gate);
    const Array rows(DType::f64, {1, 20, 1, 4});
    const auto message = [&](const std::string& name, bool backward) -> std::string {
        Execution execution = stages("stages_f64", 16);
        execution.stages.wanted = {{name, rows.view()}};
        try {
            backward ? backward_results(call, execution) : forward_results(call, execution);
        } catch (const std::invalid_argument& e) {
            return e.what();
        }
        return "";
    };
    EXPECT_EQ(message("kg", false), "");
    EXPECT_EQ(message("dq_state", true), "");
    EXPECT_EQ(message("dq_state", false), "");
    EXPECT_EQ(message("w", false),
              "stage w: unknown, expected one of Aqk, qg, kg, h, v_new, dv_local, du, dh, dAqk, dq_state, dq_intra, "
              "dk_state, dk_intra, dg_q, dg_k, dg_local, dg_difference, dg_spans, dg_terms (simple_gla)");
    EXPECT_EQ(message("Aqk", true), "stage Aqk: shape is [1, 20, 1, 4], expected [1, 20, 1, 16]");
}

// dg of f32 in both forms, by gate (docs/math.md, "The gradient of the gate").
TEST(DeltaStages, GateGradientsWithoutSubtractionKeepTheirDigits) {
    struct Case {
        const char* name;
        std::function<double(Index)> gate;
        double smallest_difference, largest_difference;  // error ratio of the difference form
    };
    const Case cases[] = {{"0 ... -1", mild_gate, 1e-7, 1e-5},
                          {"all -5", [](Index) { return -5.0; }, 1e-5, 1e-3},
                          {"all -10", [](Index) { return -10.0; }, 1e-3, 0.1},
                          {"all -20", [](Index) { return -20.0; }, 10, 1e4},
                          {"half at -1000", [](Index i) { return i % 2 ? -1000.0 : mild_gate(i); }, 1e-7, 1e-5}};
    const auto dA_log_of = [](const std::vector<double>& dg, const Array& g) {  // dA_log of a softplus gate
        double sum = 0;
        for (std::size_t i = 0; i < dg.size(); ++i) sum += dg[i] * g.get(static_cast<Index>(i));
        return sum;
    };
    for (const Rule rule : {Rule::kda, Rule::gated_delta_rule})
        for (const Case& c : cases) {
            const RandomDelta call = make_call(rule, 256, 128, c.gate);
            const Intermediates x(call, {"dg_difference", "dg_spans"}, stages("stages_f32"));
            const std::vector<double> truth = backward_results(call, reference())["dg"].values();
            const double spans = error_ratio(x.values("dg_spans"), truth, 0);
            const double difference = error_ratio(x.values("dg_difference"), truth, 0);
            const double dA_log = dA_log_of(truth, call.g);
            std::printf("%-5s %-14s dg: difference %.1e, spans %.1e   dA_log: difference %.1e, spans %.1e\n",
                        rule == Rule::kda ? "kda" : "gdn", c.name, difference, spans,
                        std::abs(dA_log_of(x.values("dg_difference"), call.g) / dA_log - 1),
                        std::abs(dA_log_of(x.values("dg_spans"), call.g) / dA_log - 1));
            EXPECT_LE(spans, 2e-6) << c.name;
            if (rule == Rule::kda) {
                EXPECT_GE(difference, c.smallest_difference) << c.name;
                EXPECT_LE(difference, c.largest_difference) << c.name;
            }
        }
}

bool same_bits(const Results& a, const Results& b) {
    for (const auto& [name, array] : a)
        if (array.values() != b.at(name).values()) return false;
    return true;
}

TEST(DeltaStages, DoNotDependOnThreads) {
    for (std::uint64_t seed = first_seed(2000), last = seed + 20; seed < last; ++seed) {
        const RandomDelta call = draw_delta(seed, long_sequences());
        for (const std::uint64_t rounding_seed : {0, 3}) {
            Execution one = stages("stages_f32", 16, rounding_seed), three = one;
            one.threads = 1;
            three.threads = 3;
            EXPECT_TRUE(same_bits(forward_results(call, one), forward_results(call, three))) << call.describe();
            EXPECT_TRUE(same_bits(backward_results(call, one), backward_results(call, three))) << call.describe();
        }
    }
}

// bf16 operands: errors of some 2⁻⁹, other ones for every seed, and none in the mean of many seeds.
TEST(DeltaStages, RoundAsALowPrecisionKernel) {
    for (const Rule rule : all_rules) {
        const std::string what = "rule " + std::to_string(static_cast<int>(rule));
        const RandomDelta call = make_call(rule, 80, 24, mild_gate, DType::bf16);
        const auto run = [&](std::uint64_t seed) {
            Results r = backward_results(call, stages("stages_f32", 64, seed));
            for (auto& [name, array] : forward_results(call, stages("stages_f32", 64, seed)))
                r[name] = std::move(array);
            return r;
        };
        const Results truth = run(0);
        EXPECT_TRUE(same_bits(run(1), run(1))) << what;
        constexpr int runs = 64;
        std::map<std::string, std::vector<double>> mean;
        for (int seed = 1; seed <= runs; ++seed)
            for (const auto& [name, array] : run(static_cast<std::uint64_t>(seed))) {
                const std::vector<double> x = array.values();
                mean[name].resize(x.size());
                for (std::size_t i = 0; i < x.size(); ++i) mean[name][i] += x[i] / runs;
            }
        const Results first = run(1);
        for (const auto& [name, array] : truth) {
            const double one = error_ratio(first.at(name).values(), array.values());
            EXPECT_GE(one, 3e-4) << name << ", " << what;
            EXPECT_LE(one, 2e-2) << name << ", " << what;
            EXPECT_LE(error_ratio(mean[name], array.values()), one / 3) << name << ", " << what;
        }
    }
}

}  // namespace
}  // namespace softdelta::test
