// The fast engine gives the same bits on any number of threads, in every run and in any memory. Built with a race
// detector this is also what shows races (.ci/run).
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <cstring>

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
            for (const int threads : {1, 2, 3, 7})
                for (const Memory memory : {Memory::own, Memory::workspace})
                    expect_same_bits(compute(call, threads, memory), expected,
                                     level + ", " + std::to_string(threads) + " threads, " + call.describe());
        }
    });
}

}  // namespace
}  // namespace softdelta::test
