// The delta rules, forward, backward and step, over lengths, heads and head dimensions.
#include "timed_problem.h"

namespace {

using namespace softdelta;
using cli::DeltaShape, cli::Pass;

constexpr std::pair<Rule, const char*> rules[] = {{Rule::delta_rule, "delta_rule"},
                                                  {Rule::gated_delta_rule, "gated_delta_rule"},
                                                  {Rule::kda, "kda"},
                                                  {Rule::comba, "comba"},
                                                  {Rule::simple_gla, "simple_gla"}};

void add_rule(Rule rule, const std::string& name) {
    for (const Pass pass : {Pass::forward, Pass::backward})
        for (const DType dtype : {DType::f32, DType::bf16})
            for (const std::int64_t heads : {1, 16})
                for (const std::int64_t tokens : {512, 4096})
                    for (const std::int64_t size : {64, 128}) {
                        const DeltaShape shape{.rule = rule,
                                               .tokens = tokens,
                                               .heads = heads,
                                               .value_heads = heads,
                                               .head_size = size,
                                               .dtype = dtype,
                                               .pass = pass};
                        bench::add(name + (pass == Pass::forward ? "/forward/" : "/backward/") + cli::type_name(dtype) +
                                       "/H" + std::to_string(heads) + "/T" + std::to_string(tokens) + "/D" +
                                       std::to_string(size),
                                   [shape] { return cli::make_delta(shape); });
                    }
    for (const std::int64_t layers : {1, 40}) {  // states in cache, and far too many for it
        const DeltaShape shape{.rule = rule, .heads = 32, .value_heads = 32, .layers = layers};
        bench::add(name + "/step/H32/D128/layers" + std::to_string(layers), [shape] { return cli::make_delta(shape); });
    }
}

}  // namespace

int main(int argc, char** argv) {
    for (const auto& [rule, name] : rules) add_rule(rule, name);
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
    benchmark::RunSpecifiedBenchmarks();
}
