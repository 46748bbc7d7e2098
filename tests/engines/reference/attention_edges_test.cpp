// Numbers at the edge of f32 in attention, on every engine and instruction set: rows masked by one finite number, sinks
// of ±∞, scales of 0 and near it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "support/array.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

constexpr Index heads = 3, size = 24;
constexpr float largest = std::numeric_limits<float>::max();

using Numbers = std::map<std::string, std::vector<double>>;

// A call of f32 numbers, all heads alike; few rows, some, and more than one block of them.
struct Problem {
    Index queries, keys;
    Array q, k, v, d_o, dlse, bias, sink;
    AttentionOptions options;

    explicit Problem(Index rows, DType dtype = DType::f32)
        : queries(rows),
          keys(rows < 60 ? 700 : rows + 3),
          q(dtype, {1, queries, heads, size}),
          k(dtype, {1, keys, heads, size}),
          v(dtype, {1, keys, heads, size}),
          d_o(dtype, {1, queries, heads, size}),
          dlse(DType::f32, {1, heads, queries}) {
        Random random(1);
        for (const Array* array : {&q, &k, &v, &d_o, &dlse}) fill_normal(*array, random);
    }

    Numbers compute(const std::string& engine, bool saved) const {
        const DType wide = engine == "reference" ? DType::f64 : DType::f32;
        const Array o(wide, {1, queries, heads, size}), lse(wide, {1, heads, queries});
        const Array dq(wide, {1, queries, heads, size}), dk(wide, {1, keys, heads, size}),
            dv(wide, {1, keys, heads, size}), dsink(wide, {heads});
        const std::span<const Index> shape = bias.view().shape();
        const Array dbias = bias.view() ? Array(wide, Shape(shape.begin(), shape.end())) : Array();
        Execution execution;
        execution.engine = engine;
        execution.threads = 1;
        const AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view(), .bias = bias.view(), .sink = sink.view()};
        attention_forward(in, {.o = o.view(), .lse = lse.view()}, options, execution);
        attention_backward(in,
                           {.o = saved ? o.view() : Tensor(),
                            .lse = saved ? lse.view() : Tensor(),
                            .d_o = d_o.view(),
                            .dlse = dlse.view(),
                            .dq = dq.view(),
                            .dk = dk.view(),
                            .dv = dv.view(),
                            .dbias = dbias.view(),
                            .dsink = sink.view() ? dsink.view() : Tensor()},
                           options, execution);
        Numbers results{{"o", o.values()},   {"lse", lse.values()}, {"dq", dq.values()},
                        {"dk", dk.values()}, {"dv", dv.values()},   {"dbias", dbias.values()}};
        if (sink.view()) results["dsink"] = dsink.values();
        return results;
    }
};

// Of a result, to the largest of the truth; infinities must agree.
double error_of(const std::vector<double>& actual, const std::vector<double>& truth) {
    double error = 0, scale = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) {
        if (std::isinf(truth[i]) ? actual[i] != truth[i] : !std::isfinite(actual[i])) return INFINITY;
        if (std::isinf(truth[i])) continue;
        error = std::max(error, std::abs(actual[i] - truth[i]));
        scale = std::max(scale, std::abs(truth[i]));
    }
    return error / (scale > 0 ? scale : 1);
}

void expect_close(const Numbers& actual, const Numbers& truth, double limit, const std::string& what) {
    for (const auto& [name, numbers] : truth)
        EXPECT_LE(error_of(actual.at(name), numbers), limit) << what << ": " << name;
}

// Every engine that computes in f32, with o and lse saved for the way back and without.
void for_each_engine(const std::function<void(const std::string&, bool saved, const std::string& what)>& visit) {
    for (const bool saved : {false, true}) {
        visit("stages_f32", saved, "stages_f32");
        for_each_level([&](const std::string& level) { visit("fast", saved, level); });
    }
}

// f32 keeps nothing of the scores of row 1: it is an average. A truth in f64 does, and gets scores of 0.
TEST(AttentionEdges, RowsMaskedByOneNumber) {
    for (const Index queries : {3, 40, 200})
        for (const double number :
             {-1e9, -1e10, -1e20, -0x1.fep127, -static_cast<double>(largest), 1e10, static_cast<double>(largest)}) {
            Problem given(queries), kept(queries);
            given.bias = Array(DType::f32, {1, 1, queries, given.keys});
            kept.bias = Array(DType::f64, {1, heads, queries, kept.keys});
            for (Index j = 0; j < given.keys; ++j) given.bias.set({0, 0, 1, j}, number);
            for (Index h = 0; h < heads; ++h)
                for (Index j = 0; j < given.keys; ++j) {
                    double score = 0;
                    for (Index c = 0; c < size; ++c) score += given.q.get({0, 1, h, c}) * given.k.get({0, j, h, c});
                    kept.bias.set({0, h, 1, j}, -score / std::sqrt(static_cast<double>(size)));
                }
            Numbers truth = kept.compute("reference", false);
            std::vector<double>& dbias = truth["dbias"];
            const auto own = static_cast<std::size_t>(queries * kept.keys);
            for (std::size_t i = own; i < dbias.size(); ++i) dbias[i % own] += dbias[i];
            dbias.resize(own);
            for (Index h = 0; h < heads; ++h) truth["lse"][static_cast<std::size_t>(h * queries + 1)] += number;
            for_each_engine([&](const std::string& engine, bool saved, const std::string& level) {
                expect_close(given.compute(engine, saved), truth, 4e-6,
                             level + ", " + std::to_string(queries) + " rows, one by " + std::to_string(number) +
                                 (saved ? ", saved" : ""));
            });
        }
}

// −∞ is no sink, +∞ has all the weight.
TEST(AttentionEdges, SinksOfInfinity) {
    for (const Index queries : {3, 40, 200}) {
        Problem with(queries), without(queries);
        with.sink = Array(DType::f32, {heads});
        without.sink = Array(DType::f32, {heads});
        const double sinks[] = {-INFINITY, INFINITY, 0.5};
        for (Problem* problem : {&with, &without}) {
            problem->bias = Array(DType::f32, {1, 1, queries, problem->keys});
            for (Index j = 0; j < problem->keys; ++j) problem->bias.set({0, 0, 2, j}, -INFINITY);  // row 2 sees nothing
        }
        for (Index h = 0; h < heads; ++h) {
            with.sink.set(h, sinks[h]);
            without.sink.set(h, std::isfinite(sinks[h]) ? sinks[h] : sinks[h] > 0 ? 1e4 : -1e4);
        }
        Numbers truth = without.compute("reference", false);
        truth["lse"][2] = -INFINITY;  // head 0: its row without keys has no sink either
        for (Index i = 0; i < queries; ++i) truth["lse"][static_cast<std::size_t>(queries + i)] = INFINITY;
        truth["dsink"][0] = 0;
        const std::vector<double> dsink = truth["dsink"];
        expect_close(with.compute("reference", false), truth, 1e-12, "reference");
        expect_close(with.compute("stages_f64", false), truth, 1e-6, "stages_f64");
        for_each_engine([&](const std::string& engine, bool saved, const std::string& level) {
            expect_close(with.compute(engine, saved), truth, 1e-5,
                         level + ", " + std::to_string(queries) + " rows" + (saved ? ", saved" : ""));
        });
    }
}

TEST(AttentionEdges, ScalesNearZero) {
    for (const Index queries : {3, 40, 200})
        for (const double scale : {0.0, 1e-20, 1e-38, 1e-42, 1e-60}) {
            Problem problem(queries);
            problem.options.scale = scale;
            problem.options.causal = Causal::bottom_right;
            const Numbers truth = problem.compute("reference", false);
            for_each_engine([&](const std::string& engine, bool saved, const std::string& level) {
                const Numbers actual = problem.compute(engine, saved);
                const std::string what =
                    level + ", " + std::to_string(queries) + " rows, scale " + std::to_string(scale);
                for (const char* name : {"o", "lse", "dv"})
                    EXPECT_LE(error_of(actual.at(name), truth.at(name)), 4e-6) << what << ": " << name;
                for (const char* name : {"dq", "dk"})  // times the scale
                    for (const double x : actual.at(name)) ASSERT_LE(std::abs(x), 1e3 * scale) << what << ": " << name;
            });
        }
}

// Scores of 1e9 and more: a row is what its largest score says, or several that f32 cannot tell apart.
TEST(AttentionEdges, ScoresBeyondABillion) {
    for (const Index queries : {3, 40, 200})
        for (const double scale : {1e8, 1e12, 1e30, -1e12}) {
            Problem problem(queries);
            problem.options.scale = scale;
            const Numbers truth = problem.compute("reference", false);
            for_each_engine([&](const std::string& engine, bool saved, const std::string& level) {
                const Numbers actual = problem.compute(engine, saved);
                const std::string what =
                    level + ", " + std::to_string(queries) + " rows, scale " + std::to_string(scale);
                for (const char* name : {"o", "lse", "dv"})
                    EXPECT_LE(error_of(actual.at(name), truth.at(name)), 1e-5) << what << ": " << name;
            });
        }
}

// In a window the way back takes as long for a row whatever the number of rows.
TEST(AttentionEdges, TimeOfAWindowGrowsWithTheSequence) {
    const auto seconds = [](Index rows) {
        constexpr Index width = 4;
        Random random(1);
        Array x(DType::f32, {1, rows, 1, width});
        fill_normal(x, random);
        const Array dq(DType::f32, {1, rows, 1, width}), dk(DType::f32, {1, rows, 1, width}),
            dv(DType::f32, {1, rows, 1, width});
        AttentionOptions options;
        options.causal = Causal::top_left;
        options.window_left = 8;
        double best = INFINITY;
        for (int i = 0; i < 3; ++i) {
            const auto begin = std::chrono::steady_clock::now();
            attention_backward({.q = x.view(), .k = x.view(), .v = x.view()},
                               {.d_o = x.view(), .dq = dq.view(), .dk = dk.view(), .dv = dv.view()}, options, {});
            const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
            best = std::min(best, time.count());
        }
        return best;
    };
    EXPECT_LT(seconds(Index{1} << 20), 8 * seconds(Index{1} << 18));
}

}  // namespace
}  // namespace softdelta::test
