// The delta rules on the GPU against the truth: drawn calls of every option, results poisoned and between guard bytes.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many.
#include <gtest/gtest.h>

#include <cstring>

#include "engines/cuda/on_gpu.h"
#include "support/fast_delta.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

class CudaDelta : public testing::Test {
    void SetUp() override {
        if (!has_gpu()) GTEST_SKIP() << "no GPU";
    }
};

Execution cuda() {
    Execution execution;
    execution.engine_name = "cuda";
    return execution;
}

// A drawn call's inputs on the GPU.
struct OnGpu {
    std::map<std::string, GpuTensor> given;
    DeltaInputs inputs;

    OnGpu(const FastDelta& call, bool dense) : is_dense(dense) {
        for (const DeltaOperand& operand : delta_operands())
            inputs.*operand.input = own(operand.name, call.call().delta.*operand.input);
        inputs.cu_seqlens = own("cu_seqlens", call.call().delta.cu_seqlens);
    }
    Tensor own(const std::string& name, const Tensor& t) {
        return given.emplace(name, is_dense ? GpuTensor::dense(t) : GpuTensor::input(t)).first->second.view();
    }

    bool is_dense;
};

bool is_refused(const FastDelta& call) {
    return call.call().delta.q.shape(3) > 256;
}

FastDelta::Results forward(const FastDelta& call, bool lengths_on_host, bool dense = false) {
    OnGpu gpu(call, dense);
    if (lengths_on_host) gpu.inputs.cu_seqlens = call.call().delta.cu_seqlens;
    FastDelta::Results results;
    std::map<std::string, GpuTensor> memory;
    for (const std::string& name : call.forward_names()) {
        io::OwnedTensor host(io::output_dtype(call.call(), name), io::output_shape(call.call(), name));
        memory.emplace(name, GpuTensor::result(host.view()));
        results.emplace(name, host);
    }
    delta_forward(gpu.inputs, {.o = memory.at("o").view(), .final_state = memory.at("final_state").view()},
                  call.call().delta_options, cuda());
    for (const auto& [name, host] : results) memory.at(name).copy_to(host.view());
    return results;
}

TEST_F(CudaDelta, ForwardIsRight) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(300)); ++seed) {
        const FastDelta call = draw_fast_delta(seed);
        if (is_refused(call)) {
            EXPECT_THROW(forward(call, true), Unsupported);
            continue;
        }
        EXPECT_EQ(judge_results(call, forward(call, seed % 2 == 0)), "") << "SOFTDELTA_SEED=" << seed;
    }
}

// Rows of 16-byte units and types of 16 bits: what the chunk kernel takes.
TEST_F(CudaDelta, ChunksAreRight) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(300)); ++seed) {
        const FastDelta call(draw_delta(seed, {.batch = 2,
                                               .tokens = 400,
                                               .heads = 2,
                                               .group = 3,
                                               .key_channels = 128,
                                               .value_channels = 256,
                                               .channel_step = 8,
                                               .lengths = {31, 32, 63, 64, 65, 128, 129, 257},
                                               .dtypes = {seed % 2 == 0 ? DType::bf16 : DType::f16}}));
        const FastDelta::Results results = forward(call, seed % 4 < 2, true);
        EXPECT_EQ(judge_results(call, results), "") << "SOFTDELTA_SEED=" << seed;
        const FastDelta::Results again = forward(call, seed % 4 < 2, true);
        for (const auto& [name, tensor] : results)
            EXPECT_EQ(std::memcmp(tensor.data(), again.at(name).data(), tensor.bytes()), 0)
                << name << " differs in a second run, SOFTDELTA_SEED=" << seed;
    }
}

}  // namespace
}  // namespace softdelta::test
