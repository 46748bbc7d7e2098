// The fast convolution and norm give the same bits on any number of threads and in any memory. Built with a race
// detector this is also what shows races (.ci/run).
#include <gtest/gtest.h>

#include <cstring>

#include "support/levels.h"
#include "support/random_layer.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

// Ranges of tokens, parts of channels and several sequences.
LayerRanges ranges_of(std::uint64_t seed) {
    return {.tokens = seed % 2 == 0 ? 1300 : 60,
            .channels = seed % 2 == 0 ? 12 : 700,
            .dtypes = {seed % 3 == 0 ? DType::f32 : DType::bf16}};
}

template <class Family>
void expect_same_bits(const LayerCall<Family>& call, bool backward, const std::string& level) {
    const std::vector<std::string>& names = backward ? call.wanted : call.outputs;
    const std::vector<DType> dtypes{DType::f32};
    const StoredByName expected = fast_results(call, names, backward, dtypes, 1);
    for (const int threads : {2, 3, 7})
        for (const Memory memory : {Memory::own, Memory::workspace})
            for (const auto& [name, stored] : fast_results(call, names, backward, dtypes, threads, memory)) {
                const Numbers &actual = stored.numbers, &one = expected.at(name).numbers;
                const bool same =
                    one.empty() || std::memcmp(actual.data(), one.data(), one.size() * sizeof(double)) == 0;
                ASSERT_TRUE(same) << level << ", " << threads << " threads, " << name << ", " << call.describe();
            }
}

TEST(LayerFastThreads, ChangeNoBit) {
    for_each_level([&](const std::string& level) {
        const std::uint64_t first = first_seed(300), count = static_cast<std::uint64_t>(call_count(10));
        for (std::uint64_t seed = first; seed < first + count; ++seed)
            for (const bool backward : {false, true}) {
                expect_same_bits(draw_convolution(seed, ranges_of(seed)), backward, level);
                expect_same_bits(draw_norm(seed, {.tokens = 400, .channels = 40, .dtypes = {DType::bf16}}), backward,
                                 level);
                if (testing::Test::HasFailure()) return;
            }
    });
}

}  // namespace
}  // namespace softdelta::test
