// What tests of the CUDA engine share.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>

#include "engines/cuda/on_gpu.h"
#include "io/call/call.h"

namespace softdelta::test {

class OnGpuTest : public testing::Test {
    void SetUp() override {
        if (!has_gpu()) GTEST_SKIP() << "no GPU";
    }
};

inline Execution cuda() {
    Execution execution;
    execution.engine = "cuda";
    return execution;
}

inline void expect_same_bits(const std::map<std::string, io::OwnedTensor>& results,
                             const std::map<std::string, io::OwnedTensor>& again, std::uint64_t seed) {
    for (const auto& [name, tensor] : results)
        EXPECT_EQ(std::memcmp(tensor.data(), again.at(name).data(), tensor.bytes()), 0)
            << name << " differs in a second run, SOFTDELTA_SEED=" << seed;
}

}  // namespace softdelta::test
