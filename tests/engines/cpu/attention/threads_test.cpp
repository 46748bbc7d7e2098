// The fast engine gives the same bits on any number of threads, in every run and in any memory. Built with a race
// detector this is also what shows races (.ci/run).
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

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
    execution.engine = Engine::fast;
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

// Many rows, which more threads cut into shorter blocks, over several blocks of keys; windows that begin within one,
// and keys and values that are not finite where some rows see them.
TEST(AttentionFastThreads, BlocksOfRowsMayHaveAnyLength) {
    constexpr Index B = 1, Lq = 900, Lk = 2300, H = 2, Hk = 1;
    const AttentionOptions cases[] = {{},
                                      {.causal = Causal::top_left},
                                      {.causal = Causal::bottom_right},
                                      {.window_left = 700, .window_right = 100},
                                      {.causal = Causal::bottom_right, .window_left = 40}};
    for_each_level([&](const std::string& level) {
        for (const DType dtype : {DType::f32, DType::bf16})
            for (const Index D : {64, 96, 128}) {
                Random random(static_cast<std::uint64_t>(D));
                const Array q(dtype, {B, Lq, H, D}), k(dtype, {B, Lk, Hk, D}), v(dtype, {B, Lk, Hk, D});
                for (const Array* t : {&q, &k, &v}) fill_normal(*t, random);
                for (const bool is_finite : {true, false}) {
                    if (!is_finite) v.set(450 * D + 3, INFINITY), v.set(2000 * D, NAN), k.set(1500 * D, INFINITY);
                    for (const AttentionOptions& options : cases) {
                        const auto compute_on = [&](int threads) {
                            Array o(dtype, {B, Lq, H, D}), lse(DType::f32, {B, H, Lq});
                            attention_forward({.q = q.view(), .k = k.view(), .v = v.view()},
                                              {.o = o.view(), .lse = lse.view()}, options, on_threads(threads));
                            return std::pair(std::move(o), std::move(lse));
                        };
                        const auto expected = compute_on(1);
                        for (const int threads : {2, 5, 24}) {
                            const auto actual = compute_on(threads);
                            for (const auto& [x, y] : {std::pair(&expected.first, &actual.first),
                                                       std::pair(&expected.second, &actual.second)})
                                EXPECT_EQ(std::memcmp(
                                              x->view().data(), y->view().data(),
                                              static_cast<std::size_t>(
                                                  x->count() * (x == &expected.first && dtype == DType::bf16 ? 2 : 4))),
                                          0)
                                    << level << ", D " << D << ", option " << &options - cases << ", finite "
                                    << is_finite << ", " << threads << " threads";
                        }
                    }
                }
            }
    });
}

}  // namespace
}  // namespace softdelta::test
