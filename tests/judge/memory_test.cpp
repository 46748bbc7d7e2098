// What a call is said to need of memory is no less than what it takes, and where that is much, not far more.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "judge/draw_case.h"
#include "judge/layer.h"
#include "judge/memory.h"
#include "support/allocations.h"
#include "support/array.h"
#include "support/call_count.h"
#include "support/teams.h"

namespace softdelta {
namespace {

constexpr double mib = 1 << 20;

// Bytes that `compute` held at once, above what was held before.
template <class Compute>
double peak_of(const Compute& compute) {
    const std::int64_t before = test::bytes_held();
    test::follow_peak();
    compute();
    return static_cast<double>(test::peak_bytes() - before);
}

void expect_about(double needed, double taken, const std::string& what) {
    EXPECT_GE(needed, taken) << what;
    if (taken > 32 * mib) {
        EXPECT_LE(needed, 3 * taken) << what;
    }
}

template <class Call>
std::map<std::string, io::OwnedTensor> compute(const Call& call, const std::string& engine, int threads) {
    std::map<std::string, io::OwnedTensor> memory;
    std::map<std::string, Tensor> results;
    for (const std::string& name : io::output_names(call)) {
        memory.emplace(name, io::OwnedTensor(io::output_dtype(call, name), io::output_shape(call, name)));
        results[name] = memory.at(name).view();
    }
    Execution execution;
    execution.engine = engine;
    execution.threads = threads;
    if (engine == "stages_f32") execution.rounding.seed = 1;
    io::execute(call, results, execution);
    return memory;
}

void check(const io::CaseFile& file, int threads) {
    std::visit(
        [&](const auto& call) {
            const bool layer = !std::is_same_v<std::decay_t<decltype(call)>, io::Call>;
            for (const char* engine : {"reference", "stages_f64", "stages_f32"}) {
                if (layer && engine != std::string("reference")) continue;
                expect_about(judge::memory_to_compute(call, engine, threads),
                             peak_of([&] { compute(call, engine, threads); }), engine);
            }
            const std::map<std::string, io::OwnedTensor> memory = compute(call, "reference", threads);
            std::map<std::string, Tensor> results;
            std::vector<std::string> names;
            for (const auto& [name, tensor] : memory) results[name] = tensor.view(), names.push_back(name);
            judge::Options options;
            options.threads = threads;
            expect_about(judge::memory_to_judge(call, names, "", threads),
                         peak_of([&] { judge::verify(call, results, options); }), "verify");
        },
        io::any_call_of(file));
}

TEST(Memory, OfDrawnCalls) {
    if (test::count_allocations() < 0) GTEST_SKIP() << "allocations do not come here";
    for (std::int64_t i = 0; i < test::call_count(15); ++i) {
        const std::uint64_t seed = test::first_seed() + static_cast<std::uint64_t>(i);
        SCOPED_TRACE("SOFTDELTA_SEED=" + std::to_string(seed));
        test::Draw draw(seed);
        check(io::make_case(test::draw_case(draw)), 1 + static_cast<int>(seed % 2));
        if (HasFailure()) return;
    }
}

io::CaseFile file_of(const std::string& op, const std::map<std::string, std::vector<std::int64_t>>& shapes) {
    io::CaseFile file;
    file.metadata["op"] = op;
    for (const auto& [name, shape] : shapes) file.tensors.emplace(name, io::OwnedTensor(DType::f32, shape));
    return file;
}

// Tensors without elements beside large sizes: a few hundred bytes of file.
TEST(Memory, OfSmallFilesThatAreMuchWork) {
    if (test::count_allocations() < 0) GTEST_SKIP() << "allocations do not come here";
    const std::vector<std::int64_t> large_states{1, 0, 1, 1500}, many_states{40, 0, 4, 100}, more_values{40, 0, 8, 100},
        sequences{60000, 0, 4, 8}, keys{3, 100000, 1, 1}, channels{2000, 0, 500};
    const std::map<std::string, io::CaseFile> files{
        {"a large state",
         file_of("delta_rule", {{"q", large_states}, {"k", large_states}, {"v", large_states}, {"do", large_states}})},
        {"many states",
         file_of(
             "kda",
             {{"q", many_states}, {"k", many_states}, {"v", more_values}, {"g", more_values}, {"do", more_values}})},
        {"many sequences",
         file_of("attention", {{"q", sequences}, {"k", sequences}, {"v", sequences}, {"do", sequences}})},
        {"states of a convolution",
         file_of("causal_convolution", {{"x", channels}, {"weight", {500, 4}}, {"dy", channels}})},
        {"few rows of many keys",
         file_of("attention", {{"q", {3, 40, 1, 1}}, {"k", keys}, {"v", keys}, {"do", {3, 40, 1, 1}}})},
    };
    for (const auto& [name, file] : files) {
        SCOPED_TRACE(name);
        check(file, 1);
    }
}

// A shared bias has sums for many units; gates that rise make a piece of every token.
TEST(Memory, OfCallsThatKeepMuch) {
    if (test::count_allocations() < 0) GTEST_SKIP() << "allocations do not come here";
    io::MakeOptions bias;
    bias.op = "attention";
    bias.batch = 8, bias.queries = bias.keys = 150, bias.bias = "head", bias.dtype = DType::f32;
    check(io::make_case(bias), 2);
    io::MakeOptions rising;
    rising.op = "gated_delta_rule";
    rising.tokens = 300, rising.gate = "uniform", rising.gate_value = 1.5;
    check(io::make_case(rising), 1);
    io::MakeOptions long_call;
    long_call.op = "kda";
    long_call.tokens = 3000, long_call.heads = long_call.value_heads = 1;
    check(io::make_case(long_call), 1);
}

}  // namespace
}  // namespace softdelta
