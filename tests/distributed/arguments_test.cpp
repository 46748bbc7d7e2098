// Nonsense given to the functions between ranges: one error that names argument, actual and expected.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "softdelta/softdelta.hpp"
#include "support/error_of.h"

namespace softdelta {
namespace {

using test::error_of;

// A range of 4 tokens, 2 heads, K = 3, V = 2; its summary, its gradient, and the fold of 5 such.
struct RangeCalls {
    std::vector<float> data = std::vector<float>(4096, 0.25F);
    std::size_t used = 0;
    DeltaInputs in{};
    DeltaSummary summary{floats({1, 2, 3, 3}), floats({1, 2, 3, 2})};
    DeltaSummaryGradient gradient{floats({1, 4, 2, 2}), floats({1, 2, 3, 2})};
    DeltaFoldInputs fold{floats({5, 1, 2, 3, 3}), floats({5, 1, 2, 3, 2}), floats({1, 2, 3, 2})};
    DeltaFoldOutputs folded{floats({5, 1, 2, 3, 2}), floats({1, 2, 3, 2})};
    std::vector<AttentionOutputs> parts{{floats({1, 2, 3, 4}), floats({1, 3, 2})},
                                        {floats({1, 2, 3, 4}), floats({1, 3, 2})}};
    AttentionOutputs merged{floats({1, 2, 3, 4}), floats({1, 3, 2})};
    DeltaOptions options{};
    Execution execution{};

    RangeCalls() {
        in.q = floats({1, 4, 2, 3}), in.k = floats({1, 4, 2, 3}), in.v = floats({1, 4, 2, 2});
        in.g = floats({1, 4, 2}), in.beta = floats({1, 4, 2});
    }
    Tensor floats(std::initializer_list<std::int64_t> shape) {
        const Tensor t(data.data() + used, DType::f32, shape);
        used += static_cast<std::size_t>(t.count());
        return t;
    }
    std::string summarise() const {
        return error_of([this] { delta_summary(in, summary, options, execution); });
    }
    std::string differentiate() const {
        return error_of([this] { delta_summary_backward(in, gradient, options, execution); });
    }
    std::string fold_states() const {
        return error_of([this] { delta_fold(fold, folded, options, execution); });
    }
    std::string merge() const {
        return error_of([this] { attention_merge(parts, merged, execution); });
    }
};

TEST(RangeArguments, AreNamedWithActualAndExpected) {
    using Spoil = std::function<void(RangeCalls&)>;
    using Call = std::string (RangeCalls::*)() const;
    struct Case {
        Call call;
        Spoil spoil;
        std::string error;
    };
    const Call summary = &RangeCalls::summarise, backward = &RangeCalls::differentiate, fold = &RangeCalls::fold_states,
               merge = &RangeCalls::merge;
    std::byte workspace[64];
    const std::vector<Case> cases{
        {summary, [](RangeCalls&) {}, ""},
        {backward, [](RangeCalls&) {}, ""},
        {fold, [](RangeCalls&) {}, ""},
        {merge, [](RangeCalls&) {}, ""},
        {summary,
         [](RangeCalls& c) {
             c.in.initial_state = c.floats({1, 2, 3, 2});
         },
         "initial_state is given, expected none: a summary holds for every state that enters"},
        {summary,
         [](RangeCalls& c) {
             c.summary.M = c.floats({1, 2, 3, 2});
         },
         "M: dimension 3 is 2, expected 3 (as q)"},
        {summary, [](RangeCalls& c) { c.options.rule = Rule::simple_gla, c.in.beta = {}; },
         "M: shape is [1, 2, 3, 3], expected 2 dimensions [N, HV]"},
        {summary,
         [](RangeCalls& c) {
             c.summary.E = c.floats({1, 2, 2, 3});
         },
         "E: dimensions [2, 3] is [2, 3], expected [3, 2] ([K, V]): it looks transposed; set state_v_first"},
        {summary,
         [](RangeCalls& c) {
             c.summary.E = c.summary.M;
             c.summary.E = Tensor(c.summary.M.data(), DType::f32, {1, 2, 3, 2});
         },
         "M: memory is shared with E, expected memory of its own: results are written while others are still needed"},
        {summary, [&](RangeCalls& c) { c.execution.workspace = workspace; },
         "execution.workspace is given, expected null: a summary allocates"},
        {summary, [&](RangeCalls& c) { c.execution.gpu.state_done = workspace; },
         "execution.gpu.state_ready, state_done is an event, expected null: tensors lie on the CPU"},
        {fold, [&](RangeCalls& c) { c.execution.gpu.state_done = workspace; },
         "execution.gpu.state_done is given, expected null: it is for calls of delta rules"},
        {merge, [&](RangeCalls& c) { c.execution.gpu.kept = workspace; },
         "execution.gpu.kept is given, expected null: it is for calls of delta rules"},
        {summary, [](RangeCalls& c) { c.summary = {}; }, "outputs is empty, expected one or more of M, E"},
        {backward, [](RangeCalls& c) { c.gradient.R = {}; }, "gradients is empty, expected one or more of R"},
        {fold, [](RangeCalls& c) { c.folded = {}; }, "outputs is empty, expected one or more of states, final_state"},
        {merge, [](RangeCalls& c) { c.merged = {}; }, "outputs is empty, expected one or more of o, lse"},
        {summary, [](RangeCalls& c) { c.in.g = {}; }, "g is missing, expected a tensor: gated_delta_rule has a gate"},
        {backward, [](RangeCalls& c) { c.gradient.d_o = {}; },
         "d_o is missing, expected a tensor: the gradient starts there"},
        {backward,
         [](RangeCalls& c) {
             c.gradient.R = c.floats({2, 2, 3, 2});
         },
         "R: dimension 0 is 2, expected 1 (batch)"},
        {fold, [](RangeCalls& c) { c.fold.M = {}; }, "M is missing, expected a tensor: the map of each range"},
        {fold,
         [](RangeCalls& c) {
             c.fold.E = c.floats({1, 2, 3, 2});
         },
         "E: shape is [1, 2, 3, 2], expected 5 dimensions [P, N, HV, K, V]"},
        {fold,
         [](RangeCalls& c) {
             c.fold.M = c.floats({4, 1, 2, 3, 3});
         },
         "M: dimension 0 is 4, expected 5 (ranges, as E)"},
        {fold,
         [](RangeCalls& c) {
             c.fold.initial_state = c.floats({1, 2, 2, 2});
         },
         "initial_state: dimension 2 is 2, expected 3 (as E)"},
        {fold, [](RangeCalls& c) { c.folded.states = c.fold.E; },
         "states: memory is shared with E, expected memory of its own: results are written while others are still "
         "needed"},
        {merge, [](RangeCalls& c) { c.parts.clear(); }, "count is 0, expected 1 to 1048576"},
        {merge, [](RangeCalls& c) { c.parts[1].lse = {}; }, "lse[1] is missing, expected a tensor: [B, H, Lq]"},
        {merge,
         [](RangeCalls& c) {
             c.parts[1].o = c.floats({1, 2, 3, 5});
         },
         "o[1]: dimension 3 is 5, expected 4 (as o[0])"},
        {merge, [](RangeCalls& c) { c.merged.o = c.parts[0].o; },
         "o: memory is shared with a part's o, expected memory of its own: results are written while others are still "
         "needed"},
    };
    for (const Case& one : cases) {
        RangeCalls calls;
        one.spoil(calls);
        EXPECT_EQ((calls.*one.call)(), one.error);
    }
}

// A newer client's structure is longer: what the library does not know must be 0.
TEST(RangeArguments, OfAMergeAreReadByTheirSize) {
    struct {
        softdelta_attention_merge_inputs in;
        std::uint64_t unknown;
    } newer{{sizeof newer, nullptr, nullptr, 1}, 1};
    const softdelta_attention_outputs out = softdelta_attention_outputs_default();
    EXPECT_EQ(softdelta_attention_merge(&newer.in, &out, nullptr), SOFTDELTA_UNSUPPORTED);
    newer.unknown = 0;
    EXPECT_EQ(softdelta_attention_merge(&newer.in, &out, nullptr), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_STREQ(softdelta_last_error(), "o[0] is missing, expected a tensor: [B, Lq, H, Dv]");
}

TEST(ShardArguments, AreNamedWithActualAndExpected) {
    const std::vector<float> data(64, 0.5F);
    std::vector<float> result(64);
    AttentionInputs in;
    in.q = in.k = in.v = Tensor(data.data(), DType::f32, {1, 3, 2, 4});
    const AttentionOutputs out{Tensor(result.data(), DType::f32, {1, 3, 2, 4}), {}};
    AttentionOptions options;
    const auto error = [&] { return error_of([&] { attention_forward(in, out, options); }); };
    options.query_offset = -7;
    EXPECT_EQ(error(), "");
    options.key_offset = std::int64_t{1} << 60;
    EXPECT_EQ(error(), "key_offset is 1152921504606846976, expected a position that memory can hold");
    options.key_offset = 5;
    in.alibi_slopes = Tensor(data.data(), DType::f32, {2});
    EXPECT_EQ(error(), "alibi_slopes is given, expected none: query_offset or key_offset is given");
    options.key_offset = -7;  // as if there were none
    EXPECT_EQ(error(), "");
}

}  // namespace
}  // namespace softdelta
