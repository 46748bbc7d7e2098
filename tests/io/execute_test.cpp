// A case file's call reaches the library as it is meant, forward and backward.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <stdexcept>
#include <string>

#include "core/tensor.h"
#include "io/call/call.h"
#include "io/small_case.h"

namespace softdelta::io {
namespace {

using Results = std::map<std::string, OwnedTensor>;

double element(const OwnedTensor& t, std::int64_t i) {
    core::Tensor view;
    view.data = t.data();
    view.dtype = static_cast<core::DType>(t.dtype());
    return core::load(view, i);
}

void fill(OwnedTensor& t, double phase) {
    core::Tensor view;
    view.data = t.data();
    view.dtype = static_cast<core::DType>(t.dtype());
    for (std::int64_t i = 0; i < t.count(); ++i) core::store(view, i, std::sin(phase + 1.7 * static_cast<double>(i)));
}

// Every result of the call in f64, by the reference.
Results compute(const CaseFile& file) {
    const Call call = call_of(file);
    Results results;
    std::map<std::string, Tensor> views;
    for (const std::string& name : output_names(call)) {
        results[name] = OwnedTensor(DType::f64, output_shape(call, name));
        views[name] = results[name].view();
    }
    Execution execution;
    execution.engine = "reference";
    execute(call, views, execution);
    return results;
}

// RMSE / RMS of what the dump holds.
double error_ratio(const OwnedTensor& dumped, const OwnedTensor& truth) {
    double error = 0, size = 0;
    for (std::int64_t i = 0; i < truth.count(); ++i) {
        error += std::pow(element(dumped, i) - element(truth, i), 2);
        size += std::pow(element(truth, i), 2);
    }
    return std::sqrt(error / size);
}

TEST(Execute, AgreesWithDumps) {
    for (const char* name : {"gdn_forward_gva", "comba_forward", "simple_gla_forward", "kda_varlen_gva",
                             "kda_gate_softplus", "delta_fixed", "attn_sdpa_cudnn"}) {
        const CaseFile file = read_case(std::string(SOFTDELTA_TEST_DATA) + "/" + name + ".safetensors");
        const Results results = compute(file);
        for (const std::string& output : call_of(file).outputs)
            EXPECT_LT(error_ratio(file.tensors.at(output), results.at(output)), 0.02) << name << ": " << output;
    }
}

TEST(Execute, TakesParametersOfAnyShape) {
    CaseFile file = delta_case("kda");
    file.metadata["use_gate_in_kernel"] = "true";
    file.tensors["A_log"] = zeros({HV}, DType::f32);
    file.tensors["dt_bias"] = zeros({HV * K}, DType::f32);
    file.tensors["do"] = zeros({B, T, HV, V});
    double phase = 0;
    for (auto& entry : file.tensors) fill(entry.second, ++phase);
    Results flat = compute(file);

    for (const auto& [name, shape] : {std::pair{"A_log", Shape{1, 1, HV, 1}}, {"dt_bias", Shape{HV, K}}}) {
        const OwnedTensor old = file.tensors.at(name);
        OwnedTensor shaped(DType::f32, shape);
        std::copy_n(static_cast<const float*>(old.data()), old.count(), static_cast<float*>(shaped.data()));
        file.tensors[name] = shaped;
    }
    Results shaped = compute(file);
    EXPECT_EQ(shaped.at("dA_log").shape(), (Shape{1, 1, HV, 1}));
    EXPECT_EQ(shaped.at("ddt_bias").shape(), (Shape{HV, K}));
    for (const char* name : {"o", "dg", "dA_log", "ddt_bias"}) {
        EXPECT_NE(element(flat.at(name), flat.at(name).count() - 1), 0) << name;
        for (std::int64_t i = 0; i < flat.at(name).count(); ++i)
            ASSERT_EQ(element(flat.at(name), i), element(shaped.at(name), i)) << name << ' ' << i;
    }
}

TEST(Execute, ComputesOnlyWhatIsAskedFor) {
    CaseFile file = attention_case();
    file.tensors["do"] = zeros({B, Lq, H, V});
    double phase = 0;
    for (auto& entry : file.tensors) fill(entry.second, ++phase);
    const Call call = call_of(file);
    OwnedTensor dk(DType::f32, output_shape(call, "dk"));
    Execution execution;
    execution.engine = "reference";
    execute(call, {{"dk", dk.view()}}, execution);
    const Results all = compute(file);
    for (std::int64_t i = 0; i < dk.count(); ++i)
        EXPECT_EQ(element(dk, i), static_cast<double>(static_cast<float>(element(all.at("dk"), i))));
}

TEST(Execute, StartsFromEveryGradientGiven) {
    CaseFile attention = attention_case(), kda = delta_case("kda");
    attention.tensors["do"] = zeros({B, Lq, H, V});
    attention.tensors["dlse"] = zeros({B, H, Lq}, DType::f32);
    kda.tensors["do"] = zeros({B, T, HV, V});
    kda.tensors["dfinal_state"] = zeros({B, HV, K, V}, DType::f32);
    for (const auto& [file, given] :
         {std::pair{&attention, "do"}, {&attention, "dlse"}, {&kda, "do"}, {&kda, "dfinal_state"}}) {
        double phase = 0;
        for (auto& entry : file->tensors) fill(entry.second, ++phase);
        const double before = element(compute(*file).at("dk"), 0);
        fill(file->tensors.at(given), -1);
        EXPECT_NE(element(compute(*file).at("dk"), 0), before) << given;
    }
}

TEST(Execute, RefusesWhatTheCallDoesNotYield) {
    const CaseFile file = attention_case();
    const Call call = call_of(file);
    for (const char* none : {"final_state", "dg", "q", "dmask", "", "d"})
        EXPECT_THROW(execute(call, {{none, call.attention.q}}, {}), std::invalid_argument) << none;
    EXPECT_THROW(execute(call, {{"o", Tensor{}}}, {}), std::invalid_argument);
    const OwnedTensor wrong(DType::f32, {1, 2});
    EXPECT_THROW(execute(call, {{"o", wrong.view()}}, {}), std::invalid_argument);  // by the library
}

}  // namespace
}  // namespace softdelta::io
