// A part of a call yields what the whole yields for it, bit for bit; and the part that is chosen is the wrong one.
#include <gtest/gtest.h>

#include <cstring>

#include "core/parallel.h"
#include "diagnose/diagnose.h"
#include "diagnose/sampling/select.h"
#include "judge/draw_case.h"
#include "judge/floats.h"

namespace softdelta::test {

namespace {

using diagnose::Selection;

Results compute(const io::Call& call, const std::vector<std::string>& names, const std::string& engine,
                Results& stages) {
    Results results;
    for (const std::string& name : names)
        results.emplace(name, io::OwnedTensor(DType::f64, io::output_shape(call, name)));
    Execution execution;
    execution.engine = engine;
    execution.threads = 1;
    execution.stages.chunk_size = call.chunk_size;
    for (const auto& [name, tensor] : stages) execution.stages.wanted.push_back({name, tensor.view()});
    io::execute(call, views(results), execution);
    return results;
}

std::vector<std::int64_t> draw_some(Draw& draw, std::int64_t count) {
    std::vector<std::int64_t> some;
    for (std::int64_t i = 0; i < count; ++i)
        if (draw.one_in(2)) some.push_back(i);
    if (some.empty()) some.push_back(draw.between(0, count - 1));
    return some;
}

bool same(const Tensor& a, const io::OwnedTensor& b) {
    return a.count() == b.count() && std::memcmp(a.data(), b.data(), b.bytes()) == 0;
}

// Intermediates that the stages engine writes for a call, zeros yet.
Results stages_of(const io::Call& call) {
    Results stages;
    if (call.is_attention || !call.d_o) return stages;
    const auto v = call.delta.v.shape();
    const std::int64_t K = call.delta.q.shape(3), C = call.chunk_size;
    stages.emplace("Aqk", io::OwnedTensor(DType::f64, {v[0], v[1], v[2], C}));
    stages.emplace("du", io::OwnedTensor(DType::f64, {v[0], v[1], v[2], v[3]}));
    std::int64_t chunks = (v[1] + C - 1) / C;
    if (call.delta.cu_seqlens) {
        chunks = 0;
        const Floats entries(call.delta.cu_seqlens);
        for (Index n = 0; n + 1 < entries.size(0); ++n)
            chunks += (static_cast<std::int64_t>(entries[n + 1] - entries[n]) + C - 1) / C;
    }
    stages.emplace("h", io::OwnedTensor(DType::f64, {v[0], chunks, v[2], K, v[3]}));
    return stages;
}

std::string try_sample(std::int64_t seed) {
    Draw draw(static_cast<std::uint64_t>(seed));
    io::MakeOptions options = draw_case(draw);
    if (options.op == "attention" && draw.one_in(4)) options.block_rows = draw.between(1, 40);
    const io::CaseFile file = io::make_case(options);
    const io::Call call = io::call_of(file);
    Selection selection{draw_some(draw, diagnose::sequence_count(call)), draw_some(draw, diagnose::group_count(call))};
    if (draw.one_in(3)) selection.sequences = diagnose::select_all(call).sequences;
    const std::vector<std::string> names = io::output_names(call);
    Results stages = stages_of(call);
    const std::string engine = stages.empty() ? "reference" : "stages_f64";
    const Results whole = compute(call, names, engine, stages);
    const diagnose::Sample sample(call, views(whole), views(stages), selection);

    std::string faults;
    std::vector<std::string> kept;
    for (const auto& [name, tensor] : sample.results) kept.push_back(name);
    if (kept.size() + sample.left_out.size() != names.size()) faults += "a result is neither kept nor left out; ";
    Results part_stages;
    for (const auto& [name, tensor] : sample.intermediates)
        part_stages.emplace(name, io::OwnedTensor(DType::f64, {tensor.shape().begin(), tensor.shape().end()}));
    const Results part = compute(sample.call, kept, engine, part_stages);
    for (const std::string& name : kept)
        if (!same(sample.results.at(name), part.at(name))) faults += name + " differs; ";
    for (const auto& [name, tensor] : part_stages)
        if (!same(sample.intermediates.at(name), tensor)) faults += name + " differs; ";
    return faults.empty() ? "" : call.op + ", case " + std::to_string(seed) + ": " + faults;
}

TEST(Sample, HoldsWhatTheWholeHolds) {
    constexpr std::int64_t count = 200;
    std::vector<std::string> faults(count);
    core::parallel_units(0, count,
                         [&] { return [&](std::int64_t i) { faults[static_cast<std::size_t>(i)] = try_sample(i); }; });
    for (const std::string& text : faults) EXPECT_TRUE(text.empty()) << text;
}

// Two batch rows, eight heads in four groups; dq is wrong in row 1, heads 4 and 5.
TEST(Sample, IsWhereTheErrorIs) {
    io::MakeOptions options;
    options.op = "gated_delta_rule";
    options.batch = 2, options.tokens = 150;
    options.heads = 4, options.value_heads = 8;
    options.key_size = options.value_size = 16;
    const io::CaseFile file = io::make_case(options);
    const io::Call call = io::call_of(file);
    Results results;
    for (const std::string& name : io::output_names(call))
        results.emplace(name, io::OwnedTensor(io::output_dtype(call, name), io::output_shape(call, name)));
    io::execute(call, views(results), {});
    Floats dv(results.at("dv").view());
    for (const Index h : {4, 5}) dv.rows(1, 70, 80, h).setZero();
    results.at("dv") = dv.stored(DType::bf16);

    const diagnose::Screen screen = diagnose::compare_with_fast(call, views(results), 1);
    const double all = diagnose::work_of(call, diagnose::select_all(call));
    EXPECT_EQ(diagnose::select(call, screen, all).groups.size(), 4u);
    const Selection least = diagnose::select(call, screen, 0);
    EXPECT_EQ(least.sequences, std::vector<std::int64_t>{1});
    EXPECT_EQ(least.groups, std::vector<std::int64_t>{2});
    const Selection half = diagnose::select(call, screen, all / 2);
    EXPECT_LE(diagnose::work_of(call, half), all / 2);
    EXPECT_EQ(half.sequences, (std::vector<std::int64_t>{0, 1}));
    EXPECT_EQ(half.groups.size(), 2u);

    diagnose::Options few;
    few.work = all / 2;  // for all mistakes together: one group of one batch row
    const diagnose::Diagnosis diagnosis = diagnose::diagnose(call, views(results), {}, few);
    ASSERT_TRUE(diagnosis.wrong());
    ASSERT_FALSE(diagnosis.examined.empty());
    EXPECT_EQ(
        diagnosis.examined.front().rfind("key heads 2 of 0-3, with all heads of their groups, of batch rows 1", 0), 0u)
        << diagnosis.examined.front();
    EXPECT_NE(diagnosis.where.front().find("only rows from 70 on"), std::string::npos) << diagnosis.where.front();
    for (const judge::Finding& f : diagnosis.findings)
        if (f.name == "dv")
            EXPECT_EQ(f.note.rfind("worst in batch row 1, head ", 0), 0u) << f.note;
        else
            EXPECT_EQ(f.verdict, judge::Verdict::right) << f.name;
    EXPECT_GT(diagnosis.ranking.pairs_left_out, 0u);
}

}  // namespace

}  // namespace softdelta::test
