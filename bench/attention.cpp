// Attention, forward, backward and decode, over lengths and head dimensions.
#include "timed_problem.h"

namespace {

using namespace softdelta;
using cli::AttentionShape, cli::Extra, cli::Pass;

const char* pass_name(Pass pass) {
    return pass == Pass::forward ? "forward" : pass == Pass::backward ? "backward" : "backward_dbias";
}

void add_pass(Pass pass, const char* kind, AttentionShape shape) {
    shape.pass = pass;
    for (const DType dtype : {DType::f32, DType::bf16})
        for (const std::int64_t length : {512, 2048, 8192})
            for (const std::int64_t size : {64, 128, 192}) {
                if (shape.extra == Extra::bias && length > 2048) continue;  // the bias alone is 2 GB
                shape.dtype = dtype, shape.queries = shape.keys = length, shape.head_size = size;
                bench::add(std::string("attention/") + pass_name(pass) + "/" + kind + "/" + cli::type_name(dtype) +
                               "/S" + std::to_string(length) + "/D" + std::to_string(size),
                           [shape] { return cli::make_attention(shape); });
            }
}

void add_all() {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
        add_pass(pass, "full", {});
        add_pass(pass, "causal", {.causal = Causal::top_left});
        add_pass(pass, "window_256", {.causal = Causal::top_left, .window = 256});
        add_pass(pass, "grouped", {.key_heads = 2});
        add_pass(pass, "mask", {.extra = Extra::mask});
        add_pass(pass, "bias", {.extra = Extra::bias});
    }
    add_pass(Pass::backward_bias, "bias", {.extra = Extra::bias});
    add_pass(Pass::backward_bias, "row_bias", {.extra = Extra::row_bias});
    for (const DType dtype : {DType::f32, DType::bf16})
        for (const std::int64_t length : {1024, 8192, 32768, 131072})
            for (const bool paged : {false, true})
                bench::add(std::string("attention/decode") + (paged ? "_paged/" : "/") + cli::type_name(dtype) + "/K" +
                               std::to_string(length),
                           [=] { return cli::make_attention_decode(length, dtype, paged); });
}

}  // namespace

int main(int argc, char** argv) {
    add_all();
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
    benchmark::RunSpecifiedBenchmarks();
}
