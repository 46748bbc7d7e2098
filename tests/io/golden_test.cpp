// Dumps of real kernels (tests/data/README.md) are read as the calls they are.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "io/call/call.h"

namespace softdelta::io {
namespace {

using Names = std::vector<std::string>;

struct Dump {
    const char* name;
    const char* op;
    Names outputs;
};

const Dump dumps[] = {
    {"attn_boolmask_rows_dead", "attention", {"o", "dq", "dk", "dv", "dbias"}},
    {"attn_sdpa_cudnn", "attention", {"o", "dq", "dk", "dv"}},
    {"delta_fixed", "delta_rule", {"o", "final_state", "dq", "dk", "dv", "dbeta", "dinitial_state"}},
    {"gdn_forward_gva", "gated_delta_rule", {"o", "final_state"}},
    {"comba_forward", "comba", {"o", "final_state"}},
    {"simple_gla_forward", "simple_gla", {"o", "final_state"}},
    {"kda_varlen_gva", "kda", {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"}},
    {"kda_gate_softplus", "kda", {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"}},
    {"kda_gate_lower_bound",
     "kda",
     {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state", "dA_log", "ddt_bias"}},
    {"kda_uniform_g20", "kda", {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"}},
};

CaseFile read_dump(const std::string& name) {
    return read_case(SOFTDELTA_TEST_DATA "/" + name + ".safetensors");
}

TEST(Dumps, AreReadWithoutAWarning) {
    for (const Dump& dump : dumps) {
        const CaseFile file = read_dump(dump.name);
        const Call call = call_of(file);
        EXPECT_EQ(call.op, dump.op) << dump.name;
        EXPECT_EQ(call.outputs, dump.outputs) << dump.name;
        EXPECT_TRUE(call.warnings.empty()) << dump.name << ": " << call.warnings.front();
        EXPECT_TRUE(call.intermediates.empty()) << dump.name;
        EXPECT_FALSE(file.metadata.at("producer").empty()) << dump.name;
    }
}

TEST(Dumps, AreAllListed) {
    std::size_t found = 0;
    for (const auto& entry : std::filesystem::directory_iterator(SOFTDELTA_TEST_DATA))
        found += entry.path().extension() == ".safetensors" ? 1 : 0;
    EXPECT_EQ(found, std::size(dumps));
}

TEST(Dumps, GiveOptionsAndOperands) {
    const CaseFile file = read_dump("kda_gate_lower_bound");
    const Call call = call_of(file);
    EXPECT_EQ(call.delta_options.scale, 0.08838834764831845);
    EXPECT_EQ(call.delta_options.lower_bound, -5);
    EXPECT_TRUE(call.delta_options.use_gate_in_kernel);
    EXPECT_TRUE(call.delta_options.use_qk_l2norm_in_kernel);
    EXPECT_EQ(call.delta.dt_bias.count(), 256);
    EXPECT_EQ(call.delta.g.dtype(), DType::bf16);

    const CaseFile packed = read_dump("kda_varlen_gva");
    EXPECT_EQ(output_shape(call_of(packed), "final_state"), (std::vector<std::int64_t>{3, 2, 64, 64}));

    const CaseFile masked = read_dump("attn_boolmask_rows_dead");
    const Call attention = call_of(masked);
    EXPECT_EQ(attention.attention_options.scale, 0.125);
    EXPECT_EQ(attention.attention.mask.dtype(), DType::boolean);
    const auto* mask = static_cast<const unsigned char*>(attention.attention.mask.data());
    std::int64_t dead_rows = 0;
    for (const auto* row = mask; row < mask + attention.attention.mask.count(); row += 384)
        dead_rows += std::count(row, row + 384, 1) == 0 ? 1 : 0;
    EXPECT_GT(dead_rows, 0);
}

}  // namespace
}  // namespace softdelta::io
