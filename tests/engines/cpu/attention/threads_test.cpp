// The fast engine gives the same bits on any number of threads, in every run and in any memory. Built with a race
// detector this is also what shows races (.ci/run).
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "support/fast_attention.h"
#include "support/levels.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

Execution on_threads(int threads) {
    Execution execution;
    execution.engine = "fast";
    execution.threads = threads;
    return execution;
}

void expect_same_bits(const Results& actual, const Results& expected, const std::string& what) {
    for (const auto& [name, tensor] : expected)
        EXPECT_EQ(std::memcmp(actual.at(name).data(), tensor.data(), tensor.bytes()), 0) << what << ": " << name;
}

// Everything that the call can give.
Results compute(const FastAttention& call, int threads, Memory memory) {
    Results all = call.forward(call.forward_names(), on_threads(threads), memory);
    const Names gradients = call.gradient_names();
    if (!gradients.empty()) all.merge(call.backward(gradients, all, on_threads(threads), memory));
    return all;
}

TEST(AttentionFastThreads, ChangeNoBit) {
    for_each_level([](const std::string& level) {
        for (std::uint64_t seed = first_seed(); seed < first_seed() + static_cast<std::uint64_t>(call_count(50));
             ++seed) {
            const FastAttention call = draw_fast_attention(seed);
            const Results expected = compute(call, 1, Memory::own);
            for (const int threads : {1, 2, 3, 7, 24})
                for (const Memory memory : {Memory::own, Memory::workspace})
                    expect_same_bits(compute(call, threads, memory), expected,
                                     level + ", " + std::to_string(threads) + " threads, " + call.describe());
        }
    });
}

// What a call of one sequence has besides keys and values of numbers around 0.
struct Rows {
    Index queries, heads;
    AttentionOptions options{};
    double scale = 1;                          // of queries
    Index infinite_value = -1, no_value = -1;  // keys with an Inf or a NaN
    Index infinite_key = -1;
};

// Many rows, which more threads cut into shorter blocks, over several blocks of keys. Among them heads whose last block
// is one row, and windows that begin within a block of keys, or where a micropanel does.
TEST(AttentionFastThreads, BlocksOfRowsMayHaveAnyLength) {
    constexpr Index Lk = 2300;
    const AttentionOptions top{.causal = Causal::top_left}, bottom{.causal = Causal::bottom_right},
        window{.window_left = 700, .window_right = 100};
    constexpr Index panel = 1056;                                      // where a micropanel begins on every level
    const AttentionOptions from_panel{.window_left = Lk - 1 - panel};  // what the last query sees
    const auto bytes_of = [](const Array& t) {
        return static_cast<std::size_t>(t.count()) * (t.view().dtype() == DType::f32 ? 4 : 2);
    };
    const Rows cases[] = {
        {.queries = 900, .heads = 2},
        {.queries = 900, .heads = 2, .options = top, .scale = 20},
        {.queries = 900, .heads = 2, .options = bottom, .infinite_value = 450, .no_value = 2000},
        {.queries = 900, .heads = 2, .options = window, .scale = 5, .infinite_value = 450},
        {.queries = 900, .heads = 1, .options = top, .infinite_key = 300},
        {.queries = 65, .heads = 1, .options = from_panel, .infinite_value = 1100},
        {.queries = 361, .heads = 1, .options = from_panel, .infinite_value = 1100},
        {.queries = 661, .heads = 1, .options = from_panel, .infinite_value = 1100},
    };
    for_each_level([&](const std::string& level) {
        for (const DType dtype : {DType::f32, DType::bf16})
            for (const Index D : {64, 96, 128})
                for (const Rows& c : cases) {
                    Random random(static_cast<std::uint64_t>(D));
                    const Array q(dtype, {1, c.queries, c.heads, D}), k(dtype, {1, Lk, 1, D}), v(dtype, {1, Lk, 1, D});
                    for (const Array* t : {&q, &k, &v}) fill_normal(*t, random);
                    for (Index i = 0; i < q.count(); ++i) q.set(i, c.scale * q.get(i));
                    if (c.infinite_value >= 0) v.set(c.infinite_value * D + 3, INFINITY);
                    if (c.no_value >= 0) v.set(c.no_value * D, NAN);
                    if (c.infinite_key >= 0) k.set(c.infinite_key * D, INFINITY);
                    const auto compute_on = [&](int threads) {
                        Array o(dtype, {1, c.queries, c.heads, D}), lse(DType::f32, {1, c.heads, c.queries});
                        attention_forward({.q = q.view(), .k = k.view(), .v = v.view()},
                                          {.o = o.view(), .lse = lse.view()}, c.options, on_threads(threads));
                        return std::array<Array, 2>{std::move(o), std::move(lse)};
                    };
                    const auto expected = compute_on(1);
                    for (const int threads : {2, 5, 24}) {
                        const auto actual = compute_on(threads);
                        for (std::size_t i = 0; i < 2; ++i)
                            EXPECT_EQ(
                                std::memcmp(actual[i].view().data(), expected[i].view().data(), bytes_of(actual[i])), 0)
                                << level << ", D " << D << ", case " << &c - cases << ", " << threads << " threads";
                    }
                }
    });
}

}  // namespace
}  // namespace softdelta::test
