// Indices of a pool of states: none outside, none twice, and looked at without an allocation, since a step has them for
// each token.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "softdelta/softdelta.hpp"
#include "support/allocations.h"
#include "support/error_of.h"

namespace softdelta::test {
namespace {

using std::int64_t;

// One token for each of N sequences, on a pool of 1 × 1 states.
struct Step {
    std::vector<float> rows, o, states;
    std::vector<int64_t> indices;
    DeltaInputs in{};
    DeltaOutputs out{};
    Execution execution{.engine = "fast", .threads = 1};

    Step(std::vector<int64_t> given, int64_t pool)
        : rows(given.size(), 0.5F),
          o(given.size()),
          states(static_cast<std::size_t>(pool), 0.25F),
          indices(std::move(given)) {
        const auto N = static_cast<int64_t>(indices.size());
        in.q = in.k = in.v = Tensor(rows.data(), DType::f32, {N, 1, 1, 1});
        in.g = in.beta = Tensor(rows.data(), DType::f32, {N, 1, 1});
        in.initial_state = out.final_state = Tensor(states.data(), DType::f32, {pool, 1, 1, 1});
        in.state_indices = Tensor(indices.data(), DType::i64, {N});
        out.o = Tensor(o.data(), DType::f32, {N, 1, 1, 1});
    }
    std::string error() {
        return error_of([this] { run(); });
    }
    void run() { delta_forward(in, out, {}, execution); }
};

std::string expected_error(const std::vector<int64_t>& indices, int64_t pool) {
    std::set<int64_t> used;
    for (std::size_t n = 0; n < indices.size(); ++n) {
        const int64_t i = indices[n];
        const std::string found = "state_indices[" + std::to_string(n) + "] is " + std::to_string(i) + ", expected ";
        if (i < -1 || i >= pool)
            return found + "0 to " + std::to_string(pool - 1) + ", or -1 where there is no sequence";
        if (i != -1 && !used.insert(i).second) return found + "an entry that no other sequence uses";
    }
    return "";
}

TEST(StateIndices, TheFirstThatIsWrongIsNamed) {
    std::mt19937_64 random(1);
    for (const int64_t pool : {1, 3, 64, 1000, 20000, 150000})
        for (int n = 0; n < 200; ++n) {
            std::vector<int64_t> indices(static_cast<std::size_t>(1 + random() % std::min<int64_t>(pool, 300)));
            std::set<int64_t> used;
            for (int64_t& i : indices) {
                do i = static_cast<int64_t>(random()) % pool;
                while (i < 0 || !used.insert(i).second);
                if (random() % 8 == 0) i = -1;
            }
            const auto any = [&]() -> int64_t& { return indices[random() % indices.size()]; };
            for (int wrong = n % 3; wrong > 0; --wrong) switch (random() % 4) {
                    case 0:
                        any() = pool + static_cast<int64_t>(random() % 2) * (int64_t{1} << 62);
                        break;
                    case 1:
                        any() = -2 - static_cast<int64_t>(random() % 2) * (int64_t{1} << 62);
                        break;
                    default: {
                        const int64_t again = any();
                        any() = again;
                    }
                }
            ASSERT_EQ(Step(indices, pool).error(), expected_error(indices, pool)) << pool << ", " << n;
        }
}

TEST(StateIndices, AreNoneOfAnEmptyPool) {
    EXPECT_EQ(Step({-1, -1}, 0).error(), "");
    EXPECT_EQ(Step({-1, 0}, 0).error(), expected_error({-1, 0}, 0));
}

TEST(StateIndices, AllocateNothing) {
    if (count_allocations() < 0) GTEST_SKIP() << "allocations are not counted here";
    const auto allocations_of = [](Step& step) {
        step.run();
        const int before = count_allocations();
        step.run();
        return count_allocations() - before;
    };
    Step without({0, 1, 2}, 3), with({2, 0, 1}, 3), apart({50000, 0, 99999}, 100000);
    without.in.state_indices = {};
    const int expected = allocations_of(without);
    EXPECT_EQ(allocations_of(with), expected);
    EXPECT_EQ(allocations_of(apart), expected);
}

}  // namespace
}  // namespace softdelta::test
