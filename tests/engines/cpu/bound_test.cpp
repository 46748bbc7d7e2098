// The bound of a workspace: enough for every call within its limits, on every instruction set, and growing with each of
// them. It is asked with tensors that have no memory.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>

#include "engines/cpu/bound.h"
#include "support/fast_attention.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

TEST(WorkspaceBound, OfAttentionIsEnough) {
    const std::uint64_t first = first_seed();
    for_each_level([&](const std::string& level) {
        for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(20)); ++seed) {
            const FastAttention drawn = draw_fast_attention(seed);
            Random random(seed);
            const io::Call& c = drawn.call();
            const AttentionInputs& in = c.attention;
            const Array lse(DType::f32, {in.q.shape(0), in.q.shape(2), in.q.shape(1)});
            const Execution execution = draw_execution(random);
            const Limits limits{in.cu_seqlens_q ? in.cu_seqlens_q.shape(0) - 1 : in.q.shape(0),
                                in.q.shape(0) * in.q.shape(1),
                                in.block_table ? in.block_table.shape(1) * in.k.shape(1) : in.k.shape(1)};
            AttentionInputs kinds{.q = empty(in.q),
                                  .k = empty(in.k),
                                  .v = empty(in.v),
                                  .k_scale = empty(in.k_scale),
                                  .v_scale = empty(in.v_scale)};
            const AttentionOptions& options = c.attention_options;
            if (options.top_w >= 0) kinds.bias = Tensor(nullptr, DType::f32, {1, 1, 1, 0});
            const std::size_t needed = attention_forward_workspace(in, {.lse = lse.view()}, options, execution);
            check_bound(
                limits, needed,
                [&](const Limits& l) { return attention_forward_workspace_bound(kinds, l, options, execution); },
                random, level + ", " + drawn.describe());
        }
    });
}

// Blocks of rows may share packed keys, which are most of the memory.
TEST(WorkspaceBound, OfLongPromptsIsEnough) {
    const Array q(DType::bf16, {2, 600, 4, 64}), k(DType::bf16, {2, 4000, 2, 64}), lse(DType::f32, {2, 4, 600});
    Random random(1);
    for_each_level([&](const std::string& level) {
        for (int i = 0; i < 5; ++i) {
            const Execution execution = draw_execution(random);
            const AttentionInputs kinds{.q = empty(q.view()), .k = empty(k.view()), .v = empty(k.view())};
            const std::size_t needed = attention_forward_workspace({.q = q.view(), .k = k.view(), .v = k.view()},
                                                                   {.lse = lse.view()}, {}, execution);
            check_bound(
                {2, 1200, 4000}, needed,
                [&](const Limits& l) { return attention_forward_workspace_bound(kinds, l, {}, execution); }, random,
                level);
        }
    });
}

TEST(WorkspaceBound, OfLayersIsEnough) {
    const Array x(DType::f32, {3, 700, 300}), weight(DType::f32, {300, 4}), y(DType::f32, {3, 700, 300});
    const Array rows(DType::bf16, {3, 700, 2, 96}), normed(DType::bf16, {3, 700, 2, 96});
    Random random(1);
    for_each_level([&](const std::string& level) {
        for (int i = 0; i < 10; ++i) {
            const Execution execution = draw_execution(random);
            check_bound(
                {3, 2100, 0},
                causal_convolution_forward_workspace({.x = x.view(), .weight = weight.view()}, {.y = y.view()}, {},
                                                     execution),
                [&](const Limits& l) {
                    return causal_convolution_forward_workspace_bound({.x = empty(x.view()), .weight = weight.view()},
                                                                      l, {}, execution);
                },
                random, level);
            const NormOptions plain{.gate = Activation::none};
            check_bound(
                {3, 2100, 0}, gated_norm_forward_workspace({.x = rows.view()}, {.y = normed.view()}, plain, execution),
                [&](const Limits& l) {
                    return gated_norm_forward_workspace_bound({.x = empty(rows.view())}, l, plain, execution);
                },
                random, level);
        }
    });
}

TEST(WorkspaceBound, RefusesLimitsBelowZero) {
    const Tensor q(nullptr, DType::f32, {1, 0, 2, 8});
    try {
        attention_forward_workspace_bound({.q = q, .k = q, .v = q}, {.tokens = -1});
        FAIL();
    } catch (const std::invalid_argument& e) {
        EXPECT_STREQ(e.what(), "limits.tokens is -1, expected 0 to what memory can hold");
    }
}

}  // namespace
}  // namespace softdelta::test
