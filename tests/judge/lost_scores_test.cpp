// Finite additive masks so large that f32 loses the scores beside them: such rows are set apart, and the limits of the
// rest keep their teeth.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <tuple>

#include "io/call/make_case.h"
#include "judge/small_attention.h"
#include "judge/small_delta.h"
#include "judge/verdicts.h"

namespace softdelta::test {

namespace {

io::MakeOptions padded(double mask_value, DType dtype = DType::f32) {
    io::MakeOptions o;
    o.op = "attention";
    o.seed = 7;
    o.dtype = dtype;
    o.batch = 2, o.heads = 4, o.key_heads = 2;
    o.queries = o.keys = 90;
    o.key_size = 32, o.value_size = 24;
    o.bias = "padding", o.mask_value = mask_value;
    return o;
}

std::vector<judge::Finding> judge_changed(const io::CaseFile& file, const std::string& result,
                                          const std::function<void(const Floats&)>& change) {
    const io::Call call = io::call_of(file);
    Results results = run_small_attention(call);
    if (!result.empty()) {
        const Floats changed(results.at(result).view());
        change(changed);
        results.at(result) = changed.stored(io::output_dtype(call, result));
    }
    return judge_results(call, results);
}

std::vector<judge::Finding> judge_changed(const io::MakeOptions& options, const std::string& result,
                                          const std::function<void(const Floats&)>& change) {
    return judge_changed(io::make_case(options), result, change);
}

std::vector<judge::Finding> judge_right(const io::MakeOptions& options) {
    return judge_changed(options, "", [](const Floats&) {});
}

TEST(LostScores, RightKernelsAreRightAndLimitsHaveTeeth) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
        for (const double mask : {-1e4, -1e9, -1e10, -1e20, -3.4028e38, 1e10}) {
            const std::vector<judge::Finding> findings = judge_right(padded(mask, dtype));
            EXPECT_TRUE(all_right(findings)) << mask << "\n" << Table{findings};
            for (const judge::Finding& f : findings) EXPECT_LT(f.limit, 0.1) << mask << "\n" << Table{findings};
        }
}

TEST(LostScores, WhatRoundingDecidesCannotBeJudged) {
    const std::vector<judge::Finding> findings = judge_right(padded(-1e8));  // f32 keeps multiples of 8
    EXPECT_EQ(judge::summarise(findings), judge::Verdict::cannot_be_judged) << Table{findings};
    for (const judge::Finding& f : findings) {
        const bool sums_over_rows = f.name != "o" && f.name != "lse" && f.name != "dq";
        EXPECT_EQ(f.verdict == judge::Verdict::cannot_be_judged, sums_over_rows) << Table{findings};
        EXPECT_NE(f.note.find("f32 cannot keep"), std::string::npos) << Table{findings};
    }
}

TEST(LostScores, WrongResultsAreWrong) {
    const auto scale_all = [](float factor) {
        return [factor](const Floats& x) {
            for (Index b = 0; b < x.size(0); ++b)
                for (Index h = 0; h < x.size(2); ++h) x.rows(b, 0, x.size(1), h) *= factor;
        };
    };
    for (const double mask : {-1e9, -1e10, -3.4028e38}) {
        for (const char* name : {"o", "dq", "dk", "dv"})
            for (const float factor : {0.0f, 0.98f, 60.0f}) {
                const auto findings = judge_changed(padded(mask), name, scale_all(factor));
                EXPECT_TRUE(is_wrong(findings, name)) << name << " times " << factor << "\n" << Table{findings};
            }
        // one masked row is 0, as if it had no key
        const auto lost_row = judge_changed(padded(mask), "o", [](const Floats& o) { o.rows(0, 0, 1, 1).setZero(); });
        EXPECT_TRUE(is_wrong(lost_row, "o")) << Table{lost_row};
        const auto nan = judge_changed(padded(mask), "o", [](const Floats& o) { o[3] = std::nanf(""); });
        EXPECT_TRUE(is_wrong(nan, "o")) << Table{nan};
        const auto lse =
            judge_changed(padded(mask), "lse", [](const Floats& x) { x[0] = -std::numeric_limits<float>::infinity(); });
        EXPECT_TRUE(is_wrong(lse, "lse")) << Table{lse};
        const auto seen = judge_changed(padded(mask), "lse", [](const Floats& x) { x[89] += 0.01f; });
        EXPECT_TRUE(is_wrong(seen, "lse")) << Table{seen};
    }
}

// The first rows of a sequence see masked keys alone: their number is not what dv is multiplied by.
TEST(LostScores, WhatTheExactScoresGiveIsRightToo) {
    const io::CaseFile file = io::make_case(padded(-1e10));
    const io::Call call = io::call_of(file);
    Results results;
    for (const std::string& name : io::output_names(call))
        results.emplace(name, io::OwnedTensor(io::output_dtype(call, name), io::output_shape(call, name)));
    Execution execution;
    execution.engine = "reference";
    io::execute(call, views(results), execution);
    const auto findings = judge_results(call, results);
    EXPECT_TRUE(all_right(findings)) << Table{findings};
}

TEST(LostScores, BeyondEveryBound) {
    const auto findings = judge_changed(padded(-1e8), "o", [](const Floats& o) { o[2] = 40; });
    EXPECT_TRUE(is_wrong(findings, "o")) << Table{findings};
}

// Without dlse, p is 1 and ds the difference of two equal sums: a right kernel may return what rounding leaves of them.
TEST(Limits, RowsThatSeeOneKeyHaveTheirTermsRounding) {
    io::MakeOptions packed = padded(0);
    packed.batch = 1, packed.bias = "none", packed.lengths = {40, 3}, packed.key_lengths = {50, 1};
    io::CaseFile file = io::make_case(packed);
    file.tensors.erase("dlse");
    const auto judged = [&](const char* name, float error, Index row) {
        return judge_changed(file, name, [=](const Floats& x) { x.rows(0, row, 1, 1).array() += error; });
    };
    for (const auto& [name, row] : {std::pair<const char*, Index>{"dq", 42}, {"dk", 50}}) {
        EXPECT_TRUE(all_right(judged(name, 1e-6f, row))) << name << "\n" << Table{judged(name, 1e-6f, row)};
        EXPECT_TRUE(is_wrong(judged(name, 1e-3f, row), name));
    }
}

// Without a state o = scale·(q·k) v: where q·k is small by chance, it has the rounding of its terms, and so has all of
// o. The gate of that token changes nothing: dg is a difference of equal sums.
TEST(Limits, AFirstTokenHangsOnOneProduct) {
    for (const auto& [op, name, wrong] : {std::tuple<const char*, const char*, float>{"simple_gla", "o", 1e-4f},
                                          {"gated_delta_product", "dg", 1e-2f}}) {
        io::MakeOptions options;
        options.op = op, options.dtype = DType::f32, options.lengths = {1, 70};
        options.heads = options.value_heads = 1, options.key_size = options.value_size = 16;
        options.initial_state = options.l2norm = false;
        options.steps = name == std::string("dg") ? 2 : 1;
        const io::CaseFile file = io::make_case(options);
        auto* q = static_cast<float*>(file.tensors.at("q").data());
        const auto* k = static_cast<const float*>(file.tensors.at("k").data());
        if (options.steps == 1) {
            Eigen::Map<Eigen::VectorXf> row(q, 16);
            const Eigen::Map<const Eigen::VectorXf> key(k, 16);
            row -= row.dot(key) / key.squaredNorm() * key;
        }
        const io::Call call = io::call_of(file);
        const auto judged = [&, result = name](float error) {
            Results results = run_small_delta(call);
            const Floats changed(results.at(result).view());
            changed.rows(0, 0, 1, 0).array() += error;
            results.at(result) = changed.stored(io::output_dtype(call, result));
            return judge_results(call, results);
        };
        EXPECT_TRUE(all_right(judged(2e-8f))) << op << "\n" << Table{judged(2e-8f)};
        EXPECT_TRUE(is_wrong(judged(wrong), name)) << op;
    }
}

TEST(Limits, AboveHalfJudgeNothing) {
    const io::CaseFile file = io::make_case(padded(0));
    const io::Call call = io::call_of(file);
    const Results results = run_small_attention(call);
    judge::Options options;
    options.threads = 1;
    options.limits["dq"] = 0.6;
    for (const judge::Finding& f : judge::verify(call, views(results), options)) {
        EXPECT_EQ(f.verdict, f.name == "dq" ? judge::Verdict::cannot_be_judged : judge::Verdict::right) << f.name;
        EXPECT_EQ(f.note.find("above 0.5") != std::string::npos, f.name == "dq") << f.note;
    }
}

}  // namespace

}  // namespace softdelta::test
