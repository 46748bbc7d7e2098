// A sequence in parts, on a state that stays where it is, is the sequence as a whole; other entries of a pool keep
// every bit.
#include <gtest/gtest.h>

#include <algorithm>

#include "support/levels.h"
#include "support/random_layer.h"

namespace softdelta::test {
namespace {

Execution fast() {
    Execution execution;
    execution.engine = "fast";
    return execution;
}

// Tokens [begin, begin + count) of a tensor [B, T, C].
Tensor tokens_of(const Tensor& t, Index begin, Index count) {
    const auto item = static_cast<Index>(t.dtype() == DType::f32 ? 4 : 2);
    return {static_cast<std::byte*>(t.data()) + begin * t.stride()[1] * item, t.dtype(),
            Shape{t.shape(0), count, t.shape(2)}, t.stride()};
}

// y of B sequences of T tokens in parts, by a pool of states with an entry more than there are sequences.
void check_parts(const LayerCall<Convolution>& call, DType dtype, const std::string& what) {
    const Tensor& x = call["x"].view();
    const Index B = x.shape(0), T = x.shape(1), C = x.shape(2), S = call.state_shape[2];
    if (B == 0) return;
    Random random(call.seed);
    const Array whole(dtype, {B, T, C}), parts(dtype, {B, T, C}), final(dtype, {B, C, S});
    const Array pool = call.seed % 2 == 0 ? Array(dtype, {B + 2, C, S}) : Array(dtype, {B + 2, C, S}, random);
    const Array initial(dtype, {B, C, S}), entries(DType::i64, {B});
    fill_normal(pool, random);
    const Numbers before = pool.values();
    for (Index n = 0; n < B; ++n) {
        const Index entry = (n + 1) % (B + 2);
        entries.set(n, static_cast<double>(entry));
        for (Index i = 0; i < C * S; ++i) initial.set(n * C * S + i, pool.get(entry * C * S + i));
    }
    ConvolutionInputs in = call.inputs();
    in.initial_state = initial.view();
    causal_convolution_forward(in, {.y = whole.view(), .final_state = final.view()}, call.options, fast());
    in.initial_state = {};
    in.state_indices = entries.view();
    for (Index t = 0; t < T;) {
        const Index count = std::min<Index>(1 + static_cast<Index>(random() % 5), T - t);
        in.x = tokens_of(x, t, count);
        causal_convolution_step(in, {.y = tokens_of(parts.view(), t, count), .final_state = pool.view()}, call.options,
                                fast());
        t += count;
    }
    EXPECT_EQ(parts.values(), whole.values()) << what;
    Numbers after = before;
    for (Index n = 0; n < B; ++n)
        for (Index i = 0; i < C * S; ++i)
            after[static_cast<std::size_t>((n + 1) % (B + 2) * C * S + i)] = final.get(n * C * S + i);
    EXPECT_EQ(pool.values(), after) << what;
}

TEST(LayerStep, PartsAreTheWhole) {
    for_each_level([&](const std::string& level) {
        for (std::uint64_t seed = first_seed(), end = seed + static_cast<std::uint64_t>(call_count(120)); seed < end;
             ++seed) {
            const DType dtype = seed % 3 == 0 ? DType::f32 : seed % 3 == 1 ? DType::bf16 : DType::f16;
            LayerCall<Convolution> call = draw_convolution(seed, {.tokens = 40, .channels = 70, .dtypes = {dtype}});
            for (const char* name : {"cu_seqlens", "initial_state"}) call.given.erase(name);
            call.state_shape[0] = call["x"].view().shape(0);
            check_parts(call, dtype, level + ", " + call.describe());
            if (HasFailure()) return;
        }
    });
}

// −1: no sequence. Its y is 0, and no state is touched, whatever lies in it.
TEST(LayerStep, PaddingTouchesNothing) {
    for_each_level([&](const std::string& level) {
        for (const std::string engine : {"fast", "reference"}) {
            Random random(3);
            const Array x(DType::f32, {3, 2, 20}), y(DType::f32, {3, 2, 20}), weight(DType::f32, {20, 4}),
                pool(DType::f32, {2, 20, 4}), entries(DType::i32, {3});
            for (const Array* a : {&x, &weight, &pool}) fill_normal(*a, random);
            for (Index n = 0; n < 3; ++n) entries.set(n, n == 1 ? 1 : -1);
            const Numbers before = pool.values();
            Execution execution;
            execution.engine = engine;
            causal_convolution_step({.x = x.view(), .weight = weight.view(), .state_indices = entries.view()},
                                    {.y = y.view(), .final_state = pool.view()}, {}, execution);
            const Numbers after = pool.values(), results = y.values();
            EXPECT_TRUE(std::equal(before.begin(), before.begin() + 80, after.begin())) << level;
            EXPECT_NE(after[80], before[80]) << level;
            for (std::size_t i = 0; i < results.size(); ++i)
                EXPECT_EQ(results[i] == 0, i / 40 != 1) << level << ", element " << i;
        }
    });
}

// From one entry, which others may read too, or from none; to another one, or nowhere.
TEST(LayerStep, StatesAreReadAndWrittenApart) {
    for_each_level([&](const std::string& level) {
        for (const std::string engine : {"fast", "reference"})
            for (const Index tokens : {0, 1, 2, 9}) {
                Random random(3);
                const Array x(DType::f32, {4, tokens, 20}), y(DType::f32, {4, tokens, 20}), weight(DType::f32, {20, 4}),
                    pool(DType::f32, {7, 20, 4}), initial(DType::f32, {4, 20, 4}), alone(DType::f32, {4, tokens, 20}),
                    read(DType::i32, {4}), written(DType::i64, {4}), begins(DType::boolean, {4});
                for (const Array* a : {&x, &weight, &pool}) fill_normal(*a, random);
                const Index from[] = {1, 1, 2, 1}, to[] = {3, 6, 2, -1};
                const Numbers before = pool.values();
                for (Index n = 0; n < 4; ++n) {
                    read.set(n, static_cast<double>(from[n])), written.set(n, static_cast<double>(to[n]));
                    begins.set(n, n == 1 ? 0 : 1);
                    for (Index i = 0; i < 80; ++i) initial.set(n * 80 + i, n == 1 ? 0 : pool.get(from[n] * 80 + i));
                }
                Execution execution;
                execution.engine = engine;
                causal_convolution_step({.x = x.view(), .weight = weight.view()},
                                        {.y = alone.view(), .final_state = initial.view()}, {}, execution);
                const ConvolutionInputs in{.x = x.view(),
                                           .weight = weight.view(),
                                           .state_indices = read.view(),
                                           .final_state_indices = written.view(),
                                           .has_initial_state = begins.view()};
                causal_convolution_step(in, {.y = y.view(), .final_state = pool.view()}, {}, execution);
                EXPECT_EQ(y.values(), alone.values()) << level << ", " << engine << ", " << tokens;
                Numbers after = before;
                for (Index n = 0; n < 3; ++n)
                    for (Index i = 0; i < 80; ++i)
                        after[static_cast<std::size_t>(to[n] * 80 + i)] = initial.get(n * 80 + i);
                EXPECT_EQ(pool.values(), after) << level << ", " << engine << ", " << tokens;
            }
    });
}

// An Inf or NaN changes no bit of an earlier token, nor of another channel.
TEST(LayerStep, NonfiniteTokensStayInTheFuture) {
    for_each_level([&](const std::string& level) {
        for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
            Random random(5);
            const Array x(DType::bf16, {1, 300, 40}), y(DType::bf16, {1, 300, 40}), weight(DType::f32, {40, 4});
            for (const Array* a : {&x, &weight}) fill_normal(*a, random);
            const ConvolutionInputs in{.x = x.view(), .weight = weight.view()};
            const ConvolutionOptions silu{Activation::silu};
            causal_convolution_forward(in, {.y = y.view()}, silu, fast());
            const Numbers clean = y.values();
            x.set({0, 257, 17}, value);
            causal_convolution_forward(in, {.y = y.view()}, silu, fast());
            for (Index t = 0; t < 300; ++t)
                for (Index c = 0; c < 40; ++c) {
                    if (c == 17 && t >= 257 && t < 261) continue;  // it sees that token
                    ASSERT_EQ(y.get({0, t, c}), clean[static_cast<std::size_t>(t * 40 + c)]) << level << ' ' << t;
                }
        }
    });
}

}  // namespace
}  // namespace softdelta::test
