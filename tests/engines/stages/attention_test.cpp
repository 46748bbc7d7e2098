// Blocked attention against the reference, over random calls with every option, and its own promises: intermediates
// add up to gradients, threads and unseen NaN change nothing, rounding is stochastic and repeatable.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/random_attention.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

using Results = std::map<std::string, Array>;

// Several tiles of 16 rows, with rests.
RandomAttention draw(std::uint64_t seed, bool extremes = false, bool repeats = true) {
    return draw_attention(
        seed, {.batch = 3, .queries = 80, .keys = 90, .channels = 20, .repeats = repeats, .extremes = extremes});
}

Shape shape_of(const Tensor& t) {
    return {t.shape().begin(), t.shape().end()};
}

Index length(const Array& cu_seqlens, Index n) {
    return static_cast<Index>(cu_seqlens.get(n + 1) - cu_seqlens.get(n));
}

// [N, H, Lq, Lk] of the call's sequences, the longest of packed ones.
Shape score_shape(const RandomAttention& call) {
    const Tensor &q = call.inputs.q, &k = call.inputs.k;
    if (!call.inputs.cu_seqlens_q) return {q.shape(0), q.shape(2), q.shape(1), k.shape(1)};
    Shape shape{call.cu_seqlens_q.count() - 1, q.shape(2), 0, 0};
    for (Index n = 0; n < shape[0]; ++n) {
        shape[2] = std::max(shape[2], length(call.cu_seqlens_q, n));
        shape[3] = call.cu_seqlens_k.view() ? std::max(shape[3], length(call.cu_seqlens_k, n)) : k.shape(1);
    }
    return shape;
}

void add_tensor(Results& r, const std::string& name, const Shape& shape) {
    Array a(DType::f64, shape);
    for (Index i = 0; i < a.count(); ++i) a.set(i, nan);  // whatever is not written shows
    r.insert_or_assign(name, std::move(a));
}

// Everything the call can give; intermediates as well when the engine has them.
Results compute(const RandomAttention& call, Execution execution) {
    Results r;
    add_tensor(r, "o", call.o_shape());
    add_tensor(r, "lse", call.lse_shape());
    add_tensor(r, "dq", shape_of(call.inputs.q));
    add_tensor(r, "dk", shape_of(call.inputs.k));
    add_tensor(r, "dv", shape_of(call.inputs.v));
    if (call.inputs.bias) add_tensor(r, "dbias", shape_of(call.inputs.bias));
    if (call.inputs.sink) add_tensor(r, "dsink", shape_of(call.inputs.sink));
    const auto wanted = [&r](const char* name) { return r.count(name) != 0 ? r[name].view() : Tensor{}; };
    attention_forward(call.inputs, {wanted("o"), wanted("lse")}, call.options, execution);
    if (execution.engine != "reference") {
        Shape scores = score_shape(call);
        add_tensor(r, "stage lse", call.lse_shape());
        add_tensor(r, "delta", call.lse_shape());
        add_tensor(r, "ds", scores);
        scores[2] = (scores[2] + execution.stages.chunk_size - 1) / execution.stages.chunk_size;
        add_tensor(r, "dbias_tiles", scores);
        execution.stages.wanted = {{"lse", wanted("stage lse")},
                                   {"delta", wanted("delta")},
                                   {"ds", wanted("ds")},
                                   {"dbias_tiles", wanted("dbias_tiles")}};
    }
    attention_backward(call.inputs,
                       {.d_o = call.d_o.view(),
                        .dlse = call.dlse.view(),
                        .dq = wanted("dq"),
                        .dk = wanted("dk"),
                        .dv = wanted("dv"),
                        .dbias = wanted("dbias"),
                        .dsink = wanted("dsink")},
                       call.options, execution);
    return r;
}

// RMS of the difference to the RMS of the truth, or to 1 where the truth is nothing but rounding: a softmax over one
// key has gradients of 0, and so has a bias that is the same for all keys. Infinities must agree.
double error_of(const std::vector<double>& actual, const std::vector<double>& truth) {
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) {
        if (std::isinf(truth[i])) {
            if (actual[i] != truth[i]) return infinity;
            continue;
        }
        difference += (actual[i] - truth[i]) * (actual[i] - truth[i]);
        size += truth[i] * truth[i];
    }
    const double n = std::max<double>(1, static_cast<double>(truth.size())), rms = std::sqrt(size / n);
    return std::sqrt(difference / n) / (rms > 1e-12 ? rms : 1);
}

double error_of(const Array& actual, const Array& truth) {
    return error_of(actual.values(), truth.values());
}

void expect_close(const Results& actual, const Results& truth, double limit, const std::string& what) {
    for (const auto& [name, tensor] : truth)
        EXPECT_LE(error_of(actual.at(name), tensor), limit) << what << ": " << name;
}

bool same_bits(const Array& a, const Array& b) {
    const std::vector<double> x = a.values(), y = b.values();
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0);
}

void expect_same_bits(const Results& actual, const Results& expected, const std::string& what) {
    for (const auto& [name, tensor] : expected) EXPECT_TRUE(same_bits(actual.at(name), tensor)) << what << ": " << name;
}

TEST(AttentionStages, F64AgreesWithTheReference) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + 160; ++seed) {
        const RandomAttention call = draw(seed, true);
        const Results truth = compute(call, {.engine = "reference"});
        const double limit = 1e-10 * std::max(1.0, call.options.scale);  // of scores of 1e8 an exponent has 8 digits
        for (const Index chunk : {16, 32, 64})
            expect_close(compute(call, {.engine = "stages_f64", .stages = {.chunk_size = chunk}}), truth, limit,
                         call.describe() + ", chunk " + std::to_string(chunk));
    }
}

TEST(AttentionStages, F64AgreesWithTheReferenceOnPages) {
    const std::uint64_t first = first_seed();
    AttentionRanges ranges{.batch = 4, .queries = 80, .keys = 90, .channels = 20};
    ranges.pages = ranges.repeats = ranges.quantised = true;
    int paged = 0;
    for (std::uint64_t seed = first; seed < first + 200; ++seed) {
        const RandomAttention call = draw_attention(seed, ranges);
        if (!call.block_table.view()) continue;
        ++paged;
        Results truth, actual;
        for (auto& [results, engine] : {std::pair{&truth, "reference"}, {&actual, "stages_f64"}}) {
            add_tensor(*results, "o", call.o_shape());
            add_tensor(*results, "lse", call.lse_shape());
            attention_forward(call.inputs, {results->at("o").view(), results->at("lse").view()}, call.options,
                              {.engine = engine, .stages = {.chunk_size = 16}});
        }
        expect_close(actual, truth, 1e-10, call.describe());
    }
    EXPECT_GE(paged, 30);
}

TEST(AttentionStages, F32HasTheErrorOfF32) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + 100; ++seed) {
        const RandomAttention call = draw(seed);
        const Results truth = compute(call, {.engine = "reference"});
        const Results actual = compute(call, {.engine = "stages_f32", .stages = {.chunk_size = 16 << seed % 3}});
        for (const auto& [name, tensor] : truth) {
            const bool cancels = name == "dbias" || name == "dsink";  // a sum of terms of both signs, maybe of all
            EXPECT_LE(error_of(actual.at(name), tensor), cancels ? 2e-4 : 5e-6) << call.describe() << ": " << name;
        }
    }
}

// A far bias swallows scores, or digits of them, but no result.
TEST(AttentionStages, F32IsFiniteWhereTheTruthIs) {
    for (std::uint64_t seed = 1; seed <= 100; ++seed) {
        const RandomAttention call = draw(seed, true);
        const Results truth = compute(call, {.engine = "reference"});
        const Results actual = compute(call, {.engine = "stages_f32", .stages = {.chunk_size = 16 << seed % 3}});
        for (const auto& [name, tensor] : truth) {
            const std::vector<double> x = actual.at(name).values(), y = tensor.values();
            for (std::size_t i = 0; i < y.size(); ++i)
                ASSERT_TRUE(std::isinf(y[i]) ? x[i] == y[i] : std::isfinite(x[i])) << call.describe() << ": " << name;
        }
    }
}

// Keys that no query may see and queries that may see no key: NaN there is as good as 0.
TEST(AttentionStages, UnseenNaNDoesNotLeak) {
    int hidden = 0;
    for (std::uint64_t seed = 1; seed <= 150; ++seed) {
        const RandomAttention call = draw(seed, false, false);
        const Array& mask = call.mask;
        if (!mask.view() || call.inputs.cu_seqlens_q || mask.view().shape(2) < 2 || mask.view().shape(3) < 2) continue;
        constexpr Index key = 1, query = 1;
        for (Index i = 0; i < mask.count(); ++i) {
            const Index keys = mask.view().shape(3);
            if (i % keys == key || i / keys % mask.view().shape(2) == query) mask.set(i, 0);
        }
        const auto plant = [](const Array& t, Index row, double value) {
            if (t.count() > 0) t.set({0, row, 0, 0}, value);
        };
        const auto run = [&](double value) {
            plant(call.k, key, value);
            plant(call.v, key, value);
            plant(call.q, query, value);
            plant(call.d_o, query, value);
            return compute(call, {.engine = "stages_f64", .stages = {.chunk_size = 16}});
        };
        const Results clean = run(0);
        for (const double junk : {nan, infinity}) expect_same_bits(run(junk), clean, call.describe());
        ++hidden;
    }
    EXPECT_GE(hidden, 10);
}

// ds, or its column sums over tiles of queries, summed over every dimension that bias repeats.
Array sum_to_bias(const RandomAttention& call, const Array& ds, Index rows_per_index, bool with_slope) {
    Array sum(DType::f64, shape_of(call.inputs.bias));
    const Array& slopes = call.bias_slopes;
    const Tensor &from = ds.view(), &to = sum.view();
    for (Index element = 0; element < ds.count(); ++element) {
        const Index j = element % from.shape(3), i = element / from.shape(3) % from.shape(2);
        const Index h = element / (from.shape(3) * from.shape(2)) % from.shape(1);
        const Index n = element / (from.shape(3) * from.shape(2) * from.shape(1));
        const Shape at{to.shape(0) == 1 ? 0 : n, h / (from.shape(1) / to.shape(1)),
                       to.shape(2) == 1 ? 0 : i * rows_per_index, to.shape(3) == 1 ? 0 : j};
        sum.set(at, sum.get(at) + (with_slope && slopes.view() ? slopes.get(h) : 1) * ds.get(element));
    }
    return sum;
}

// rowsum(do∘o) − dlse
Array delta_of(const RandomAttention& call, const Array& o) {
    Array delta(DType::f64, call.lse_shape());
    const Tensor& t = o.view();
    for (Index b = 0; b < t.shape(0); ++b)
        for (Index i = 0; i < t.shape(1); ++i)
            for (Index h = 0; h < t.shape(2); ++h) {
                double sum = call.dlse.view() ? -call.dlse.get({b, h, i}) : 0;
                for (Index c = 0; c < t.shape(3); ++c) sum += call.d_o.get({b, i, h, c}) * o.get({b, i, h, c});
                delta.set({b, h, i}, sum);
            }
    return delta;
}

TEST(AttentionStages, IntermediatesAddUpToResults) {
    int with_bias = 0, with_shared_rows = 0;
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
        const RandomAttention call = draw(seed);
        const Results r = compute(call, {.engine = "stages_f64", .stages = {.chunk_size = 16}});
        EXPECT_TRUE(same_bits(r.at("stage lse"), r.at("lse"))) << call.describe();
        EXPECT_LE(error_of(r.at("delta"), delta_of(call, r.at("o"))), 1e-13) << call.describe();
        if (!call.inputs.bias) continue;
        EXPECT_LE(error_of(sum_to_bias(call, r.at("ds"), 1, true), r.at("dbias")), 1e-13) << call.describe();
        ++with_bias;
        if (call.inputs.bias.shape(2) != 1) continue;
        EXPECT_LE(error_of(sum_to_bias(call, r.at("dbias_tiles"), 16, false), r.at("dbias")), 1e-13) << call.describe();
        ++with_shared_rows;
    }
    EXPECT_GE(with_bias, 20);
    EXPECT_GE(with_shared_rows, 5);
}

TEST(AttentionStages, ThreadsChangeNothing) {
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        const RandomAttention call = draw(seed);
        for (const std::string engine : {"stages_f64", "stages_f32"})
            expect_same_bits(compute(call, {.engine = engine, .threads = 3, .stages = {.chunk_size = 16}}),
                             compute(call, {.engine = engine, .threads = 1, .stages = {.chunk_size = 16}}),
                             call.describe());
    }
}

TEST(AttentionStages, SavedResultsServeTheBackwardPass) {
    for (std::uint64_t seed = 1; seed <= 30; ++seed) {
        const RandomAttention call = draw(seed);
        const Execution execution{.engine = "stages_f64", .stages = {.chunk_size = 32}};
        const Results r = compute(call, execution);
        const Array dq(DType::f64, shape_of(call.inputs.q)), dv(DType::f64, shape_of(call.inputs.v));
        attention_backward(call.inputs,
                           {.o = r.at("o").view(),
                            .lse = r.at("lse").view(),
                            .d_o = call.d_o.view(),
                            .dlse = call.dlse.view(),
                            .dq = dq.view(),
                            .dv = dv.view()},
                           call.options, execution);
        EXPECT_TRUE(same_bits(dq, r.at("dq"))) << call.describe();
        EXPECT_TRUE(same_bits(dv, r.at("dv"))) << call.describe();
    }
}

TEST(AttentionStages, PagesHoldTheSameKeys) {
    constexpr Index B = 2, H = 4, Hk = 2, Lq = 3, D = 8, blocks = 12, rows = 16, pages = 5, used = 70;
    Random random(1);
    const Array q(DType::f64, {B, Lq, H, D}), k(DType::f64, {blocks, rows, Hk, D}),
        v(DType::f64, {blocks, rows, Hk, D});
    const Array dense_k(DType::f64, {B, pages * rows, Hk, D}), dense_v(DType::f64, {B, pages * rows, Hk, D});
    for (const Array* a : {&q, &k, &v}) fill_normal(*a, random);
    const Array table(DType::i32, {B, pages}), cache(DType::i32, {B});
    for (Index page = 0; page < B * pages; ++page) {
        const Index block = (page * 5 + 3) % blocks, size = rows * Hk * D;
        table.set(page, static_cast<double>(block));
        for (Index x = 0; x < size; ++x) {
            dense_k.set(page * size + x, k.get(block * size + x));
            dense_v.set(page * size + x, v.get(block * size + x));
        }
    }
    for (Index b = 0; b < B; ++b) cache.set(b, used);
    const Array paged(DType::f64, {B, Lq, H, D}), dense(DType::f64, {B, Lq, H, D});
    const AttentionOptions options{.causal = Causal::bottom_right};
    const Execution execution{.engine = "stages_f64", .stages = {.chunk_size = 32}};
    attention_forward(
        {.q = q.view(), .k = k.view(), .v = v.view(), .cache_seqlens = cache.view(), .block_table = table.view()},
        {.o = paged.view()}, options, execution);
    attention_forward({.q = q.view(), .k = dense_k.view(), .v = dense_v.view(), .cache_seqlens = cache.view()},
                      {.o = dense.view()}, options, execution);
    EXPECT_TRUE(same_bits(paged, dense));
}

// Errors like those of bf16 operands, another run for another seed, right on average.
TEST(AttentionStages, RoundingIsHonestAndRepeatable) {
    const Shape shape{1, 100, 2, 16};
    RandomAttention call;
    Random random(1);
    for (Array* a : {&call.q, &call.k, &call.v, &call.d_o}) {
        *a = Array(DType::bf16, shape);
        fill_normal(*a, random);
    }
    call.inputs.q = call.q.view(), call.inputs.k = call.k.view(), call.inputs.v = call.v.view();
    const auto run = [&](std::uint64_t seed, int threads) {
        return compute(call, {.engine = "stages_f32", .threads = threads, .rounding = {.seed = seed}});
    };
    const Results truth = compute(call, {.engine = "reference"}), first = run(1, 1);
    expect_same_bits(run(1, 2), first, "two threads");

    constexpr int seeds = 64;
    std::map<std::string, std::vector<double>> mean;
    for (const char* name : {"o", "dq", "dk", "dv"}) mean[name].resize(first.at(name).values().size());
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        const Results r = run(seed, 2);
        for (auto& [name, sum] : mean) {
            const std::vector<double> x = r.at(name).values();
            for (std::size_t i = 0; i < x.size(); ++i) sum[i] += x[i] / seeds;
        }
    }
    for (const auto& [name, average] : mean) {
        const double single = error_of(first.at(name), truth.at(name));
        EXPECT_GT(single, 2e-4) << name;
        EXPECT_LT(single, 1e-2) << name;
        EXPECT_LT(error_of(average, truth.at(name).values()), single / 4) << name;
    }
}

TEST(AttentionStages, RefusesStagesThatDoNotExist) {
    const RandomAttention call = draw(2);
    const Array o(DType::f64, call.o_shape()), wrong(DType::f64, {1, 2, 3});
    const auto message_for = [&](const char* name) -> std::string {
        const Execution execution{.engine = "stages_f64", .stages = {.wanted = {{name, wrong.view()}}}};
        try {
            attention_forward(call.inputs, {.o = o.view()}, call.options, execution);
        } catch (const std::invalid_argument& error) {
            return error.what();
        }
        return "nothing was thrown";
    };
    EXPECT_EQ(message_for("logits"), "stage logits: unknown, expected one of lse, delta, ds, dbias_tiles");
    const std::string message = message_for("ds");
    EXPECT_EQ(message.rfind("stage ds: shape is [1, 2, 3], expected [", 0), 0u) << message;
}

}  // namespace
}  // namespace softdelta::test
