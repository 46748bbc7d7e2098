// The rest of the report: stages, the picture, the page of the catalogue; and silence about right dumps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>

#include "core/parallel.h"
#include "diagnose/diagnose.h"
#include "diagnose/evidence/plot.h"
#include "diagnose/report.h"
#include "judge/draw_case.h"
#include "judge/mistakes.h"
#include "judge/small_attention.h"
#include "judge/small_delta.h"

namespace softdelta::test {

namespace {

using diagnose::Diagnosis;

Diagnosis diagnose_quietly(const io::Call& call, const Results& results, const Results& intermediates = {}) {
    diagnose::Options options;
    options.threads = 1;
    return diagnose::diagnose(call, views(results), views(intermediates), options);
}

// Intermediates as the low-precision baseline stores them.
Results run_stages(const io::Call& call, const std::map<std::string, std::vector<std::int64_t>>& shapes) {
    Results stages;
    Execution execution;
    execution.engine = "stages_f32";
    execution.threads = 1;
    execution.rounding.seed = 77;
    for (const auto& [name, shape] : shapes) {
        stages.emplace(name, io::OwnedTensor(DType::bf16, shape));
        execution.stages.wanted.push_back({name, stages.at(name).view()});
    }
    for (const char* result : {"o", "dq"}) {
        const io::OwnedTensor memory(DType::f32, io::output_shape(call, result));
        io::execute(call, {{result, memory.view()}}, execution);
    }
    return stages;
}

void spoil(io::OwnedTensor& tensor) {
    Floats x(tensor.view());
    std::mt19937 random(1);
    for (Index i = 0; i < tensor.count(); ++i) x[i] *= 1 + 0.2f * static_cast<float>(random() % 100) / 100;
    tensor = x.stored(tensor.dtype());
}

// Prefill and decode in one batch, keys in blocks.
TEST(Report, OfPackedQueriesOverPages) {
    io::MakeOptions options;
    options.op = "attention";
    options.lengths = {40, 1, 0, 1}, options.key_lengths = {60, 70, 5, 1}, options.block_rows = 16;
    options.heads = 4, options.key_size = options.value_size = 16;
    options.causal = "bottom_right";
    const io::CaseFile file = io::make_case(options);
    const io::Call call = io::call_of(file);
    io::Call mistaken = call;
    mistaken.attention_options.causal = Causal::top_left;
    Results results;
    for (const std::string& name : io::output_names(call))
        results.emplace(name, io::OwnedTensor(io::output_dtype(call, name), io::output_shape(call, name)));
    io::execute(mistaken, views(results), {});
    const Diagnosis diagnosis = diagnose_quietly(call, results);
    ASSERT_TRUE(diagnosis.wrong());
    const diagnose::Candidate& best = diagnosis.ranking.singles.front();
    EXPECT_EQ(best.entries.front()->name, std::string("top_left_for_bottom_right"));
    EXPECT_TRUE(best.explains);
}

// Rows that a mistake of the catalogue hardly takes away are no reason to list any.
TEST(Report, RanksNothingThatDoesNotHelp) {
    io::MakeOptions options;
    options.op = "gated_delta_rule";
    options.tokens = 70, options.heads = 2, options.value_heads = 2, options.key_size = options.value_size = 16;
    const io::CaseFile file = io::make_case(options);
    const io::Call call = io::call_of(file);
    Results results = run_small_delta(call, DeltaMistake::none);
    Floats dq(results.at("dq").view());
    for (Index i = 9 * 2 * 16; i < 14 * 2 * 16; ++i) dq[i] = -dq[i + 320] + 1;
    results.at("dq") = dq.stored(results.at("dq").dtype());
    const Diagnosis diagnosis = diagnose_quietly(call, results);
    const std::string text = diagnose::report("a dump", call, diagnosis, 1, {});
    EXPECT_NE(text.find("only rows 9 to 13"), std::string::npos) << text;
    EXPECT_EQ(text.find("Ranking"), std::string::npos) << text;
}

// As of automatic differentiation: the gradient goes back through the mistake.
TEST(Report, AGradientThatGoesBackThroughAMistake) {
    io::MakeOptions options;
    options.op = "attention";
    options.queries = 90, options.keys = 70, options.heads = 2, options.key_heads = 2, options.bias = "full";
    options.key_size = options.value_size = 16, options.softcap = 3;
    const io::CaseFile file = io::make_case(options);
    const io::Call call = io::call_of(file);
    Results results = run_small_attention(call, AttentionMistake::none, AttentionMistake::none, {"bias", "halved"});
    Floats dbias(results.at("dbias").view());
    for (Index i = 0; i < results.at("dbias").count(); ++i) dbias[i] /= 2;
    results.at("dbias") = dbias.stored(results.at("dbias").dtype());
    std::string text;
    for (const std::string& sentence : diagnose_quietly(call, results).conclusion) text += sentence + "\n";
    EXPECT_NE(text.find("nearest is the bias is halved"), std::string::npos) << text;
    EXPECT_NE(text.find("the nearest explains all wrong results but dbias"), std::string::npos) << text;
}

TEST(Stages, TheFirstWrongOneIsNamed) {
    io::MakeOptions options;
    options.op = "kda";
    options.tokens = 150;
    options.heads = 2, options.value_heads = 4;
    options.key_size = 32, options.value_size = 48;
    const io::CaseFile file = io::make_case(options);
    const io::Call call = io::call_of(file);
    const std::map<std::string, std::vector<std::int64_t>> shapes = {
        {"A", {1, 150, 4, 64}},   {"w", {1, 150, 4, 32}},     {"u", {1, 150, 4, 48}},
        {"h", {1, 3, 4, 32, 48}}, {"v_new", {1, 150, 4, 48}}, {"du", {1, 150, 4, 48}},
        {"dw", {1, 150, 4, 32}},  {"dA", {1, 150, 4, 64}},    {"dL", {1, 150, 4, 64}}};
    const Results right = run_stages(call, shapes);
    const auto findings_of = [&](const Results& stages) { return diagnose::check_stages(call, views(stages), 1); };
    for (const diagnose::StageFinding& f : findings_of(right))
        EXPECT_FALSE(f.wrong) << f.name << ": " << f.ratio << ", limit " << f.limit << " " << f.note;

    Results wrong = right;
    for (const char* name : {"dA", "dL"}) spoil(wrong.at(name));
    std::string text = diagnose::describe_stages(findings_of(wrong));
    EXPECT_EQ(text.rfind("dA is the first wrong intermediate", 0), 0u) << text;
    EXPECT_NE(text.find("right before it: A, w, u, h, v_new, du, dw"), std::string::npos) << text;
    spoil(wrong.at("u"));
    text = diagnose::describe_stages(findings_of(wrong));
    EXPECT_EQ(text.rfind("u is the first wrong intermediate", 0), 0u) << text;

    wrong.at("A") = io::OwnedTensor(DType::f32, {1, 150, 4, 16});
    EXPECT_NE(findings_of(wrong).front().note, "");
}

// Results that say nothing of a mistake get a plain report too.
TEST(Report, OfResultsWithoutAnyDigit) {
    for (const char* op : {"kda", "attention"})
        for (const std::int64_t size : {std::int64_t{1}, std::int64_t{20}}) {
            io::MakeOptions options;
            options.op = op;
            options.tokens = options.queries = options.keys = options.key_size = options.value_size = size;
            const io::CaseFile file = io::make_case(options);
            const io::Call call = io::call_of(file);
            const Results right = call.is_attention ? run_small_attention(call) : run_small_delta(call);
            for (const float value : {0.0f, std::nanf(""), HUGE_VALF}) {
                Results results, one;
                for (const auto& [name, tensor] : right) {
                    const Floats x(tensor.shape());
                    for (Index i = 0; i < tensor.count(); ++i) x[i] = value;
                    results.emplace(name, x.stored(tensor.dtype()));
                }
                one.emplace("o", results.at("o"));
                for (const Results* given : {&results, &one}) {
                    const Diagnosis d = diagnose_quietly(call, *given);
                    EXPECT_TRUE(d.wrong()) << op << " " << value;
                    EXPECT_FALSE(d.where.empty()) << op << " " << value;
                    EXPECT_FALSE(d.conclusion.empty()) << op << " " << value;
                    EXPECT_FALSE(diagnose::plot_errors("all", d.maps).empty());
                }
            }
        }
}

// Lines of 100 letters.
std::size_t lines_of(const std::string& text) {
    std::size_t lines = 0, width = 0;
    for (const char c : text) {
        if (c == '\n') lines += 1 + (std::max<std::size_t>(width, 1) - 1) / 100, width = 0;
        if (c != '\n' && (c & 0xC0) != 0x80) ++width;
    }
    return lines;
}

TEST(Report, FitsAScreen) {
    std::vector<Mistake> mistakes = delta_mistakes();
    for (const Mistake& m : attention_mistakes()) mistakes.push_back(m);
    const char* setting = std::getenv("SOFTDELTA_REPORTS");
    const std::size_t step = setting != nullptr ? mistakes.size() / std::strtoul(setting, nullptr, 10) : 20;
    std::vector<std::size_t> lengths;
    for (std::size_t i = 0; i < mistakes.size(); i += step) {
        const io::CaseFile file = io::make_case(mistakes[i].inputs);
        const io::Call call = io::call_of(file);
        const Diagnosis diagnosis = diagnose_quietly(call, mistakes[i].run(call));
        const std::string text = diagnose::report("a dump", call, diagnosis, 1, {5, false});
        lengths.push_back(lines_of(text));
        EXPECT_LE(lengths.back(), 60u) << text;
        if (lengths.back() > 30) std::printf("%s\n", text.c_str());
    }
    std::ranges::sort(lengths);
    EXPECT_LE(lengths[lengths.size() / 2], 25u);
    std::printf("%zu reports: %zu lines in the middle, at most %zu\n", lengths.size(), lengths[lengths.size() / 2],
                lengths.back());
}

TEST(Plot, DrawsTheWrongResults) {
    for (const Mistake& m : delta_mistakes()) {
        if (m.entry != std::string("dg_without_last_row") || m.inputs.op != "gated_delta_rule") continue;
        const io::CaseFile file = io::make_case(m.inputs);
        const io::Call call = io::call_of(file);
        const Diagnosis diagnosis = diagnose_quietly(call, m.run(call));
        const std::string picture = diagnose::plot_errors("a <b> & c", diagnosis.maps);
        EXPECT_EQ(picture.rfind("<svg ", 0), 0u);
        EXPECT_NE(picture.find("a &lt;b&gt; &amp; c"), std::string::npos);
        EXPECT_NE(picture.find(">dg: "), std::string::npos);
        EXPECT_EQ(picture.find(">dq: "), std::string::npos);
    }
}

TEST(Catalogue, ThePageIsCurrent) {
    std::ifstream page(SOFTDELTA_PAGE);
    const std::string text{std::istreambuf_iterator<char>(page), {}};
    EXPECT_EQ(text, diagnose::catalogue_page()) << "softdelta diagnose --catalogue > docs/diagnose.md";
}

TEST(Catalogue, NamesAreUnique) {
    for (const auto entries : {diagnose::delta_entries(), diagnose::attention_entries()}) {
        std::set<std::string> names;
        std::set<diagnose::Mistake> mistakes;
        for (const diagnose::Entry& entry : entries) {
            EXPECT_TRUE(names.insert(entry.name).second) << entry.name;
            EXPECT_TRUE(mistakes.insert(entry.mistake).second) << entry.name;
        }
    }
}

TEST(RightDumps, NoMistakeIsNamed) {
    constexpr std::int64_t count = 200;
    std::vector<std::string> accused(count);
    core::parallel_units(0, count, [&] {
        return [&](std::int64_t i) {
            Draw draw(static_cast<std::uint64_t>(10000 + i));
            const io::CaseFile file = io::make_case(draw_case(draw));
            const io::Call call = io::call_of(file);
            const Diagnosis diagnosis =
                diagnose_quietly(call, call.is_attention ? run_small_attention(call) : run_small_delta(call));
            if (diagnosis.wrong() || !diagnosis.where.empty() || !diagnosis.conclusion.empty())
                accused[static_cast<std::size_t>(i)] = "dump " + std::to_string(i) + ", " + call.op;
        };
    });
    for (const std::string& text : accused)
        if (!text.empty()) ADD_FAILURE() << text;
}

// Dumps of real kernels; SOFTDELTA_DUMPS names a folder with more of them.
TEST(RightDumps, NorOfRealKernels) {
    const char* folder = std::getenv("SOFTDELTA_DUMPS");
    std::int64_t right = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder != nullptr ? folder : SOFTDELTA_TEST_DATA)) {
        const std::string path = entry.path().string();
        if (entry.path().extension() != ".safetensors" || path.find("rows_dead") != std::string::npos) continue;
        const io::CaseFile file = io::read_case(path);
        const io::Call call = io::call_of(file);
        std::map<std::string, Tensor> results;
        for (const std::string& name : call.outputs) results[name] = file.tensors.at(name).view();
        const Diagnosis diagnosis = diagnose::diagnose(call, results, {}, {});
        EXPECT_FALSE(diagnosis.wrong()) << path;
        EXPECT_TRUE(diagnosis.conclusion.empty()) << path;
        ++right;
    }
    EXPECT_GE(right, 9);
}

}  // namespace

}  // namespace softdelta::test
