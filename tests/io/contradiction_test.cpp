// Case files that contradict themselves or ask for what does not exist: refused before anything is computed.
#include <gtest/gtest.h>

#include <string>

#include "io/call/call.h"
#include "io/raw_case.h"
#include "io/small_case.h"

namespace softdelta::io {
namespace {

std::string fault_of_case(CaseFile file) {
    file.name = std::string("x");
    return fault_of([&] { call_of(file); });
}

std::string fault_of_metadata(CaseFile file, const std::string& key, const std::string& value) {
    file.metadata[key] = value;
    return fault_of_case(file);
}

std::string fault_of_tensor(CaseFile file, const std::string& name, OwnedTensor tensor) {
    file.tensors[name] = std::move(tensor);
    return fault_of_case(file);
}

TEST(WrongOperation, IsNamed) {
    EXPECT_EQ(fault_of_case({}), "x: metadata op is missing");
    EXPECT_EQ(fault_of_metadata({}, "op", "gdn"),
              "x: metadata op: expected attention, delta_rule, gated_delta_rule, kda, comba, simple_gla, gla, gdn2, "
              "gated_delta_product, dplr or rule: and facts, found \"gdn\"");
    for (const std::string layer : {"causal_convolution", "gated_norm"})
        EXPECT_EQ(fault_of_metadata({}, "op", layer),
                  "x: metadata op: \"" + layer +
                      "\" is a layer, which the commands softdelta run and softdelta verify take, and nothing else; "
                      "diagnose knows no mistakes of it");
}

TEST(WrongMetadata, NamesExpectedAndFound) {
    const CaseFile attention = attention_case(), kda = delta_case("kda");
    EXPECT_EQ(fault_of_metadata(attention, "causal", "yes"),
              "x: metadata causal: expected none, top_left or bottom_right, found \"yes\"");
    EXPECT_EQ(fault_of_metadata(attention, "empty_row", "inf"),
              "x: metadata empty_row: expected minus_infinity, plus_infinity or zero, found \"inf\"");
    EXPECT_EQ(fault_of_metadata(attention, "softcap", "-1"),
              "x: metadata softcap: expected 0 (off) or a positive number, found \"-1\"");
    for (const char* text : {"", "nan", "inf", "1e999", "0.5 ", " 0.5", "+1", "0x1p3", "1,5", "None", "1e"})
        EXPECT_EQ(fault_of_metadata(kda, "scale", text),
                  "x: metadata scale: expected a finite number, found \"" + std::string(text) + "\"");
    for (const char* text : {"", "1.0", "-2", "9223372036854775808", "four"})
        EXPECT_EQ(fault_of_metadata(attention, "window_left", text),
                  "x: metadata window_left: expected a whole number from -1, found \"" + std::string(text) + "\"");
    EXPECT_EQ(fault_of_metadata(attention, "chunk_size", "0"),
              "x: metadata chunk_size: expected a whole number from 1, found \"0\"");
    for (const char* key : {"use_qk_l2norm_in_kernel", "use_gate_in_kernel", "safe_gate", "state_v_first",
                            "allow_neg_eigval", "use_beta_sigmoid_in_kernel"})
        for (const char* text : {"True", "1", "", "true "})
            EXPECT_EQ(fault_of_metadata(kda, key, text),
                      "x: metadata " + std::string(key) + ": expected true or false, found \"" + text + "\"");
}

TEST(WrongMetadata, BelongsToAnotherOperation) {
    CaseFile file = delta_case("comba");
    file.metadata["causal"] = "none";
    EXPECT_EQ(call_of(file).warnings,
              std::vector<std::string>{"metadata \"causal\" is no option of comba and was ignored"});
}

TEST(WrongMetadata, NamesAChunkThatNoKernelHas) {
    for (const char* text : {"0", "1025", "9223372036854775807"})
        EXPECT_EQ(
            fault_of_metadata(delta_case("kda"), "chunk_size", text).rfind("x: metadata chunk_size: expected ", 0), 0u);
}

TEST(WrongTensor, IsMissing) {
    for (const char* op :
         {"delta_rule", "gated_delta_rule", "kda", "comba", "simple_gla", "gla", "gdn2", "gated_delta_product", "dplr"})
        for (const char* name : {"q", "k", "v", "g", "p"}) {
            CaseFile file = delta_case(op);
            if (file.tensors.erase(name) == 0) continue;
            EXPECT_EQ(fault_of_case(file), "x: " + std::string(name) + ": missing, but " + op + " needs it");
        }
    CaseFile file = attention_case();
    file.tensors.erase("k");
    EXPECT_EQ(fault_of_case(file), "x: k: missing, but attention needs it");
}

TEST(WrongTensor, BelongsToAnotherOperation) {
    for (const char* name :
         {"g", "beta", "p", "initial_state", "final_state", "dg", "dfinal_state", "A_log", "ddt_bias"})
        EXPECT_EQ(fault_of_tensor(attention_case(), name, zeros({1})),
                  "x: " + std::string(name) + ": no tensor of attention");
    for (const char* name : {"bias", "mask", "sink", "lse", "dlse", "dbias", "dsink", "cu_seqlens_q", "p", "dp",
                             "g_gamma", "dg_gamma", "block_table"})
        EXPECT_EQ(fault_of_tensor(delta_case("kda"), name, zeros({1})),
                  "x: " + std::string(name) + ": no tensor of kda");
    for (const char* name : {"g", "dg", "A_log"})
        EXPECT_EQ(fault_of_tensor(delta_case("delta_rule"), name, zeros({1})),
                  "x: " + std::string(name) + ": no tensor of delta_rule");
    EXPECT_EQ(fault_of_tensor(delta_case("simple_gla"), "beta", zeros({1})), "x: beta: no tensor of simple_gla");
    for (const char* name : {"state_indices", "final_state_indices", "has_initial_state", "snapshot_indices"})
        EXPECT_EQ(fault_of_tensor(delta_case("kda"), name, numbers({0})),
                  "x: " + std::string(name) + ": a pool of states is not supported in a case file");
}

TEST(WrongShape, OfAnInputIsNamed) {
    EXPECT_EQ(fault_of_tensor(attention_case(), "q", zeros({2, 3})), "x: q: shape [2, 3], expected [B, Lq, H, D]");
    EXPECT_EQ(fault_of_tensor(delta_case("kda"), "v", zeros({2, 3, 4})),
              "x: v: shape [2, 3, 4], expected [B, nT, HV, V]");
}

TEST(WrongShape, OfAResultIsNamed) {
    CaseFile file = attention_case();
    EXPECT_EQ(fault_of_tensor(file, "o", zeros({B, Lq, H, D})), "x: o: shape [2, 5, 2, 3], expected [2, 5, 2, 6]");
    EXPECT_EQ(fault_of_tensor(file, "lse", zeros({B, Lq, H})), "x: lse: shape [2, 5, 2], expected [2, 2, 5]");
    EXPECT_EQ(fault_of_tensor(file, "do", zeros({B, Lq, H, V, 1})),
              "x: do: shape [2, 5, 2, 6, 1], expected [2, 5, 2, 6]");
    file.tensors["do"] = zeros({B, Lq, H, V});
    EXPECT_EQ(fault_of_tensor(file, "dk", zeros({B, Lk, H, D})), "x: dk: shape [2, 7, 2, 3], expected [2, 7, 1, 3]");
    EXPECT_EQ(fault_of_tensor(delta_case("kda"), "final_state", zeros({B, HV, V, K})),
              "x: final_state: shape [2, 4, 6, 3], expected [2, 4, 3, 6]");
    CaseFile gate = delta_case("kda");
    gate.metadata["use_gate_in_kernel"] = "true";
    gate.tensors["A_log"] = zeros({1, 1, HV, 1});
    gate.tensors["do"] = zeros({B, T, HV, V});
    EXPECT_EQ(fault_of_tensor(gate, "dA_log", zeros({HV})), "x: dA_log: shape [4], expected [1, 1, 4, 1]");
}

TEST(WrongType, OfAResultIsNamed) {
    EXPECT_EQ(fault_of_tensor(attention_case(), "o", zeros({B, Lq, H, V}, DType::i32)),
              "x: o: type I32, expected F64, F32, BF16 or F16");
    EXPECT_EQ(fault_of_tensor(delta_case("kda"), "do", zeros({B, T, HV, V}, DType::boolean)),
              "x: do: type BOOL, expected F64, F32, BF16 or F16");
}

TEST(WrongGradient, HasNothingToStartFrom) {
    EXPECT_EQ(fault_of_tensor(attention_case(), "dq", zeros({B, Lq, H, D})), "x: dq: a gradient, but do is missing");
    EXPECT_EQ(fault_of_tensor(delta_case("kda"), "dq", zeros({B, T, H, K})),
              "x: dq: a gradient, but do and dfinal_state are missing");
    CaseFile file = delta_case("kda");
    file.tensors["do"] = zeros({B, T, HV, V});
    EXPECT_EQ(fault_of_tensor(file, "dbeta", zeros({B, T, HV})), "x: dbeta: the gradient of an input that is missing");
    CaseFile paged = attention_case();
    paged.tensors["block_table"] = OwnedTensor(DType::i32, {B, 2});
    paged.tensors["do"] = zeros({B, Lq, H, V});
    EXPECT_EQ(fault_of_tensor(paged, "dq", zeros({B, Lq, H, D})),
              "x: dq: there are no gradients through a paged cache");
}

TEST(WrongPacking, IsNamed) {
    const CaseFile file = delta_case("kda");
    EXPECT_EQ(fault_of_tensor(file, "cu_seqlens", zeros({3}, DType::f32)),
              "x: cu_seqlens: type F32, expected I32 or I64");
    EXPECT_EQ(fault_of_tensor(file, "cu_seqlens", zeros({0}, DType::i32)), "x: cu_seqlens: shape [0], expected [N+1]");
    EXPECT_EQ(fault_of_tensor(file, "cu_seqlens", zeros({1, 2}, DType::i64)),
              "x: cu_seqlens: shape [1, 2], expected [N+1]");
    EXPECT_EQ(fault_of_tensor(file, "cu_seqlens", numbers({1, 5})),
              "x: cu_seqlens: element 0 is 1, expected to ascend from 0 to 5");
    EXPECT_EQ(fault_of_tensor(file, "cu_seqlens", numbers({0, 6})),
              "x: cu_seqlens: element 1 is 6, expected to ascend from 0 to 5");
    EXPECT_EQ(fault_of_tensor(file, "cu_seqlens", numbers({0, 4, 3, 5})),
              "x: cu_seqlens: element 2 is 3, expected to ascend from 0 to 5");
    EXPECT_EQ(fault_of_tensor(file, "cu_seqlens", numbers({0, 5})), "x: cu_seqlens: 2 batch rows, expected 1");
    CaseFile attention = attention_case();
    EXPECT_EQ(fault_of_tensor(attention, "cu_seqlens_q", numbers({0, 5})),
              "x: cu_seqlens_k: missing, but its partner is given");
    attention.tensors["q"] = zeros({1, Lq, H, D});
    attention.tensors["k"] = zeros({1, Lk, Hk, D});
    attention.tensors["v"] = zeros({1, Lk, Hk, V});
    EXPECT_EQ(fault_of_tensor(attention, "cu_seqlens", numbers({0, 5})),
              "x: cu_seqlens: element 1 is 5, expected to ascend from 0 to 7");
    attention.tensors["cu_seqlens_q"] = numbers({0, 5});
    EXPECT_EQ(fault_of_tensor(attention, "cu_seqlens", numbers({0, 5})),
              "x: cu_seqlens: given together with cu_seqlens_q or cu_seqlens_k");
    EXPECT_EQ(fault_of_tensor(attention, "cu_seqlens_k", numbers({0, 5, 7})),
              "x: cu_seqlens_k: shape [3], expected [2] as cu_seqlens_q");
    attention.tensors["cache_seqlens"] = numbers({7});
    EXPECT_EQ(fault_of_tensor(attention, "cu_seqlens_k", numbers({0, 7})),
              "x: cu_seqlens_k: given together with cache_seqlens, expected cu_seqlens_q alone");
    EXPECT_EQ(fault_of_tensor(attention, "cu_seqlens_q", numbers({0, 6})),
              "x: cu_seqlens_q: element 1 is 6, expected to ascend from 0 to 5");
}

}  // namespace
}  // namespace softdelta::io
