// Results that share memory with operands or with each other are refused; views that only interleave are not.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "softdelta/softdelta.hpp"
#include "support/error_of.h"

namespace softdelta {
namespace {

using test::error_of;

constexpr std::int64_t T = 6, H = 2, D = 4;

// Rows [1, T, H, D] of f32 in one buffer, from an element on.
struct Buffer {
    std::vector<float> data = std::vector<float>(4096, 0.5F);

    Tensor rows(std::int64_t first, std::int64_t row = H * D) {
        return {data.data() + first, DType::f32, {1, T, H, D}, {0, row, D, 1}};
    }
    Tensor dense(std::int64_t first, std::initializer_list<std::int64_t> shape) {
        return {data.data() + first, DType::f32, shape};
    }
};

TEST(Overlap, OfAttentionIsNamed) {
    Buffer b;
    constexpr std::int64_t n = T * H * D;
    const AttentionInputs in{.q = b.rows(0), .k = b.rows(n), .v = b.rows(2 * n)};
    const auto forward = [&](const Tensor& o, const Tensor& lse) {
        return error_of([&] { attention_forward(in, {.o = o, .lse = lse}); });
    };
    const std::string rule = ", expected memory of its own: results are written while others are still needed";
    EXPECT_EQ(forward(b.rows(3 * n), b.dense(4 * n, {1, H, T})), "");
    EXPECT_EQ(forward(b.rows(0), {}), "o: memory is shared with q" + rule) << "in place";
    EXPECT_EQ(forward(b.rows(2 * n - 1), {}), "o: memory is shared with k" + rule) << "by one element";
    EXPECT_EQ(forward(b.rows(3 * n), b.dense(4 * n - 1, {1, H, T})), "o: memory is shared with lse" + rule);
    EXPECT_EQ(forward({}, b.dense(3 * n - 1, {1, H, T})), "lse: memory is shared with v" + rule);
    const auto backward = [&](AttentionGradients g) {
        g.d_o = b.rows(3 * n);
        return error_of([&] { attention_backward(in, g); });
    };
    EXPECT_EQ(backward({.dq = b.rows(4 * n), .dk = b.rows(5 * n), .dv = b.rows(6 * n)}), "");
    EXPECT_EQ(backward({.dq = b.rows(0)}), "dq: memory is shared with q" + rule);
    EXPECT_EQ(backward({.dv = b.rows(3 * n)}), "dv: memory is shared with d_o" + rule);
    EXPECT_EQ(backward({.dq = b.rows(4 * n), .dk = b.rows(5 * n - D)}), "dq: memory is shared with dk" + rule);
    for (const float x : b.data) EXPECT_EQ(x, x);
}

TEST(Overlap, OfDeltaRulesIsNamed) {
    Buffer b;
    constexpr std::int64_t n = T * H * D, s = 1024;
    DeltaInputs in{.q = b.rows(0), .k = b.rows(n), .v = b.rows(2 * n)};
    in.initial_state = b.dense(s, {1, H, D, D});
    DeltaOptions options;
    options.rule = Rule::delta_rule;
    const auto forward = [&](const DeltaOutputs& out) { return error_of([&] { delta_forward(in, out, options); }); };
    const std::string rule = ", expected memory of its own: results are written while others are still needed";
    EXPECT_EQ(forward({.o = b.rows(3 * n), .final_state = b.dense(s, {1, H, D, D})}), "") << "the state in place";
    EXPECT_EQ(forward({.final_state = b.dense(s + H * D * D, {1, H, D, D})}), "");
    EXPECT_EQ(forward({.final_state = b.dense(s + 1, {1, H, D, D})}),
              "final_state: memory is shared with initial_state, expected the same elements, or none of them");
    EXPECT_EQ(forward({.final_state = {b.data.data() + s, DType::f32, {1, H, D, D}, {0, D * D, 1, D}}}),
              "final_state: memory is shared with initial_state, expected the same elements, or none of them")
        << "transposed";
    EXPECT_EQ(forward({.o = b.rows(2 * n)}), "o: memory is shared with v" + rule);
    EXPECT_EQ(forward({.o = b.rows(s - 1)}), "o: memory is shared with initial_state" + rule);
    std::vector<std::int32_t> indices{1};  // an entry of a pool
    in.state_indices = Tensor(indices.data(), DType::i32, {1});
    in.initial_state = b.dense(s, {3, H, D, D});
    EXPECT_EQ(forward({.o = b.rows(3 * n), .final_state = b.dense(s, {3, H, D, D})}), "");
    EXPECT_EQ(forward({.o = b.rows(3 * n), .final_state = b.dense(s, {2, H, D, D})}), "");
    EXPECT_NE(forward({.o = b.rows(3 * n), .final_state = b.dense(s + H * D * D, {3, H, D, D})}), "");
    in.state_indices = in.initial_state = {};
    const auto backward = [&](DeltaGradients g) {
        g.d_o = b.rows(3 * n);
        return error_of([&] { delta_backward(in, g, options); });
    };
    EXPECT_EQ(backward({.dq = b.rows(4 * n), .dk = b.rows(5 * n), .dv = b.rows(6 * n)}), "");
    EXPECT_EQ(backward({.dk = b.rows(n)}), "dk: memory is shared with k" + rule);
    EXPECT_EQ(backward({.dq = b.rows(4 * n), .dv = b.rows(4 * n)}), "dq: memory is shared with dv" + rule);
}

TEST(Overlap, InterleavedViewsAreApart) {
    Buffer b;
    constexpr std::int64_t part = H * D, row = 3 * part;
    // q, k and v in one packed tensor [T, 3, H, D], and their gradients in another.
    const AttentionInputs in{.q = b.rows(0, row), .k = b.rows(part, row), .v = b.rows(2 * part, row)};
    const std::int64_t g = 1024;
    const AttentionGradients gradients{
        .d_o = b.rows(2048), .dq = b.rows(g, row), .dk = b.rows(g + part, row), .dv = b.rows(g + 2 * part, row)};
    EXPECT_EQ(error_of([&] { attention_backward(in, gradients); }), "");
    // Results in the gaps of operands.
    const AttentionInputs some{.q = b.rows(0, row), .k = b.rows(0, row), .v = b.rows(part, row)};
    EXPECT_EQ(error_of([&] { attention_forward(some, {.o = b.rows(2 * part, row)}); }), "");
    EXPECT_NE(error_of([&] { attention_forward(some, {.o = b.rows(2 * part - 1, row)}); }), "");
    EXPECT_NE(error_of([&] { attention_forward(some, {.o = b.rows(2 * part, row - 1)}); }), "");
    // Even and odd columns.
    const auto columns = [&](std::int64_t first) {
        return Tensor(b.data.data() + first, DType::f32, {1, T, H, D}, {0, 2 * H * D, 2 * D, 2});
    };
    EXPECT_EQ(
        error_of([&] { attention_forward({.q = columns(0), .k = columns(0), .v = columns(0)}, {.o = columns(1)}); }),
        "");
    EXPECT_NE(
        error_of([&] { attention_forward({.q = columns(0), .k = columns(0), .v = columns(0)}, {.o = columns(2)}); }),
        "");
}

TEST(Overlap, OfWorkspaceAndStagesIsNamed) {
    Buffer b;
    constexpr std::int64_t n = T * H * D;
    const AttentionInputs in{.q = b.rows(0), .k = b.rows(n), .v = b.rows(2 * n)};
    Execution execution;
    execution.workspace = std::as_writable_bytes(std::span(b.data).subspan(3 * n, 512));
    const std::string rule = ", expected memory of its own: results are written while others are still needed";
    EXPECT_EQ(error_of([&] { attention_forward(in, {.o = b.rows(3 * n)}, {}, execution); }),
              "o: memory is shared with execution.workspace" + rule);
    execution.workspace = std::as_writable_bytes(std::span(b.data).subspan(3 * n - 1, 512));
    EXPECT_EQ(error_of([&] { attention_forward(in, {.o = b.rows(1024)}, {}, execution); }),
              "execution.workspace: memory is shared with v" + rule);
    Execution stages;
    stages.engine = "stages_f32";
    stages.stages.wanted = {{"lse", b.dense(0, {1, H, T})}};
    EXPECT_EQ(error_of([&] { attention_forward(in, {.o = b.rows(1024)}, {}, stages); }),
              "lse: memory is shared with q" + rule);
}

// Against a list of every byte: drawn views, small and near each other.
TEST(Overlap, IsDecidedExactly) {
    std::mt19937 random(7);
    const auto draw = [&](int least, int most) { return std::uniform_int_distribution<int>(least, most)(random); };
    struct View {
        DType dtype;
        std::int64_t first;
        std::array<std::int64_t, 3> shape, stride;  // bytes of `first`, elements of strides
        std::vector<bool> bytes;
    };
    constexpr std::int64_t memory = 4096;
    const auto draw_view = [&](bool written) {
        for (;;) {
            View view{draw(0, 1) == 0 ? DType::f32 : DType::bf16, 0, {}, {}, std::vector<bool>(memory, false)};
            const std::int64_t item = view.dtype == DType::f32 ? 4 : 2;
            view.first = item * draw(200, 300);
            std::int64_t reach = 0;
            for (std::size_t i = 3; i-- > 0;) {
                view.shape[i] = draw(1, 4);
                // A result's elements must not overlap: each stride is beyond the reach of those after it.
                view.stride[i] = written ? reach + draw(1, 5) : draw(-12, 12);
                reach += view.stride[i] * (view.shape[i] - 1);
                if (written && draw(0, 3) == 0) view.stride[i] = -view.stride[i];
            }
            bool inside = true;
            for (std::int64_t i = 0; i < view.shape[0]; ++i)
                for (std::int64_t j = 0; j < view.shape[1]; ++j)
                    for (std::int64_t k = 0; k < view.shape[2]; ++k) {
                        const std::int64_t at =
                            view.first + item * (i * view.stride[0] + j * view.stride[1] + k * view.stride[2]);
                        inside = inside && at >= 0 && at + item <= memory;
                        for (std::int64_t x = 0; inside && x < item; ++x)
                            view.bytes[static_cast<std::size_t>(at + x)] = true;
                    }
            if (inside) return view;
        }
    };
    std::vector<char> data(memory);
    const auto tensor = [&](const View& v) {
        return Tensor(data.data() + v.first, v.dtype, {1, v.shape[0], v.shape[1], v.shape[2]},
                      {0, v.stride[0], v.stride[1], v.stride[2]});
    };
    std::vector<float> values(64, 0.5F), rest(64);
    int refused = 0;
    for (int call = 0; call < 20000; ++call) {
        // v is read, o written: of one shape when k has as many rows as q.
        View v = draw_view(false), o = draw_view(true);
        const Tensor q(values.data(), DType::f32, {1, o.shape[0], o.shape[1], 1}, {0, 0, 0, 1});
        const Tensor k(values.data(), DType::f32, {1, v.shape[0], v.shape[1], 1}, {0, 0, 0, 1});
        if (o.shape[2] != v.shape[2] || o.shape[1] % v.shape[1] != 0) continue;
        bool shared = false;
        for (std::size_t i = 0; i < data.size(); ++i) shared = shared || (v.bytes[i] && o.bytes[i]);
        std::fill(data.begin(), data.end(), '\0');
        const std::string error =
            error_of([&] { attention_forward({.q = q, .k = k, .v = tensor(v)}, {.o = tensor(o)}); });
        ASSERT_EQ(error.find("memory is shared") != std::string::npos, shared) << "call " << call << ": " << error;
        if (!shared) {
            ASSERT_EQ(error, "");
        }
        refused += shared;
    }
    EXPECT_GT(refused, 500);
}

}  // namespace
}  // namespace softdelta
