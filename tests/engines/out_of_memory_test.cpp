// Every allocation of a call fails in turn: std::bad_alloc, nothing leaked or freed twice, and the next call is right.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "fuzz/drawn_case.h"
#include "io/call/layer.h"
#include "judge/draw_case.h"
#include "support/allocations.h"
#include "support/array.h"
#include "support/call_count.h"
#include "support/teams.h"

namespace softdelta {
namespace {

using test::call_count;

enum class Pass { forward, backward };

// Results of a pass, each with memory of its own.
struct Results {
    std::map<std::string, io::OwnedTensor> memory;
    std::map<std::string, Tensor> views;

    template <class Call>
    Results(const Call& call, Pass pass) {
        for (const std::string& name : io::output_names(call)) {
            if ((name[0] == 'd') != (pass == Pass::backward)) continue;
            memory.emplace(name, io::OwnedTensor(io::output_dtype(call, name), io::output_shape(call, name)));
            views[name] = memory.at(name).view();
        }
    }
    void fill(int byte) const {
        for (const auto& [name, tensor] : memory) std::memset(tensor.data(), byte, tensor.bytes());
    }
    bool are(const Results& other) const {
        for (const auto& [name, tensor] : memory)
            if (std::memcmp(tensor.data(), other.memory.at(name).data(), tensor.bytes()) != 0) return false;
        return true;
    }
};

enum class Outcome { done, no_memory, refused };

template <class Call>
Outcome compute(const Call& call, const Results& results, const Execution& execution) {
    try {
        io::execute(call, results.views, execution);
        return Outcome::done;
    } catch (const std::bad_alloc&) {
        return Outcome::no_memory;
    } catch (const Unsupported&) {
        return Outcome::refused;
    } catch (const std::invalid_argument&) {
        return Outcome::refused;
    }
}

// How many allocations were failed.
template <class Call>
int fail_each(const Call& call, Pass pass, const Execution& execution, bool all) {
    const Results results(call, pass), untouched(call, pass), right(call, pass);
    constexpr int sentinel = 0x5a, many = 100;  // beyond them, some
    untouched.fill(sentinel);
    for (int number = 0;; number += 1 + number / many) {
        results.fill(sentinel);
        const std::int64_t before = test::blocks_held();
        test::fail_allocations(number, all);
        const Outcome outcome = compute(call, results, execution);
        const bool failed = test::stop_failing();
        if (!failed || outcome != Outcome::no_memory) {  // a sort does without its buffer, an error has a reserve
            EXPECT_EQ(compute(call, right, execution), outcome) << "allocation " << number;
            EXPECT_TRUE(results.are(outcome == Outcome::done ? right : untouched)) << "allocation " << number;
            if (!failed || outcome == Outcome::refused || testing::Test::HasFailure()) return number;
            continue;
        }
        EXPECT_LE(test::blocks_held(), before) << "allocation " << number << " leaks";
        if (execution.engine == "fast") {
            EXPECT_TRUE(results.are(untouched)) << "allocation " << number << ": results were written";
        }
        if (testing::Test::HasFailure()) return number;
    }
}

// Operations, options, layouts; half of the calls fill more than a chunk, half are of every kind and tiny.
io::CaseFile draw(std::uint64_t seed) {
    test::Draw random(seed);
    if (seed % 2 == 0) {
        io::MakeOptions options = test::draw_case(random);
        for (std::int64_t* size : {&options.tokens, &options.queries, &options.keys})
            *size = std::min<std::int64_t>(*size, 70);
        return io::make_case(options);
    }
    std::vector<std::uint8_t> bytes(100);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.between(0, 255));
    return test::DrawnCase(bytes.data(), bytes.size()).draw();
}

std::optional<std::variant<io::Call, io::LayerCall>> legal_call(const io::CaseFile& file) {
    try {
        auto call = io::any_call_of(file);
        std::visit([](const auto& c) { io::check(c, {}); }, call);
        return call;
    } catch (const std::exception&) {  // the draw contradicts itself
        return std::nullopt;
    }
}

TEST(OutOfMemory, IsOneErrorAndNothingIsLost) {
    if (test::count_allocations() < 0) GTEST_SKIP() << "allocations do not come here";
    std::map<std::string, int> failures;
    for (std::int64_t i = 0; i < call_count(30); ++i) {
        const std::uint64_t seed = test::first_seed() + static_cast<std::uint64_t>(i);
        const io::CaseFile file = draw(seed);
        const auto call = legal_call(file);
        if (!call) continue;
        for (const std::string engine : {"fast", "reference", "stages_f64", "stages_f32"})
            for (const int threads : {1, 2}) {
                SCOPED_TRACE("SOFTDELTA_SEED=" + std::to_string(seed) + " " + file.metadata.at("op") + ", engine " +
                             engine + ", " + std::to_string(threads) + " threads");
                Execution execution;
                execution.engine = engine;
                execution.threads = threads;
                if (engine == "stages_f32") execution.rounding.seed = seed;
                for (const Pass pass : {Pass::forward, Pass::backward})
                    std::visit(
                        [&](const auto& c) {
                            // OpenMP has its threads, and the process what it keeps from its first call.
                            if (threads > 1 || !failures.contains(engine)) compute(c, Results(c, pass), execution);
                            failures[engine] += fail_each(c, pass, execution, (seed / 2) % 2 == 0);
                        },
                        *call);
                if (HasFailure()) return;
            }
    }
    for (const auto& [engine, count] : failures) EXPECT_GT(count, 0) << engine;
}

}  // namespace
}  // namespace softdelta
