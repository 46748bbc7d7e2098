// Attention on some rows and some keys of a longer call: with offsets it sees what the whole call sees there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "support/array.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

// Rows [begin, end) of dimension 1.
Tensor rows(const Array& a, Index begin, Index end) {
    const Tensor& t = a.view();
    std::vector<Index> shape(t.shape().begin(), t.shape().end());
    shape[1] = end - begin;
    return {static_cast<char*>(t.data()) + begin * t.stride()[1] * (t.dtype() == DType::f64 ? 8 : 4), t.dtype(), shape,
            t.stride()};
}

struct Sizes {
    Index Lq, Lk, q0, q1, k0, k1;
};

// The positions of the whole call as a mask of the shard.
std::string check(Random& random, const Execution& execution, DType dtype, const Sizes& s, double limit) {
    const auto between = [&](Index low, Index high) { return std::uniform_int_distribution<Index>(low, high)(random); };
    const Index H = 2, D = 4, queries = s.q1 - s.q0, keys = s.k1 - s.k0;
    AttentionOptions whole;
    whole.causal = static_cast<Causal>(between(0, 2));
    whole.window_left = between(0, 1) == 0 ? -1 : between(0, s.Lk);
    whole.window_right = between(0, 1) == 0 ? -1 : between(0, s.Lk);
    const Array q(dtype, {1, s.Lq, H, D}), k(dtype, {1, s.Lk, 1, D}), v(dtype, {1, s.Lk, 1, D}),
        d_o(dtype, {1, s.Lq, H, D}), dlse(dtype, {1, H, queries});
    for (const Array* a : {&q, &k, &v, &d_o, &dlse}) fill_normal(*a, random);
    const Array seen(DType::boolean, {1, 1, queries, keys});
    const Index diagonal = whole.causal == Causal::top_left ? 0 : s.Lk - s.Lq;
    for (Index i = 0; i < queries; ++i)
        for (Index j = 0; j < keys; ++j) {
            const Index at = s.k0 + j - (s.q0 + i + diagonal);
            seen.set({0, 0, i, j}, (whole.causal == Causal::none || at <= 0) &&
                                       (whole.window_left < 0 || at >= -whole.window_left) &&
                                       (whole.window_right < 0 || at <= whole.window_right));
        }
    AttentionOptions part = whole;  // the diagonal of a shard's ends is not that of the whole
    part.query_offset = s.q0 + (whole.causal == Causal::top_left ? 0 : diagonal - (keys - queries));
    part.key_offset = s.k0;
    AttentionInputs in{.q = rows(q, s.q0, s.q1), .k = rows(k, s.k0, s.k1), .v = rows(v, s.k0, s.k1)};

    const auto results = [&](const AttentionInputs& inputs, const AttentionOptions& options, const Execution& e,
                             DType type) {
        std::vector<Array> all;
        for (const Shape& shape : {Shape{1, queries, H, D}, Shape{1, H, queries}, Shape{1, queries, H, D},
                                   Shape{1, keys, 1, D}, Shape{1, keys, 1, D}})
            all.emplace_back(type, shape);
        attention_forward(inputs, {all[0].view(), all[1].view()}, options, e);
        AttentionGradients g;
        g.d_o = rows(d_o, s.q0, s.q1), g.dlse = dlse.view();
        g.dq = all[2].view(), g.dk = all[3].view(), g.dv = all[4].view();
        attention_backward(inputs, g, options, e);
        return all;
    };
    const std::vector<Array> x = results(in, part, execution, dtype);
    in.mask = seen.view();
    Execution reference;
    reference.engine = "reference";
    reference.threads = 1;
    const std::vector<Array> truth = results(in, {}, reference, DType::f64);
    const char* names[] = {"o", "lse", "dq", "dk", "dv"};
    for (std::size_t t = 0; t < x.size(); ++t)
        for (Index i = 0; i < x[t].count(); ++i) {
            const double a = x[t].get(i), b = truth[t].get(i);
            if (!(a == b || std::abs(a - b) <= limit * (1 + std::abs(b))))
                return std::string(names[t]) + "[" + std::to_string(i) + "]: " + std::to_string(a) + ", expected " +
                       std::to_string(b) + ", causal " + std::to_string(static_cast<int>(whole.causal));
        }
    return "";
}

Sizes draw_sizes(Random& random, Index most) {
    const auto between = [&](Index low, Index high) { return std::uniform_int_distribution<Index>(low, high)(random); };
    Sizes s{between(1, most), between(1, most), 0, 0, 0, 0};
    s.q0 = between(0, s.Lq - 1), s.q1 = between(s.q0 + 1, s.Lq);
    s.k0 = between(0, s.Lk - 1), s.k1 = between(s.k0, s.Lk);
    return s;
}

TEST(AttentionShard, SeesWhatTheWholeSees) {
    for (const std::string engine : {"reference", "stages_f64"}) {
        Random random(first_seed());
        Execution execution;
        execution.engine = engine;
        execution.threads = 1;
        for (int n = 0; n < 150; ++n)
            ASSERT_EQ(check(random, execution, DType::f64, draw_sizes(random, n % 10 == 0 ? 150 : 20), 1e-12), "")
                << "call " << n << " of engine " << engine;
    }
}

TEST(AttentionShard, OfTheFastEngineSeesWhatTheWholeSees) {
    Execution execution;
    execution.engine = "fast";
    execution.threads = 1;
    for_each_level([&](const std::string& level) {
        Random random(first_seed());
        for (int n = 0; n < 150; ++n)
            ASSERT_EQ(check(random, execution, DType::f32, draw_sizes(random, n % 5 == 0 ? 400 : 30), 2e-4), "")
                << level << ": call " << n;
    });
}

TEST(AttentionShard, OfTheGpuSeesWhatTheWholeSees) {
    const std::vector<EngineInfo> engines = list_engines();
    if (std::none_of(engines.begin(), engines.end(),
                     [](const EngineInfo& e) { return e.name == "cuda" && e.available; }))
        GTEST_SKIP() << "no GPU";
    Execution execution;
    execution.engine = "cuda";
    Random random(first_seed());
    for (int n = 0; n < call_count(60); ++n)
        ASSERT_EQ(check(random, execution, DType::f32, draw_sizes(random, n % 10 == 0 ? 150 : 30), 2e-4), "") << n;
}

}  // namespace
}  // namespace softdelta::test
