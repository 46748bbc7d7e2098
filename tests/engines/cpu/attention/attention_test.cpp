// The fast engine against the f64 truth: random calls with every option of the contract, on every instruction set, in
// every storage type, judged by the limits that a right kernel of that precision sets (docs/math.md). All memory is
// poisoned with NaN, and so is every key and query that the call hides; buffers end at unreadable pages.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many of each kind for each instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <sstream>

#include "support/fast_attention.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

Execution fast(std::uint64_t seed) {
    Execution execution;
    execution.engine = "fast";
    execution.threads = 1;
    if (seed / 2 % 4 < 2) execution.bf16_products = seed / 2 % 4 == 0 ? Bf16Products::f32 : Bf16Products::bf16;
    return execution;
}

std::string check_forward(const FastAttention& fast_call, std::uint64_t seed) {
    return judge_results(fast_call, fast_call.forward(fast_call.some(fast_call.forward_names()), fast(seed)));
}

// With o and lse saved, both, one of them or none.
std::string check_backward(const FastAttention& fast_call, std::uint64_t seed) {
    const Names names = fast_call.some(fast_call.gradient_names());
    if (names.empty()) return "";
    const Results all = fast_call.forward(fast_call.forward_names(), fast(seed));
    Results saved;
    if (seed / 3 % 4 != 0) saved.insert(*all.find("o"));
    if (seed / 3 % 4 < 3) saved.insert(*all.find("lse"));
    return judge_gradients(fast_call, fast_call.backward(names, saved, fast(seed)));
}

TEST(AttentionFast, ForwardIsRight) {
    check_calls(call_count(250), draw_fast_attention, check_forward);
}

TEST(AttentionFast, QuantisedKeysBesideQueriesOfBf16) {
    check_calls(call_count(60), draw_quantised_attention, check_forward);
}

TEST(AttentionFast, BackwardIsRight) {
    check_calls(call_count(250), draw_fast_attention, check_backward);
}

// A bias that is one number for all keys of a row: where the sink has nearly all the weight its gradient is small
// beside dlse, and is no difference from it.
TEST(AttentionFast, BiasOfRowsUnderALargeSink) {
    constexpr Index B = 2, L = 50, H = 3, D = 24;
    for_each_level([&](const std::string& level) {
        Random random(1);
        const auto normal = [&](const Shape& shape) {
            Array array(DType::f32, shape);
            fill_normal(array, random);
            return array;
        };
        const Array q = normal({B, L, H, D}), k = normal({B, L, H, D}), v = normal({B, L, H, D}),
                    d_o = normal({B, L, H, D}), dlse = normal({B, H, L}), bias = normal({B, H, L, 1});
        const Array sink(DType::f32, {H});
        for (Index h = 0; h < H; ++h) sink.set(h, 16);
        const auto gradient = [&](const std::string& engine) {
            const Array dbias(engine == "fast" ? DType::f32 : DType::f64, {B, H, L, 1});
            Execution execution;
            execution.engine = engine;
            attention_backward({.q = q.view(), .k = k.view(), .v = v.view(), .bias = bias.view(), .sink = sink.view()},
                               {.d_o = d_o.view(), .dlse = dlse.view(), .dbias = dbias.view()}, {}, execution);
            return dbias.values();
        };
        const std::vector<double> actual = gradient("fast"), truth = gradient("reference");
        double error = 0, squares = 0;
        for (std::size_t i = 0; i < truth.size(); ++i) {
            error += (actual[i] - truth[i]) * (actual[i] - truth[i]);
            squares += truth[i] * truth[i];
        }
        EXPECT_LT(std::sqrt(error), 2e-6 * std::sqrt(squares)) << level;
    });
}

// RMSE / RMS; both are finite at the same places, or NaN. What is not finite does not count.
double error_ratio(const std::vector<double>& actual, const std::vector<double>& truth) {
    double error = 0, squares = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) {
        if (std::isfinite(actual[i]) != std::isfinite(truth[i])) return NAN;
        if (!std::isfinite(truth[i])) continue;
        error += (actual[i] - truth[i]) * (actual[i] - truth[i]);
        squares += truth[i] * truth[i];
    }
    return std::sqrt(error / squares);
}

// o as f32, and lse with it if that is wanted.
struct Computed {
    std::vector<double> o, lse;
};
Computed compute_forward(const AttentionInputs& in, const AttentionOptions& options, const std::string& engine,
                         bool with_lse = true) {
    const DType dtype = engine == "fast" ? DType::f32 : DType::f64;
    const Index B = in.q.shape()[0], L = in.q.shape()[1], H = in.q.shape()[2];
    const Array o(dtype, {B, L, H, in.v.shape()[3]}), lse(dtype, {B, H, L});
    Execution execution;
    execution.engine = engine;
    if (engine == "fast") execution.bf16_products = Bf16Products::bf16;
    AttentionOutputs out{.o = o.view()};
    if (with_lse) out.lse = lse.view();
    attention_forward(in, out, options, execution);
    return {o.values(), lse.values()};
}

// Scores that grow along the keys, by little or much, pass the running maximum of a row again and again. A bias hides
// the first keys as masks of large numbers do, the lowest number a whole part of 256 of them. So the next part begins
// with scores that count.
TEST(AttentionFast, RowsWhoseScoresGrow) {
    constexpr Index L = 75, Lk = 701, D = 64;
    constexpr double lowest = std::numeric_limits<float>::lowest();
    for_each_level([&](const std::string& level) {
        for (const double growth : {0.01, 0.3, 4.0, 3e6})
            for (const double far : {0.0, -3.4e38, lowest, -1e10, -1e4, 1e4, 2e9}) {
                const Index hidden = far == lowest ? 256 : 200;
                Random random(1);
                const Array q(DType::bf16, {1, L, 1, D}), k(DType::bf16, {1, Lk, 1, D}), v(DType::bf16, {1, Lk, 1, D}),
                    bias(std::abs(far) < 1e38 ? DType::bf16 : DType::f32, {1, 1, 1, Lk});
                for (const Array* t : {&q, &k, &v}) fill_normal(*t, random);
                for (Index i = 0; i < L; ++i) q.set(i * D, i % 5 == 4 ? 0 : 1 + static_cast<double>(i % 3));
                for (Index j = 0; j < Lk; ++j) k.set(j * D, static_cast<double>(j - j % 8) * growth);
                for (Index j = 0; j < Lk; ++j) bias.set(j, far < 0 ? (j < hidden ? far : 0) : far);
                AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view()};
                if (far != 0) in.bias = bias.view();
                const auto [o, lse] = compute_forward(in, {}, "fast");
                const auto [true_o, true_lse] = compute_forward(in, {}, "reference");
                const auto what = level + ", growth " + std::to_string(growth) + ", bias " + std::to_string(far);
                for (std::size_t i = 0; i < lse.size(); ++i)
                    ASSERT_NEAR(lse[i], true_lse[i], 1e-5 + 1e-6 * std::abs(true_lse[i])) << what << ", row " << i;
                if (far > 0 || growth > 1e3) continue;  // in f32 the largest swallow what tells scores apart
                EXPECT_LT(error_ratio(o, true_o), 5e-3) << what;
                EXPECT_LT(error_ratio(compute_forward(in, {}, "fast", false).o, true_o), 5e-3) << what << ", o alone";
            }
    });
}

// Sizes that models have, in rows so long that every row of a group sees most key tiles whole. Beside them are the
// tiles at the ends of causal masks and windows, groups of heads, few rows, and values that are not finite. The last
// calls have a bias of all sizes or a mask that hides whole tiles.
TEST(AttentionFast, PanelsThatAllRowsSee) {
    Random random(7);
    const auto between = [&](Index low, Index high) { return std::uniform_int_distribution<Index>(low, high)(random); };
    for (int i = 0; i < 36; ++i) {
        constexpr Index sizes[][2] = {{64, 64}, {128, 128}, {96, 96}, {256, 256}, {192, 128}, {80, 64}};
        const bool addends = i >= 24;
        const Index size = i % (addends ? 2 : 6), D = sizes[size][0], V = sizes[size][1];
        const Index Hk = 1, H = between(1, 2);
        const Index Lk = between(addends ? 500 : 100, 700),
                    L = addends || i % 3 == 2 ? between(30, 64) : Lk - between(0, 99);
        const Array q(DType::bf16, {1, L, H, D}), k(DType::bf16, {1, Lk, Hk, D}), v(DType::bf16, {1, Lk, Hk, V});
        for (const Array* t : {&q, &k, &v}) fill_normal(*t, random);
        for (Index j = 0; j < q.count(); ++j) q.set(j, q.get(j) * (1 + i % 4));
        if (i % 5 == 4) v.set(between(0, v.count() - 1), INFINITY);
        AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view()};
        const Array bias(DType::bf16, {1, H, L, Lk}), mask(DType::boolean, {1, 1, L, Lk});
        fill_normal(bias, random);
        for (Index j = 0; j < bias.count(); ++j)
            if (const Index x = between(0, 600); x < (i % 5 == 4 ? 1 : 3))
                bias.set(j, x == 0 ? -INFINITY : x == 1 ? -1e4 : 1e4);
        for (Index j = 0; j < mask.count(); ++j) mask.set(j, between(0, 9) > 0 && j % Lk / 128 != j / Lk % 9 ? 1 : 0);
        if (addends && i % 3 > 0) in.bias = bias.view();
        if (addends && i % 3 == 0) in.mask = mask.view();
        AttentionOptions options;
        if (i % 4 > 1) options.causal = Causal::bottom_right;
        if (i % 8 == 7) options.window_left = between(50, 400);
        const Computed truth = compute_forward(in, options, "reference");
        for_each_level([&](const std::string& level) {
            const auto what = level + ", call " + std::to_string(i);
            const Computed result = compute_forward(in, options, "fast");
            for (std::size_t j = 0; j < truth.lse.size(); ++j)
                ASSERT_NEAR(result.lse[j], truth.lse[j], 1e-5 + 1e-6 * std::abs(truth.lse[j])) << what << ", row " << j;
            EXPECT_LT(error_ratio(result.o, truth.o), 5e-3) << what;
            EXPECT_LT(error_ratio(compute_forward(in, options, "fast", false).o, truth.o), 5e-3) << what << ", o alone";
        });
    }
}

// A sink of ∞ leaves nothing to the keys, however large their scores are.
TEST(AttentionFast, NoGradientUnderAnInfiniteSink) {
    for_each_level([](const std::string& level) {
        const Shape shape{1, 40, 1, 16};
        const Array q(DType::f32, shape), k(DType::f32, shape), v(DType::f32, shape), d_o(DType::f32, shape);
        Random random(1);
        for (const Array* t : {&q, &k, &v, &d_o}) fill_normal(*t, random);
        const Array bias(DType::f32, {1, 1, 1, 40}), sink(DType::f32, {1});
        for (Index j = 0; j < 40; ++j) bias.set(j, j % 3 == 0 ? 3e38 : j % 3 == 1 ? -3e38 : 0);
        sink.set(0, std::numeric_limits<double>::infinity());
        const Array dq(DType::f32, shape), dk(DType::f32, shape), dv(DType::f32, shape);
        attention_backward({.q = q.view(), .k = k.view(), .v = v.view(), .bias = bias.view(), .sink = sink.view()},
                           {.d_o = d_o.view(), .dq = dq.view(), .dk = dk.view(), .dv = dv.view()}, {},
                           {.engine = "fast"});
        for (const Array* t : {&dq, &dk, &dv})
            for (const double x : t->values()) ASSERT_EQ(x, 0) << level;
    });
}

// Heads whose keys lie one after the other, and which together leave the first-level cache, are read one by one.
TEST(AttentionFast, DecodeOfHeadsThatLieApart) {
    constexpr Index H = 16, Hk = 4, L = 150, D = 256;
    for_each_level([&](const std::string& level) {
        for (const Index Lq : {1, 3})
            for (const bool masked : {false, true}) {
                Random random(1);
                const Array q(DType::f32, {1, Lq, H, D}), k(DType::f32, {1, Hk, L, D}), v(DType::f32, {1, Hk, L, D}),
                    mask(DType::boolean, {1, 1, 1, L});
                for (const Array* t : {&q, &k, &v}) fill_normal(*t, random);
                for (Index j = 0; j < L; ++j) mask.set(j, j % 7 == 3 ? 0 : 1);
                const auto by_key = [&](const Array& t) {
                    return Tensor(t.view().data(), DType::f32, {1, L, Hk, D}, {Hk * L * D, D, L * D, 1});
                };
                AttentionInputs in{.q = q.view(), .k = by_key(k), .v = by_key(v)};
                if (masked) in.mask = mask.view();
                const auto compute = [&](const std::string& engine) {
                    const DType dtype = engine == "fast" ? DType::f32 : DType::f64;
                    const Array o(dtype, {1, Lq, H, D}), lse(dtype, {1, H, Lq});
                    attention_forward(in, {.o = o.view(), .lse = lse.view()}, {}, {.engine = engine});
                    std::vector<double> all = o.values();
                    for (const double x : lse.values()) all.push_back(x);
                    return all;
                };
                const std::vector<double> actual = compute("fast"), truth = compute("reference");
                for (std::size_t i = 0; i < truth.size(); ++i)
                    ASSERT_NEAR(actual[i], truth[i], 2e-6 * (1 + std::abs(truth[i])))
                        << level << ", " << Lq << " queries" << (masked ? ", a mask" : "") << ", element " << i;
            }
    });
}

TEST(AttentionFast, EveryOptionIsDrawn) {
    std::map<std::string, int> drawn;
    for (std::uint64_t seed = 1; seed <= 400; ++seed) {
        const FastAttention call = draw_fast_attention(seed);
        for (const std::string& feature : call.drawn().features) ++drawn[feature];
    }
    std::istringstream features(
        "grouped heads,multi-query,Dv other than D,v in k,packed,packed with caches,packed with pages,Lq = 0,Lk = "
        "0,cache_seqlens,paged,strided,repeated,"
        "another type,scale,causal top-left,causal bottom-right,window left,window right,window beyond all "
        "keys,softcap,sink,dlse,"
        "mask,mask shared batch,mask shared heads,mask shared queries,mask shared keys,mask heads Hk,mask own batch,"
        "mask own heads,mask own queries,mask own keys,bias,mask and bias,bias of -inf,top_w,bias shared batch,"
        "bias shared heads,bias shared queries,bias shared keys,bias heads Hk,bias own batch,bias own heads,"
        "bias own queries,bias own keys,far bias,far scale,sink of inf,alibi_slopes,bias_slopes,quantised "
        "keys,quantised values,shared scale");
    for (std::string feature; std::getline(features, feature, ',');) EXPECT_GE(drawn[feature], 3) << feature;
}

}  // namespace
}  // namespace softdelta::test
