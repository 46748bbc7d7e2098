// A plan gives each layer the bits of a call of its own, reads nothing of the call that it was made of, and refuses a
// layer that differs from it.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "support/allocations.h"
#include "support/fast_attention.h"
#include "support/levels.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

AttentionInputs without_lengths(AttentionInputs in) {
    in.cu_seqlens_q = in.cu_seqlens_k = in.cache_seqlens = in.block_table = {};
    return in;
}

AttentionOutputs outputs_of(std::map<std::string, Guarded>& results) {
    return {.o = results["o"].view(), .lse = results["lse"].view()};
}

// The same numbers lie elsewhere when they are drawn again.
std::string check_layers(std::uint64_t seed) {
    const Side side = seed % 2 == 0 ? Side::end : Side::begin;
    Execution execution;
    execution.engine = "fast";
    execution.threads = 1 + static_cast<int>(seed % 3);
    auto first = std::make_unique<FastAttention>(draw_fast_attention(seed));
    const FastAttention layer = draw_fast_attention(seed);
    const AttentionOptions& options = layer.call().attention_options;
    const Names names = layer.some(layer.forward_names());
    const Results expected = layer.forward(names, execution);
    auto results = make_results(first->call(), names, seed, side);
    const std::size_t bytes =
        attention_forward_workspace(first->call().attention, outputs_of(results), options, execution);
    std::string fault;
    run_in(seed % 4 < 2 ? Memory::own : Memory::workspace, bytes, side, execution, [&](const Execution& e) {
        AttentionPlan plan(first->call().attention, outputs_of(results), options, e);
        first.reset();
        for (int i = 0; i < 2; ++i) {
            results = make_results(layer.call(), names, seed, side);
            plan.forward(without_lengths(layer.call().attention), outputs_of(results));
            for (const auto& [name, t] : dense(layer.call(), results))
                if (std::memcmp(t.data(), expected.at(name).data(), t.bytes()) != 0)
                    fault = name + " differs, " + layer.describe();
        }
    });
    return fault;
}

TEST(AttentionPlan, HasTheBitsOfCalls) {
    for_each_level([](const std::string& level) {
        for (std::uint64_t seed = first_seed(); seed < first_seed() + static_cast<std::uint64_t>(call_count(60));
             ++seed)
            EXPECT_EQ(check_layers(seed), "") << level;
    });
}

// Two sequences that decode, keys in blocks of two.
struct Step {
    std::vector<float> numbers = std::vector<float>(64, 0.5f), result = std::vector<float>(64, -7.0f);
    std::vector<std::int32_t> lengths{3, 2}, blocks{2, 0, 1, 3};
    AttentionInputs in{.q = floats({2, 1, 2, 4}),
                       .k = floats({4, 2, 1, 4}),
                       .v = floats({4, 2, 1, 4}),
                       .cache_seqlens = Tensor(lengths.data(), DType::i32, {2}),
                       .block_table = Tensor(blocks.data(), DType::i32, {2, 2})};
    AttentionOutputs out{.o = Tensor(result.data(), DType::f32, {2, 1, 2, 4})};
    Execution execution{.engine = "fast", .threads = 1};

    Tensor floats(std::initializer_list<std::int64_t> shape) const { return {numbers.data(), DType::f32, shape}; }
    AttentionPlan plan() const { return {in, out, {}, execution}; }
};

TEST(AttentionPlan, RefusesLayersThatDiffer) {
    using Spoil = std::function<void(Step&)>;
    const std::pair<Spoil, std::string> cases[] = {
        {[](Step&) {}, ""},
        {[](Step& s) {
             s.in.q = s.floats({2, 1, 1, 4});
         },
         "q: shape is [2, 1, 1, 4], expected [2, 1, 2, 4], as in the plan"},
        {[](Step& s) {
             s.in.k = Tensor(s.numbers.data(), DType::f32, {4, 2, 1, 4}, {4, 16, 4, 1});
         },
         "k: strides is [4, 16, 0, 1], expected [8, 4, 0, 1], as in the plan"},
        {[](Step& s) {
             s.in.v = Tensor(s.numbers.data(), DType::bf16, {4, 2, 1, 4});
         },
         "v: type is bf16, expected f32, as in the plan"},
        {[](Step& s) { s.in.v = {}; }, "v is missing, expected a tensor: the plan has one"},
        {[](Step& s) { s.in.sink = s.floats({2}); }, "sink is given, expected none: the plan has none"},
        {[](Step& s) { s.in.cache_seqlens = Tensor(s.lengths.data(), DType::i32, {2}); },
         "cache_seqlens is given, expected none: lengths and tables are the plan's"},
        {[](Step& s) {
             s.out.lse = Tensor(s.result.data(), DType::f32, {2, 2, 1});
         },
         "lse is given, expected none: the plan has none"},
        {[](Step& s) {
             s.out.o = Tensor(s.numbers.data(), DType::f32, {2, 1, 2, 4});
         },
         "o: memory is shared with q, expected memory of its own: results are written while others are still needed"},
        {[](Step& s) {
             s.in.q = Tensor(nullptr, DType::f32, {2, 1, 2, 4});
         },
         "q: data is null, expected memory of its [2, 1, 2, 4]"},
        {[](Step& s) {
             s.in.q = s.in.q.on({kDLCUDA, 0});
         },
         "q: device is cuda:0, expected cpu, as in the plan"},
    };
    for (const auto& [spoil, expected] : cases) {
        Step step;
        AttentionPlan plan = step.plan();
        step.in = without_lengths(step.in);
        spoil(step);
        std::string error;
        try {
            plan.forward(step.in, step.out);
        } catch (const std::invalid_argument& e) {
            error = e.what();
        }
        EXPECT_EQ(error, expected);
        EXPECT_TRUE(error.empty() || step.result == std::vector<float>(64, -7.0f)) << error;
    }
}

TEST(AttentionPlan, IsOfACallThatCanBeMade) {
    Step step;
    step.blocks[1] = 4;
    EXPECT_THROW(step.plan(), std::invalid_argument);
    step.blocks[1] = 0;
    step.execution.engine = "reference";
    EXPECT_THROW(step.plan(), Unsupported);
    EXPECT_EQ(softdelta_attention_plan_forward(nullptr, nullptr, nullptr), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_EQ(softdelta_attention_plan_create(nullptr, nullptr, nullptr, nullptr, nullptr), SOFTDELTA_INVALID_ARGUMENT);
    softdelta_attention_plan_destroy(nullptr);
}

// By the C interface alone, with its defaults.
TEST(AttentionPlan, IsMadeInC) {
    const Step step, same;
    DLTensor q = step.in.q.dlpack(), k = step.in.k.dlpack(), v = step.in.v.dlpack(), o = step.out.o.dlpack(),
             lengths = step.in.cache_seqlens.dlpack(), blocks = step.in.block_table.dlpack();
    softdelta_attention_inputs in = softdelta_attention_inputs_default();
    softdelta_attention_outputs out = softdelta_attention_outputs_default();
    in.q = &q;
    in.k = &k;
    in.v = &v;
    in.cache_seqlens = &lengths;
    in.block_table = &blocks;
    out.o = &o;
    softdelta_attention_plan* plan = nullptr;
    ASSERT_EQ(softdelta_attention_plan_create(&in, &out, nullptr, nullptr, &plan), SOFTDELTA_OK);
    EXPECT_EQ(softdelta_attention_plan_forward(plan, &in, &out), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_EQ(softdelta_last_error(),
              std::string("cache_seqlens is given, expected none: lengths and tables are the plan's"));
    in.cache_seqlens = in.block_table = nullptr;
    ASSERT_EQ(softdelta_attention_plan_forward(plan, &in, &out), SOFTDELTA_OK);
    attention_forward(same.in, same.out);
    EXPECT_EQ(step.result, same.result);
    out.size = 8;
    EXPECT_EQ(softdelta_attention_plan_forward(plan, &in, &out), SOFTDELTA_INVALID_ARGUMENT);
    softdelta_attention_plan_destroy(plan);
}

TEST(AttentionPlan, KeepsLengthsAsTheyWere) {
    Step step, same;
    AttentionPlan plan = step.plan();
    step.lengths = {1 << 30, -1};
    step.blocks = {99, -1, 99, -1};
    plan.forward(without_lengths(step.in), step.out);
    attention_forward(same.in, same.out, {}, same.execution);
    EXPECT_EQ(step.result, same.result);
}

// The threads of a caller that call again in the middle of a layer.
TEST(AttentionPlan, IsForOneCallAtATime) {
    struct Again {
        Step step;
        AttentionPlan* plan = nullptr;
        std::string error;
    } again;
    again.step.execution.threads = 2;
    again.step.execution.parallel_context = &again;
    again.step.execution.parallel_for = [](void* context, std::int32_t count, void (*task)(void*, std::int32_t),
                                           void* task_context) {
        auto& self = *static_cast<Again*>(context);
        try {
            self.plan->forward(without_lengths(self.step.in), self.step.out);
        } catch (const std::invalid_argument& e) {
            self.error = e.what();
        }
        for (std::int32_t i = 0; i < count; ++i) task(task_context, i);
    };
    AttentionPlan plan = again.step.plan();
    again.plan = &plan;
    for (int i = 0; i < 2; ++i) {
        again.error.clear();
        plan.forward(without_lengths(again.step.in), again.step.out);
        EXPECT_EQ(again.error, "plan is in use by another call, expected one call at a time");
    }
}

TEST(AttentionPlan, AllocatesNothingForALayer) {
    if (count_allocations() < 0) GTEST_SKIP() << "allocations are not counted here";
    Step step;
    const int before_plan = count_allocations();
    AttentionPlan plan = step.plan();
    EXPECT_GT(count_allocations() - before_plan, 0) << "allocations are counted";
    step.in = without_lengths(step.in);
    const int before = count_allocations();
    for (int i = 0; i < 2; ++i) plan.forward(step.in, step.out);
    EXPECT_EQ(count_allocations() - before, 0);
}

// Its threads stayed behind.
TEST(AttentionPlan, IsRefusedInAForkedProcess) {
    Step step;
    AttentionPlan plan = step.plan();
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        try {
            plan.forward(without_lengths(step.in), step.out);
        } catch (const std::invalid_argument& e) {
            const bool said = e.what() == std::string("plan was made before a fork, expected one of this process");
            step.plan().forward(without_lengths(step.in), step.out);
            _exit(said ? 0 : 1);
        }
        _exit(2);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace softdelta::test
