// Keys and values that nobody sees for whole tiles are not even read, forward and backward: here they cannot be.
#include <gtest/gtest.h>

#include <cmath>

#include "support/fast_attention.h"
#include "support/levels.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

constexpr Index Lk = 2048, D = 64, Dv = 32;
// Keys that nobody sees, and those of them that are in no tile with others: in no block of 256 or of 384 keys.
constexpr Index hidden_begin = 400, hidden_end = 1600, unread_begin = 768, unread_end = 1536;

enum class Hides { window, mask, bias, selection };

struct Operands {
    Array q, d_o, mask, bias;
    GuardedMemory k, v;
    AttentionInputs inputs;
    AttentionOptions options;

    Operands(Index Lq, Hides how, bool readable) : q(DType::f32, {1, Lq, 1, D}), d_o(DType::f32, {1, Lq, 1, Dv}) {
        Random random(1);
        fill_normal(q, random);
        fill_normal(d_o, random);
        k = rows_of(D, random, readable);
        v = rows_of(Dv, random, readable);
        inputs.q = q.view();
        inputs.k = Tensor(k.data(), DType::f32, {1, Lk, 1, D});
        inputs.v = Tensor(v.data(), DType::f32, {1, Lk, 1, Dv});
        hide(how);
    }

    static bool is_hidden(Index j) { return j >= hidden_begin && j < hidden_end; }

  private:
    static GuardedMemory rows_of(Index width, Random& random, bool readable) {
        const std::size_t row = static_cast<std::size_t>(width) * sizeof(float);
        GuardedMemory memory(static_cast<std::size_t>(Lk) * row, Side::end);
        std::normal_distribution<float> normal;
        for (Index i = 0; i < Lk * width; ++i)
            reinterpret_cast<float*>(memory.data())[i] = is_hidden(i / width) ? 0.0F : normal(random);
        if (!readable)
            memory.make_unreadable(static_cast<std::size_t>(unread_begin) * row,
                                   static_cast<std::size_t>(unread_end - unread_begin) * row);
        return memory;
    }

    void hide(Hides how) {
        if (how == Hides::window) {  // the last keys alone
            options.window_left = Lk - hidden_end - q.view().shape(1);
            return;
        }
        if (how == Hides::mask) {
            mask = Array(DType::boolean, {1, 1, 1, Lk});
            for (Index j = 0; j < Lk; ++j) mask.set(j, is_hidden(j) ? 0 : 1);
            inputs.mask = mask.view();
            return;
        }
        bias = Array(DType::f32, {1, 1, 1, Lk});
        for (Index j = 0; j < Lk; ++j) bias.set(j, !is_hidden(j) ? 1 + j % 7 : how == Hides::bias ? -INFINITY : -1);
        inputs.bias = bias.view();
        if (how == Hides::selection) options.top_w = Lk - (hidden_end - hidden_begin);
    }
};

std::vector<std::vector<double>> compute(const Operands& in) {
    const Index Lq = in.q.view().shape(1);
    const Array o(DType::f32, {1, Lq, 1, Dv}), lse(DType::f32, {1, 1, Lq}), dq(DType::f32, {1, Lq, 1, D}),
        dk(DType::f32, {1, Lk, 1, D}), dv(DType::f32, {1, Lk, 1, Dv});
    Execution execution;
    execution.engine = "fast";
    execution.threads = 2;
    attention_forward(in.inputs, {.o = o.view(), .lse = lse.view()}, in.options, execution);
    attention_backward(
        in.inputs,
        {.o = o.view(), .lse = lse.view(), .d_o = in.d_o.view(), .dq = dq.view(), .dk = dk.view(), .dv = dv.view()},
        in.options, execution);
    return {o.values(), lse.values(), dq.values(), dk.values(), dv.values()};
}

TEST(AttentionFastUntouched, TilesThatNobodySeesAreNotRead) {
    for_each_level([](const std::string& level) {
        for (const Index Lq : {4, 300})
            for (const Hides how : {Hides::window, Hides::mask, Hides::bias, Hides::selection}) {
                const std::string what =
                    level + ", " + std::to_string(Lq) + " queries, hidden by " + std::to_string(static_cast<int>(how));
                tell_on_bad_access(what);
                EXPECT_EQ(compute(Operands(Lq, how, false)), compute(Operands(Lq, how, true))) << what;
            }
    });
}

}  // namespace
}  // namespace softdelta::test
