// Tensors and metadata of a case file become operands and options.
#include "io/call/call.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "io/small_case.h"

namespace softdelta::io {
namespace {

using Names = std::vector<std::string>;

Shape shape_of(const Tensor& t) {
    return {t.shape().begin(), t.shape().end()};
}

TEST(AttentionCall, HasTheLibrarysDefaults) {
    const CaseFile file = attention_case();
    const Call call = call_of(file);
    EXPECT_EQ(call.op, "attention");
    EXPECT_TRUE(call.is_attention);
    const AttentionOptions& options = call.attention_options;
    EXPECT_TRUE(std::isnan(options.scale));
    EXPECT_EQ(options.causal, Causal::none);
    EXPECT_EQ(options.window_left, -1);
    EXPECT_EQ(options.window_right, -1);
    EXPECT_EQ(options.softcap, 0);
    EXPECT_EQ(options.empty_row, EmptyRow::minus_infinity);
    EXPECT_EQ(options.top_w, -1);
    EXPECT_EQ(call.attention.q.data(), file.tensors.at("q").data());
    EXPECT_FALSE(call.attention.mask);
    EXPECT_EQ(output_names(call), (Names{"o", "lse"}));
    EXPECT_TRUE(call.outputs.empty() && call.warnings.empty() && call.intermediates.empty());
}

TEST(AttentionCall, ReadsEveryOption) {
    CaseFile file = attention_case();
    file.metadata = {{"op", "attention"},   {"scale", "0.125"},  {"causal", "bottom_right"}, {"window_left", "3"},
                     {"window_right", "0"}, {"softcap", "2e1"},  {"empty_row", "zero"},      {"top_w", "17"},
                     {"producer", "me"},    {"chunk_size", "32"}};
    const Call call = call_of(file);
    const AttentionOptions& options = call.attention_options;
    EXPECT_EQ(options.scale, 0.125);
    EXPECT_EQ(options.causal, Causal::bottom_right);
    EXPECT_EQ(options.window_left, 3);
    EXPECT_EQ(options.window_right, 0);
    EXPECT_EQ(options.softcap, 20);
    EXPECT_EQ(options.empty_row, EmptyRow::zero);
    EXPECT_EQ(options.top_w, 17);
    EXPECT_EQ(call.chunk_size, 32);
    EXPECT_TRUE(call.warnings.empty());
    file.metadata["causal"] = "top_left";
    file.metadata["empty_row"] = "plus_infinity";
    EXPECT_EQ(call_of(file).attention_options.causal, Causal::top_left);
    EXPECT_EQ(call_of(file).attention_options.empty_row, EmptyRow::plus_infinity);
}

TEST(AttentionCall, ReadsEveryTensor) {
    CaseFile file = attention_case();
    file.tensors["mask"] = zeros({1, H, Lq, Lk}, DType::boolean);
    file.tensors["bias"] = zeros({1, 1, 1, Lk});
    file.tensors["sink"] = zeros({H}, DType::f32);
    file.tensors["cache_seqlens"] = numbers({7, 7});
    file.tensors["do"] = zeros({B, Lq, H, V});
    file.tensors["dlse"] = zeros({B, H, Lq}, DType::f32);
    file.tensors["o"] = zeros({B, Lq, H, V});
    file.tensors["lse"] = zeros({B, H, Lq}, DType::f32);
    file.tensors["dsink"] = zeros({H}, DType::f32);
    file.tensors["dbias"] = zeros({1, 1, 1, Lk});
    file.tensors["dq"] = zeros({B, Lq, H, D});
    const Call call = call_of(file);
    EXPECT_EQ(shape_of(call.attention.mask), (Shape{1, H, Lq, Lk}));
    EXPECT_EQ(shape_of(call.attention.bias), (Shape{1, 1, 1, Lk}));
    EXPECT_EQ(shape_of(call.attention.sink), (Shape{H}));
    EXPECT_EQ(shape_of(call.attention.cache_seqlens), (Shape{B}));
    EXPECT_EQ(shape_of(call.d_o), (Shape{B, Lq, H, V}));
    EXPECT_EQ(shape_of(call.dlse), (Shape{B, H, Lq}));
    EXPECT_EQ(output_names(call), (Names{"o", "lse", "dq", "dk", "dv", "dbias", "dsink"}));
    EXPECT_EQ(call.outputs, (Names{"o", "lse", "dq", "dbias", "dsink"}));
}

TEST(AttentionCall, NamesShapeAndTypeOfResults) {
    CaseFile file = attention_case();
    file.tensors["bias"] = zeros({1, 1, 1, Lk}, DType::f64);
    file.tensors["do"] = zeros({B, Lq, H, V});
    const Call call = call_of(file);
    EXPECT_EQ(output_shape(call, "o"), (Shape{B, Lq, H, V}));
    EXPECT_EQ(output_shape(call, "lse"), (Shape{B, H, Lq}));
    EXPECT_EQ(output_shape(call, "dk"), (Shape{B, Lk, Hk, D}));
    EXPECT_EQ(output_shape(call, "dbias"), (Shape{1, 1, 1, Lk}));
    EXPECT_EQ(output_dtype(call, "o"), DType::f16);  // as v
    EXPECT_EQ(output_dtype(call, "lse"), DType::f32);
    EXPECT_EQ(output_dtype(call, "dk"), DType::bf16);
    EXPECT_EQ(output_dtype(call, "dbias"), DType::f64);
    for (const char* none : {"final_state", "dg", "q", "dmask", "", "d"}) {
        EXPECT_THROW(output_shape(call, none), std::invalid_argument) << none;
        EXPECT_THROW(output_dtype(call, none), std::invalid_argument) << none;
    }
}

TEST(AttentionCall, IsPackedByOneListOrTwo) {
    CaseFile file;
    file.metadata["op"] = "attention";
    file.tensors["q"] = zeros({1, 5, H, D});
    file.tensors["k"] = zeros({1, 5, Hk, D});
    file.tensors["v"] = zeros({1, 5, Hk, V});
    file.tensors["cu_seqlens"] = numbers({0, 2, 5});
    const Call one = call_of(file);
    EXPECT_EQ(one.attention.cu_seqlens_q.data(), file.tensors.at("cu_seqlens").data());
    EXPECT_EQ(one.attention.cu_seqlens_k.data(), file.tensors.at("cu_seqlens").data());
    EXPECT_EQ(output_shape(one, "lse"), (Shape{1, H, 5}));
    file.tensors.erase("cu_seqlens");
    file.tensors["cu_seqlens_q"] = numbers({0, 2, 5});
    file.tensors["cu_seqlens_k"] = numbers({0, 0, 5});
    const Call two = call_of(file);
    EXPECT_EQ(two.attention.cu_seqlens_q.data(), file.tensors.at("cu_seqlens_q").data());
    EXPECT_EQ(two.attention.cu_seqlens_k.data(), file.tensors.at("cu_seqlens_k").data());
}

TEST(AttentionCall, PacksQueriesOverCaches) {
    CaseFile file;
    file.metadata["op"] = "attention";
    file.tensors["q"] = zeros({1, 5, H, D});
    file.tensors["k"] = zeros({4, 3, Hk, D});
    file.tensors["v"] = zeros({4, 3, Hk, V});
    file.tensors["cu_seqlens_q"] = numbers({0, 4, 5});
    file.tensors["cache_seqlens"] = numbers({4, 3});
    file.tensors["block_table"] = OwnedTensor(DType::i32, {2, 2});
    const Call call = call_of(file);
    EXPECT_EQ(call.attention.cu_seqlens_q.data(), file.tensors.at("cu_seqlens_q").data());
    EXPECT_FALSE(call.attention.cu_seqlens_k);
    EXPECT_EQ(output_shape(call, "lse"), (Shape{1, H, 5}));
}

TEST(AttentionCall, HasNoGradientsThroughPages) {
    CaseFile file = attention_case();
    file.tensors["block_table"] = OwnedTensor(DType::i32, {B, 2});
    file.tensors["cache_seqlens"] = numbers({1, 2});
    file.tensors["do"] = zeros({B, Lq, H, V});
    const Call call = call_of(file);
    EXPECT_TRUE(call.attention.block_table);
    EXPECT_EQ(output_names(call), (Names{"o", "lse"}));
}

TEST(DeltaCall, KnowsEveryRule) {
    const std::pair<const char*, Rule> rules[] = {{"delta_rule", Rule::delta_rule},
                                                  {"gated_delta_rule", Rule::gated_delta_rule},
                                                  {"kda", Rule::kda},
                                                  {"comba", Rule::comba},
                                                  {"simple_gla", Rule::simple_gla},
                                                  {"gla", Rule::gla},
                                                  {"gdn2", Rule::gdn2},
                                                  {"gated_delta_product", Rule::gated_delta_product},
                                                  {"dplr", Rule::dplr}};
    for (const auto& [op, rule] : rules) {
        const CaseFile file = delta_case(op);
        const Call call = call_of(file);
        EXPECT_EQ(call.op, op);
        EXPECT_FALSE(call.is_attention);
        EXPECT_EQ(call.delta_options.rule, rule);
        EXPECT_TRUE(std::isnan(call.delta_options.scale));
        EXPECT_TRUE(std::isnan(call.delta_options.lower_bound));
        EXPECT_FALSE(call.delta_options.use_qk_l2norm_in_kernel || call.delta_options.use_gate_in_kernel ||
                     call.delta_options.use_beta_sigmoid_in_kernel || call.delta_options.allow_neg_eigval ||
                     call.delta_options.state_v_first);
        EXPECT_EQ(output_names(call), (Names{"o", "final_state"}));
        EXPECT_EQ(bool(call.delta.p), rule == Rule::comba || rule == Rule::gdn2 || rule == Rule::dplr);
        EXPECT_EQ(call.delta.v.data(), file.tensors.at("v").data());
    }
}

TEST(DeltaCall, ReadsEveryOption) {
    CaseFile file = delta_case("kda");
    const auto set = [&](const char* key, const char* value) {
        file.metadata[key] = value;
        return call_of(file);
    };
    EXPECT_EQ(set("scale", "-1.5").delta_options.scale, -1.5);
    EXPECT_TRUE(set("use_qk_l2norm_in_kernel", "true").delta_options.use_qk_l2norm_in_kernel);
    EXPECT_FALSE(set("use_qk_l2norm_in_kernel", "false").delta_options.use_qk_l2norm_in_kernel);
    EXPECT_TRUE(set("use_gate_in_kernel", "true").delta_options.use_gate_in_kernel);
    EXPECT_EQ(set("lower_bound", "-5.0").delta_options.lower_bound, -5);
    EXPECT_TRUE(set("safe_gate", "true").warnings.empty());
    EXPECT_EQ(set("chunk_size", "16").chunk_size, 16);
    EXPECT_TRUE(set("state_v_first", "true").delta_options.state_v_first);
    EXPECT_TRUE(set("allow_neg_eigval", "true").delta_options.allow_neg_eigval);
    EXPECT_TRUE(set("use_beta_sigmoid_in_kernel", "true").delta_options.use_beta_sigmoid_in_kernel);
}

TEST(DeltaCall, ReadsEveryTensor) {
    CaseFile file = delta_case("comba");
    file.tensors["beta"] = zeros({B, T, HV});
    file.tensors["initial_state"] = zeros({B, HV, K, V}, DType::f64);
    file.tensors["A_log"] = zeros({1, 1, HV, 1}, DType::f32);
    file.tensors["dt_bias"] = zeros({HV, 1}, DType::f32);
    file.tensors["do"] = zeros({B, T, HV, V});
    file.tensors["dfinal_state"] = zeros({B, HV, K, V}, DType::f32);
    file.tensors["final_state"] = zeros({B, HV, K, V}, DType::f32);
    file.tensors["dA_log"] = zeros({1, 1, HV, 1}, DType::f32);
    file.tensors["dp"] = zeros({B, T, H, K});
    const Call call = call_of(file);
    EXPECT_EQ(shape_of(call.delta.beta), (Shape{B, T, HV}));
    EXPECT_EQ(shape_of(call.delta.p), (Shape{B, T, H, K}));
    EXPECT_EQ(shape_of(call.delta.initial_state), (Shape{B, HV, K, V}));
    EXPECT_EQ(shape_of(call.d_o), (Shape{B, T, HV, V}));
    EXPECT_EQ(shape_of(call.dfinal_state), (Shape{B, HV, K, V}));
    EXPECT_EQ(shape_of(call.delta.A_log), (Shape{HV}));  // as the library takes it
    EXPECT_EQ(shape_of(call.delta.dt_bias), (Shape{HV}));
    EXPECT_EQ(output_shape(call, "dA_log"), (Shape{1, 1, HV, 1}));  // as the file has it
    EXPECT_EQ(output_shape(call, "ddt_bias"), (Shape{HV, 1}));
    EXPECT_EQ(call.outputs, (Names{"final_state", "dp", "dA_log"}));
    EXPECT_EQ(output_names(call), (Names{"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dp", "dinitial_state",
                                         "dA_log", "ddt_bias"}));
    EXPECT_EQ(output_dtype(call, "dinitial_state"), DType::f64);
    EXPECT_EQ(output_dtype(call, "final_state"), DType::f32);
    EXPECT_EQ(output_dtype(call, "o"), DType::f16);
    EXPECT_EQ(output_dtype(call, "dA_log"), DType::f32);
}

TEST(DeltaCall, TakesAConstantGate) {
    CaseFile file = delta_case("simple_gla");
    file.tensors["g_gamma"] = zeros({HV}, DType::f32);
    file.tensors["dg_gamma"] = zeros({HV}, DType::f32);
    file.tensors["do"] = zeros({B, T, HV, V});
    const Call call = call_of(file);
    EXPECT_EQ(shape_of(call.delta.g_gamma), (Shape{HV}));
    EXPECT_EQ(call.outputs, Names{"dg_gamma"});
}

TEST(DeltaCall, StatesFollowPackingAndOrder) {
    CaseFile file;
    file.metadata = {{"op", "delta_rule"}, {"state_v_first", "true"}};
    file.tensors["q"] = file.tensors["k"] = zeros({1, 5, H, K});
    file.tensors["v"] = zeros({1, 5, HV, V});
    file.tensors["cu_seqlens"] = numbers({0, 2, 2, 5});
    file.tensors["dfinal_state"] = zeros({3, HV, V, K}, DType::f32);
    file.tensors["dinitial_state"] = zeros({3, HV, V, K}, DType::f32);  // without an initial_state
    const Call call = call_of(file);
    EXPECT_EQ(output_shape(call, "final_state"), (Shape{3, HV, V, K}));
    EXPECT_EQ(call.outputs, Names{"dinitial_state"});
    EXPECT_EQ(output_dtype(call, "dinitial_state"), DType::f32);
}

TEST(AnyCall, ToleratesWhatItDoesNotKnow) {
    CaseFile file = delta_case("kda");
    file.metadata["git\nhash"] = "7";
    for (const char* name : {"attention_scores", "db", "dh0"}) file.tensors[name] = zeros({1});
    file.tensors["v_new"] = zeros({B, T, HV, V});
    file.tensors["h"] = zeros({1});
    const Call call = call_of(file);
    EXPECT_EQ(call.intermediates, (Names{"h", "v_new"}));
    EXPECT_EQ(call.warnings, (Names{R"(metadata "git\x0ahash" is unknown and was ignored)",
                                    R"(tensor "attention_scores" is unknown and was ignored)",
                                    R"(tensor "db" is unknown and was ignored: its name here is dbeta)",
                                    R"(tensor "dh0" is unknown and was ignored: its name here is dinitial_state)"}));
}

}  // namespace
}  // namespace softdelta::io
