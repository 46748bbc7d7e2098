// When a call is given to a team of threads, and what remains of one after a fork.
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <latch>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "softdelta/judge.hpp"

namespace softdelta {
namespace {

using Floats = std::vector<float>;

Floats values(std::int64_t count, std::int64_t seed) {
    Floats all(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < all.size(); ++i)
        all[i] = 0.25F * static_cast<float>((static_cast<std::int64_t>(i) * 37 + seed * 11) % 17 - 8);
    return all;
}

Execution on(int threads, const std::string& engine) {
    Execution execution;
    execution.threads = threads;
    execution.engine = engine;
    return execution;
}

// o of Lq queries over Lk keys; with backward: dq, dk, dv.
Floats attention(std::int64_t heads, std::int64_t queries, std::int64_t keys, std::int64_t size, bool backward,
                 const Execution& execution) {
    Floats q = values(queries * heads * size, 1), k = values(keys * heads * size, 2),
           v = values(keys * heads * size, 3);
    Floats o(q.size()), gradients(q.size() + 2 * k.size());
    const auto rows = [&](float* data, std::int64_t count) {
        return Tensor(data, DType::f32, {1, count, heads, size});
    };
    const AttentionInputs in{.q = rows(q.data(), queries), .k = rows(k.data(), keys), .v = rows(v.data(), keys)};
    if (!backward) {
        attention_forward(in, {.o = rows(o.data(), queries)}, {}, execution);
        return o;
    }
    attention_backward(in,
                       {.d_o = rows(q.data(), queries),
                        .dq = rows(gradients.data(), queries),
                        .dk = rows(gradients.data() + q.size(), keys),
                        .dv = rows(gradients.data() + q.size() + k.size(), keys)},
                       {}, execution);
    return gradients;
}

// o and the state after T tokens; with backward: dq, dk, dv.
Floats delta(std::int64_t heads, std::int64_t tokens, std::int64_t size, bool backward, const Execution& execution) {
    const std::int64_t count = tokens * heads * size;
    Floats q = values(count, 1), k = values(count, 2), v = values(count, 3);
    for (float& x : k) x /= static_cast<float>(size);
    Floats results(static_cast<std::size_t>(3 * count + heads * size * size));
    const auto rows = [&](float* data) { return Tensor(data, DType::f32, {1, tokens, heads, size}); };
    const DeltaInputs in{.q = rows(q.data()), .k = rows(k.data()), .v = rows(v.data())};
    DeltaOptions options;
    options.rule = Rule::delta_rule;
    if (backward)
        delta_backward(in,
                       {.d_o = rows(q.data()),
                        .dq = rows(results.data()),
                        .dk = rows(results.data() + count),
                        .dv = rows(results.data() + 2 * count)},
                       options, execution);
    else
        delta_forward(in,
                      {.o = rows(results.data()),
                       .final_state = Tensor(results.data() + count, DType::f32, {1, heads, size, size})},
                      options, execution);
    return results;
}

struct Call {
    std::string name;
    std::function<Floats(const Execution&)> run;
};

const std::vector<Call> long_calls{
    {"attention", [](const Execution& e) { return attention(4, 384, 384, 64, false, e); }},
    {"attention, backward", [](const Execution& e) { return attention(4, 384, 384, 64, true, e); }},
    {"decode", [](const Execution& e) { return attention(8, 1, 4096, 64, false, e); }},
    {"delta rule", [](const Execution& e) { return delta(32, 128, 64, false, e); }},
    {"delta rule of few heads", [](const Execution& e) { return delta(2, 1024, 64, false, e); }},
    {"delta rule, backward", [](const Execution& e) { return delta(16, 128, 64, true, e); }},
    {"step of 32 heads", [](const Execution& e) { return delta(32, 1, 128, false, e); }},
};
const std::vector<Call> short_calls{
    {"decode", [](const Execution& e) { return attention(8, 1, 256, 64, false, e); }},
    {"few rows", [](const Execution& e) { return attention(8, 32, 32, 64, false, e); }},
    {"few rows, backward", [](const Execution& e) { return attention(4, 16, 16, 64, true, e); }},
    {"step of 16 heads", [](const Execution& e) { return delta(16, 1, 128, false, e); }},
    {"few tokens, backward", [](const Execution& e) { return delta(4, 8, 32, true, e); }},
};

std::ptrdiff_t threads_of_process() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

// Threads that each call starts. Its caller is a thread of its own that stays until the end, so that no call finds the
// team of an earlier one.
std::vector<std::ptrdiff_t> threads_started(const std::vector<Call>& calls, const std::string& engine) {
    std::latch end(1);
    std::vector<std::thread> callers;
    std::vector<std::ptrdiff_t> started(calls.size());
    for (std::size_t i = 0; i < calls.size(); ++i) {
        std::latch made(1);
        callers.emplace_back([&, i, made_here = &made] {
            const std::ptrdiff_t before = threads_of_process();
            calls[i].run(on(3, engine));
            started[i] = threads_of_process() - before;
            made_here->count_down();
            end.wait();
        });
        made.wait();
    }
    end.count_down();
    for (std::thread& caller : callers) caller.join();
    return started;
}

// Each engine in a process of its own: teams of an earlier one would end meanwhile, or serve again.
class Team : public testing::TestWithParam<const char*> {};
TEST_P(Team, IsForLongCalls) {
    const auto of_short = threads_started(short_calls, GetParam()), of_long = threads_started(long_calls, GetParam());
    for (std::size_t i = 0; i < short_calls.size(); ++i) EXPECT_EQ(of_short[i], 0) << short_calls[i].name;
    for (std::size_t i = 0; i < long_calls.size(); ++i) EXPECT_GT(of_long[i], 0) << long_calls[i].name;
}
std::string name_of(const testing::TestParamInfo<const char*>& of) {
    const char* const names[] = {"fast", "reference", "stages_f64", "stages_f32"};
    return names[of.index];
}
INSTANTIATE_TEST_SUITE_P(Engines, Team, testing::Values("fast", "reference", "stages_f64", "stages_f32"), name_of);

// Tasks one after the other, from the last to the first, and as many threads as tasks: the bits are those of OpenMP's
// threads, which do not begin.
TEST(ThreadsOfTheCaller, ServeInsteadOfOpenMPs) {
    constexpr std::int32_t tasks = 4;
    std::atomic<int> served{0};
    const softdelta_parallel_for one_by_one = [](void* context, std::int32_t count, auto task, void* of_task) {
        static_cast<std::atomic<int>*>(context)->fetch_add(count);
        for (std::int32_t i = count; i-- > 0;) task(of_task, i);
    };
    const softdelta_parallel_for at_once = [](void* context, std::int32_t count, auto task, void* of_task) {
        static_cast<std::atomic<int>*>(context)->fetch_add(count);
        std::vector<std::thread> threads;
        for (std::int32_t i = 0; i < count; ++i) threads.emplace_back([=] { task(of_task, i); });
        for (std::thread& thread : threads) thread.join();
    };
    for (const char* engine : {"fast", "reference"})
        for (const Call& call : long_calls) {
            const Floats expected = call.run(on(1, engine));
            for (const auto parallel_for : {one_by_one, at_once}) {
                Execution execution = on(tasks, engine);
                execution.parallel_for = parallel_for;
                execution.parallel_context = &served;
                const std::ptrdiff_t before = threads_of_process();
                served = 0;
                EXPECT_EQ(call.run(execution), expected) << call.name << ", engine " << engine;
                EXPECT_GT(served, 1) << call.name << ", engine " << engine;
                EXPECT_EQ(threads_of_process(), before) << call.name << ", engine " << engine;
            }
        }
    EXPECT_THROW(
        {
            Execution execution = on(tasks, "fast");
            execution.parallel_for = one_by_one;
            execution.parallel_context = &served;
            execution.workspace = std::span(reinterpret_cast<std::byte*>(&served), 1);
            long_calls[0].run(execution);
        },
        std::invalid_argument);
}

// The runtime would end the threads that a smaller team does without, and start them again for the next call.
TEST(TeamOfAWideCall, Stays) {
    for (const bool backward : {false, true}) {
        delta(16, 128, 64, backward, on(4, "fast"));
        const std::ptrdiff_t before = threads_of_process();
        delta(2, 96, 128, backward, on(4, "fast"));  // two units
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        EXPECT_EQ(threads_of_process(), before) << (backward ? "backward" : "forward");
    }
}

// Threads that share one workspace: each call has it alone and is right, or is refused before it writes.
TEST(Workspace, BelongsToOneCallAtATime) {
    constexpr std::int64_t heads = 2, tokens = 256, size = 64, count = heads * tokens * size;
    const Floats rows = values(count, 3), none(count, -7.0F);
    const auto view = [&](auto& of) { return Tensor(of.data(), DType::f32, {1, tokens, heads, size}); };
    const AttentionInputs in{.q = view(rows), .k = view(rows), .v = view(rows)};
    Execution execution = on(1, "fast");
    Floats expected(count);
    attention_forward(in, {.o = view(expected)}, {}, execution);
    std::vector<std::byte> memory(attention_forward_workspace(in, {.o = view(expected)}, {}, execution));
    execution.workspace = memory;
    std::atomic<int> refused{0}, wrong{0};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    const auto call_until_refused = [&] {
        while (refused == 0 && wrong == 0 && std::chrono::steady_clock::now() < end) {
            Floats o = none;
            try {
                attention_forward(in, {.o = view(o)}, {}, execution);
                if (o != expected) ++wrong;
            } catch (const std::invalid_argument& e) {
                const std::string text =
                    "execution.workspace is in use by another call, expected memory that one call "
                    "uses at a time";
                if (e.what() != text || o != none) ++wrong;
                ++refused;
            }
        }
    };
    {
        std::vector<std::jthread> threads;
        for (int i = 0; i < 8; ++i) threads.emplace_back(call_until_refused);
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_GT(refused, 0);
    Floats o = none;
    attention_forward(in, {.o = view(o)}, {}, execution);
    EXPECT_EQ(o, expected) << "afterwards it is free";
}

// A call that is in the middle of a workspace when the process forks is not there in the child.
TEST(Workspace, IsFreeInAForkedProcess) {
    constexpr std::int64_t heads = 2, tokens = 512, size = 64, count = heads * tokens * size;
    const Floats rows = values(count, 3);
    Floats o(count);
    const auto view = [&](auto& of) { return Tensor(of.data(), DType::f32, {1, tokens, heads, size}); };
    const AttentionInputs in{.q = view(rows), .k = view(rows), .v = view(rows)};
    Execution execution = on(1, "fast");
    std::vector<std::byte> memory(attention_forward_workspace(in, {.o = view(o)}, {}, execution));
    execution.workspace = memory;
    std::atomic<bool> stop{false};
    std::jthread other([&] {
        while (!stop) attention_forward(in, {.o = view(o)}, {}, execution);
    });
    for (int i = 0; i < 20; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        const pid_t child = fork();
        if (child == 0) {
            alarm(30);
            try {
                attention_forward(in, {.o = view(o)}, {}, execution);
            } catch (const std::exception&) {
                _exit(1);
            }
            _exit(0);
        }
        int status = 0;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        EXPECT_EQ(status, 0);
    }
    stop = true;
}

// Whether a forked process gets the same result, and in time.
void expect_same_after_fork(const Call& call, const Execution& execution) {
    const Floats expected = call.run(execution);
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        const Floats result = call.run(execution);
        _exit(std::memcmp(result.data(), expected.data(), expected.size() * sizeof(float)) == 0 ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << call.name << ": the child was ended by signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0) << call.name;
}

TEST(Fork, LeavesOneThread) {
    for (const Call& call : long_calls) expect_same_after_fork(call, on(2, "fast"));
    for (const Call& call : short_calls)
        for (const std::string engine : {"reference", "stages_f64", "stages_f32"})
            expect_same_after_fork(call, on(2, engine));
}

TEST(Fork, LeavesMeasurementsPossible) {
    measure_bandwidth(2);
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        _exit(measure_bandwidth(2) > 0 ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace softdelta
