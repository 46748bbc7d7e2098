// The fast delta rules give the same bits on any number of threads, in every run and in any memory, whether heads are
// few and split or not. Built with a race detector this is also what shows races (.ci/run).
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <cstring>

#include "support/fast_delta.h"
#include "support/levels.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

using Results = FastDelta::Results;

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

// compute(threads, memory) in all ways.
template <class Compute>
void expect_one_result(const Compute& compute, const std::string& what,
                       std::initializer_list<int> teams = {1, 2, 3, 7}) {
    const Results expected = compute(1, Memory::own);
    for (const int threads : teams)
        for (const Memory memory : {Memory::own, Memory::workspace})
            expect_same_bits(compute(threads, memory), expected, std::to_string(threads) + " threads, " + what);
}

template <class Compute>
void check_calls(const Compute& compute) {
    for_each_level([&](const std::string& level) {
        const std::uint64_t first = first_seed(7000), count = static_cast<std::uint64_t>(call_count(48));
        for (std::uint64_t seed = first; seed < first + count; ++seed) {
            const FastDelta call = draw_fast_delta(seed, {DType::f32, DType::bf16});
            expect_one_result([&](int threads, Memory memory) { return compute(call, threads, memory); },
                              level + ", " + call.describe());
        }
    });
}

TEST(DeltaFastThreads, ChangeNoBitForward) {
    check_calls([](const FastDelta& call, int threads, Memory memory) {
        return call.forward(call.forward_names(), on_threads(threads), memory);
    });
}

TEST(DeltaFastThreads, ChangeNoBitBackward) {
    check_calls([](const FastDelta& call, int threads, Memory memory) {
        return call.backward(call.gradient_names(), on_threads(threads), memory, call.drawn_keep());
    });
}

// Many heads of long sequences: how many of them are a unit follows the number of threads.
TEST(DeltaFastThreads, ChangeNoBitOfManyHeads) {
    DeltaRanges ranges{.batch = 1, .tokens = 520, .heads = 32, .group = 1, .key_channels = 16, .value_channels = 16};
    ranges.shortest = 512;
    ranges.dtypes = {DType::f32};
    for_each_level([&](const std::string& level) {
        const std::uint64_t first = first_seed(11000), count = static_cast<std::uint64_t>(call_count(12));
        for (std::uint64_t seed = first; seed < first + count; ++seed) {
            const FastDelta call(draw_delta(seed, ranges));
            const std::string what = level + ", " + call.describe();
            expect_one_result(
                [&](int threads, Memory memory) {
                    return call.forward(call.forward_names(), on_threads(threads), memory);
                },
                what);
            expect_one_result(
                [&](int threads, Memory memory) {
                    return call.backward(call.gradient_names(), on_threads(threads), memory, call.drawn_keep());
                },
                what);
        }
    });
}

// Few heads of long sequences, some of them empty: a head belongs to one thread or to all of them, and in more or fewer
// parts. Backward, where gates rise, it is begun by all and done by one.
TEST(DeltaFastThreads, ChangeNoBitOfFewHeads) {
    DeltaRanges ranges{.batch = 2, .tokens = 1200, .heads = 3, .group = 2, .key_channels = 72, .value_channels = 140};
    ranges.tiled = true;
    for_each_level([&](const std::string& level) {
        const std::uint64_t first = first_seed(13000), count = static_cast<std::uint64_t>(call_count(10));
        for (std::uint64_t seed = first; seed < first + count; ++seed) {
            ranges.dtypes = {seed % 3 == 0 ? DType::bf16 : DType::f32};
            ranges.hard = seed % 4 == 0;
            const FastDelta call(draw_delta(seed, ranges));
            const auto teams = {2, 3, 8, 16, 32};
            const std::string what = level + ", " + call.describe();
            expect_one_result(
                [&](int threads, Memory memory) {
                    return call.forward(call.forward_names(), on_threads(threads), memory);
                },
                what, teams);
            expect_one_result(
                [&](int threads, Memory memory) {
                    return call.backward(call.gradient_names(), on_threads(threads), memory, call.drawn_keep());
                },
                what, teams);
        }
    });
}

// Many value heads of few key heads: they are units in parts, which backward add to the same sums one after the other.
TEST(DeltaFastThreads, ChangeNoBitOfLargeGroups) {
    DeltaRanges ranges{.batch = 2, .tokens = 260, .heads = 2, .group = 9, .key_channels = 40, .value_channels = 40};
    ranges.tiled = ranges.steps = true;
    for_each_level([&](const std::string& level) {
        const std::uint64_t first = first_seed(17000), count = static_cast<std::uint64_t>(call_count(16));
        for (std::uint64_t seed = first; seed < first + count; ++seed) {
            ranges.dtypes = {seed % 3 == 0 ? DType::bf16 : DType::f32};
            ranges.hard = seed % 4 == 0;
            const FastDelta call(draw_delta(seed, ranges));
            const std::string what = level + ", " + call.describe();
            expect_one_result(
                [&](int threads, Memory memory) {
                    return call.forward(call.forward_names(), on_threads(threads), memory);
                },
                what, {2, 5, 16});
            expect_one_result(
                [&](int threads, Memory memory) {
                    return call.backward(call.gradient_names(), on_threads(threads), memory, call.drawn_keep());
                },
                what, {2, 5, 16});
        }
    });
}

// So it is where kept states shrink.
TEST(DeltaFastThreads, ChangeNoBitOfShrinkingStates) {
    for_each_level([&](const std::string& level) {
        const std::uint64_t first = first_seed(15000), count = static_cast<std::uint64_t>(call_count(8));
        for (std::uint64_t seed = first; seed < first + count; ++seed) {
            const FastDelta call = draw_shrinking_states(seed);
            expect_one_result(
                [&](int threads, Memory memory) {
                    return call.backward(call.gradient_names(), on_threads(threads), memory, {384, DType::f32});
                },
                level + ", " + call.describe(), {2, 8});
        }
    });
}

// A few tokens of many sequences with a state each.
TEST(DeltaFastThreads, ChangeNoBitOfAStep) {
    DeltaRanges ranges{.batch = 5, .tokens = 8, .heads = 4, .group = 2, .key_channels = 64, .value_channels = 64};
    ranges.channel_step = 16;
    ranges.shortest = 1;
    ranges.dtypes = {DType::f32};
    for_each_level([&](const std::string& level) {
        const std::uint64_t first = first_seed(9000), count = static_cast<std::uint64_t>(call_count(48));
        for (std::uint64_t seed = first; seed < first + count; ++seed) {
            RandomDelta drawn = draw_delta(seed, ranges);
            Random random(seed);
            drawn.initial_state = Array(DType::f32, drawn.state_shape());
            fill_normal(drawn.initial_state, random);
            const FastDelta call(std::move(drawn));
            expect_one_result(
                [&](int threads, Memory memory) {
                    return call.forward(call.forward_names(), on_threads(threads), memory);
                },
                level + ", " + call.describe());
        }
    });
}

}  // namespace
}  // namespace softdelta::test
