// A call that does not hold together is refused before anything of it is read: with what verify says, by diagnose too.
#include <gtest/gtest.h>

#include <limits>

#include "diagnose/diagnose.h"
#include "io/call/make_case.h"
#include "judge/floats.h"
#include "judge/small_attention.h"
#include "judge/small_delta.h"
#include "support/error_of.h"

namespace softdelta::test {

namespace {

io::MakeOptions small(const std::string& op) {
    io::MakeOptions options;
    options.op = op;
    options.batch = 2, options.heads = 2, options.value_heads = 2;
    options.tokens = options.queries = options.keys = 20;
    options.key_size = options.value_size = 4;
    return options;
}

// What verify says of a case whose results are all zeros; diagnose says the same, of a part of it and of all.
std::string refusal(const io::CaseFile& file) {
    const io::Call call = io::call_of(file);
    std::map<std::string, Tensor> results, intermediates;
    for (const std::string& name : call.outputs) results[name] = file.tensors.at(name).view();
    for (const std::string& name : call.intermediates) intermediates[name] = file.tensors.at(name).view();
    const std::string expected = error_of([&] { judge::verify(call, results, {}); });
    for (const double work : {0.0, 1e9}) {
        diagnose::Options options;
        options.threads = 1, options.work = work;
        EXPECT_EQ(error_of([&] { diagnose::diagnose(call, results, intermediates, options); }), expected);
    }
    return expected;
}

void set(io::CaseFile& file, const std::string& name, std::vector<std::int64_t> shape, DType dtype = DType::f32) {
    file.tensors[name] = io::OwnedTensor(dtype, std::move(shape));
}

TEST(Refused, SizesThatContradictEachOther) {
    const auto attention = [](const std::vector<std::int64_t>& q, const std::vector<std::int64_t>& k) {
        io::CaseFile file;
        file.metadata["op"] = "attention";
        set(file, "q", q), set(file, "k", k), set(file, "v", k);
        set(file, "o", q);
        return refusal(file);
    };
    EXPECT_EQ(attention({1, 4, 2, 2}, {1, 4, 0, 2}), "k: dimension 2 is 0, expected 1 or more (key heads)");
    EXPECT_EQ(attention({1, 4, 0, 2}, {1, 4, 0, 2}), "k: dimension 2 is 0, expected 1 or more (key heads)");
    EXPECT_EQ(attention({3, 4, 2, 2}, {1, 4, 2, 2}), "k: dimension 0 is 1, expected 3 (batch)");
    EXPECT_EQ(attention({3, 4, 2, 0}, {3, 4, 2, 0}), "q: dimension 3 is 0, expected 1 or more");
    EXPECT_EQ(attention({3, 4, 3, 2}, {3, 4, 2, 2}), "q: dimension 2 is 3, expected a multiple of 2 (key heads)");
    constexpr std::int64_t huge = std::int64_t{1} << 28;
    EXPECT_NE(attention({huge, 0, 1, 1}, {huge, 0, 1, 1}).find("not huge beside a 0"), std::string::npos);

    const auto delta = [](std::int64_t B, std::int64_t T, std::int64_t H, std::int64_t v_batch, std::int64_t HV) {
        io::CaseFile file;
        file.metadata["op"] = "gated_delta_rule";
        set(file, "q", {B, T, H, 2}), set(file, "k", {B, T, H, 2});
        set(file, "v", {v_batch, T, HV, 2}), set(file, "g", {B, T, HV}), set(file, "o", {B, T, HV, 2});
        return refusal(file);
    };
    EXPECT_EQ(delta(1, 4, 0, 1, 2), "q: dimension 2 is 0, expected 1 or more (heads)");
    EXPECT_EQ(delta(3, 4, 2, 1, 2), "v: dimension 0 is 1, expected 3 (batch)");
    EXPECT_NE(delta(huge, 0, 1, huge, 1).find("not huge beside a 0"), std::string::npos);
}

// Right but for one row of `name`.
io::CaseFile spoilt(const io::MakeOptions& options, const std::string& name) {
    io::CaseFile file = io::make_case(options);
    const io::Call call = io::call_of(file);
    for (auto& [result, tensor] : call.is_attention ? run_small_attention(call) : run_small_delta(call))
        file.tensors[result] = tensor;
    Floats x(file.tensors.at(name).view());
    for (Index i = 0; i < 4; ++i) x[i] += 1;
    file.tensors[name] = x.stored(file.tensors.at(name).dtype());
    return file;
}

TEST(Misshapen, IntermediatesAreNamedAndNotRead) {
    for (const char* op : {"attention", "kda"}) {
        io::CaseFile file = spoilt(small(op), "o");
        const bool attention = std::string(op) == "attention";
        const std::vector<std::string> names = attention ? std::vector<std::string>{"delta", "ds", "dbias_tiles"}
                                                         : std::vector<std::string>{"A", "h", "w", "dg_q", "dh"};
        for (const std::string& name : names) set(file, name, {1, 1, 1, 1});
        set(file, names.back(), {5});
        const io::Call call = io::call_of(file);
        std::map<std::string, Tensor> results, intermediates;
        for (const std::string& name : call.outputs) results[name] = file.tensors.at(name).view();
        for (const std::string& name : call.intermediates) intermediates[name] = file.tensors.at(name).view();
        for (const double work : {0.0, 1e12}) {
            diagnose::Options options;
            options.threads = 1, options.work = work;
            const diagnose::Diagnosis diagnosis = diagnose::diagnose(call, results, intermediates, options);
            EXPECT_TRUE(diagnosis.wrong()) << op;
            ASSERT_EQ(diagnosis.stages.size(), names.size()) << op;
            for (const diagnose::StageFinding& f : diagnosis.stages)
                EXPECT_NE(f.note.find("shape is ["), std::string::npos) << f.name << ": " << f.note;
        }
    }
}

// A window wider than the call is none at all, however wide.
TEST(Windows, MayBeAsWideAsANumber) {
    io::MakeOptions options = small("attention");
    options.causal = "bottom_right";
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    const auto diagnosed = [&](std::int64_t left, std::int64_t right) {
        options.window_left = left, options.window_right = right;
        const io::CaseFile file = io::make_case(options);
        const io::Call call = io::call_of(file);
        const Results results = run_small_attention(call, AttentionMistake::scores_without_scale);
        diagnose::Options quiet;
        quiet.threads = 1;
        return diagnose::diagnose(call, views(results), {}, quiet).conclusion.front();
    };
    const std::string plain = diagnosed(-1, -1);
    EXPECT_NE(plain.find("one mistake explains it, scores_without_scale"), std::string::npos) << plain;
    for (const std::int64_t left : {most, most - 1, std::int64_t{-1}})
        for (const std::int64_t right : {most, most - 1}) EXPECT_EQ(diagnosed(left, right), plain);
}

}  // namespace

}  // namespace softdelta::test
