// The backward pass where matrix tiles are whole: rows, keys and channels that are multiples of 32, more heads than
// have memory for sums at a time, and an Inf that some rows see. Against the f64 truth, on any number of threads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "support/fast_attention.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

struct Case {
    const char* name;
    Index B, Lq, Lk, H, Hk, D, Dv;
    AttentionOptions options{};
    bool sink = false, saved = true;
    Index infinite = -1;  // a key that holds an Inf; rows from this one on see it
};

struct Gradients {
    Array dq, dk, dv;
    std::vector<const Array*> all() const { return {&dq, &dk, &dv}; }
};

Gradients compute(const Case& c, DType dtype, const AttentionInputs& in, const AttentionGradients& given,
                  const Execution& execution) {
    Gradients g{{dtype, {c.B, c.Lq, c.H, c.D}}, {dtype, {c.B, c.Lk, c.Hk, c.D}}, {dtype, {c.B, c.Lk, c.Hk, c.Dv}}};
    AttentionGradients gradients = given;
    gradients.dq = g.dq.view(), gradients.dk = g.dk.view(), gradients.dv = g.dv.view();
    attention_backward(in, gradients, c.options, execution);
    return g;
}

void check(const Case& c, const std::string& level) {
    Random random(1);
    const Array q(DType::bf16, {c.B, c.Lq, c.H, c.D}), k(DType::bf16, {c.B, c.Lk, c.Hk, c.D}),
        v(DType::bf16, {c.B, c.Lk, c.Hk, c.Dv}), o(DType::bf16, {c.B, c.Lq, c.H, c.Dv}),
        d_o(DType::bf16, {c.B, c.Lq, c.H, c.Dv}), lse(DType::f32, {c.B, c.H, c.Lq}), sink(DType::f32, {c.H});
    for (const Array* t : {&q, &k, &v, &d_o, &sink}) fill_normal(*t, random);
    if (c.infinite >= 0) k.set(c.infinite * c.Hk * c.D, INFINITY);
    AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view()};
    if (c.sink) in.sink = sink.view();
    Execution fast;
    fast.engine = "fast";
    AttentionGradients given{.d_o = d_o.view()};
    if (c.saved) {
        attention_forward(in, {.o = o.view(), .lse = lse.view()}, c.options, fast);
        given.o = o.view(), given.lse = lse.view();
    }
    const Gradients truth = compute(c, DType::f64, in, {.d_o = d_o.view()}, {.engine = "reference"});
    fast.threads = 1;
    const Gradients results = compute(c, DType::bf16, in, given, fast);
    for (std::size_t i = 0; i < 3; ++i) {
        const std::vector<double> expected = truth.all()[i]->values(), actual = results.all()[i]->values();
        double size = 0, error = 0;
        for (std::size_t e = 0; e < expected.size(); ++e) {
            const bool sees_infinite = i == 0 && c.infinite >= 0 && static_cast<Index>(e) >= c.infinite * c.H * c.D;
            if (sees_infinite || !std::isfinite(expected[e])) continue;
            size += expected[e] * expected[e];
            error += (actual[e] - expected[e]) * (actual[e] - expected[e]);
        }
        EXPECT_LT(std::sqrt(error / size), 0.01) << level << ", " << c.name << ", " << i;  // NaN is not less
    }
    for (const int threads : {2, 3}) {
        fast.threads = threads;
        const Gradients others = compute(c, DType::bf16, in, given, fast);
        for (std::size_t i = 0; i < 3; ++i) {
            const Tensor x = results.all()[i]->view(), y = others.all()[i]->view();
            EXPECT_EQ(std::memcmp(x.data(), y.data(), static_cast<std::size_t>(x.count()) * 2), 0)
                << level << ", " << c.name << ", " << threads << " threads";
        }
    }
}

TEST(AttentionFastWholeTiles, BackwardIsRight) {
    const AttentionOptions causal{.causal = Causal::top_left}, bottom{.causal = Causal::bottom_right},
        window{.window_left = 40, .window_right = 100};
    for_each_level([&](const std::string& level) {
        for (const Case& c : {
                 Case{"full", 1, 416, 448, 2, 2, 64, 64},
                 Case{"many heads", 3, 64, 64, 7, 7, 32, 32},
                 Case{"causal", 1, 832, 832, 1, 1, 64, 64, causal},
                 Case{"causal, long scores", 1, 128, 128, 2, 2, 128, 128, causal, false, false},
                 Case{"rows that see nothing", 1, 192, 96, 2, 1, 64, 32, bottom},
                 Case{"groups, window", 2, 480, 512, 4, 2, 32, 96, window},
                 Case{"groups that end within 32 rows", 1, 80, 96, 4, 2, 64, 64, causal},
                 Case{"sink", 1, 128, 160, 2, 2, 64, 64, {}, true},
                 Case{"Inf", 1, 448, 448, 1, 1, 64, 64, causal, false, true, 420},
                 Case{"rest of a tile", 1, 400, 432, 1, 1, 64, 64, causal},
                 Case{"rows of 96", 1, 96, 128, 1, 1, 96, 96, causal},
                 Case{"rows of 192 and 128", 1, 64, 96, 1, 1, 192, 128},
                 Case{"rows of 256", 1, 64, 96, 1, 1, 256, 256, causal},
             })
            check(c, level);
    });
}

}  // namespace
}  // namespace softdelta::test
