// Which kernels a GPU runs: those of sm_90a (Hopper), or those that run on everything newer than sm_80.
// SOFTDELTA_CUDA_LEVEL=sm_80 keeps from the first.
#pragma once

#include <cstdlib>
#include <string>

#include "engines/cuda/launch.h"

namespace softdelta::cuda {

enum class Level { sm_80, sm_90a };

inline Level level_of(core::Device device) {
#if defined(SOFTDELTA_CUDA_HAS_SM_90A)
    const char* named = std::getenv("SOFTDELTA_CUDA_LEVEL");
    const std::string name = named == nullptr ? "sm_90a" : named;
    if (name != "sm_80" && name != "sm_90a")
        throw core::InvalidArgument("SOFTDELTA_CUDA_LEVEL: " + name + ", expected sm_80 or sm_90a");
    int major = 0;
    const bool known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.id) == cudaSuccess;
    return known && major == 9 && name == "sm_90a" ? Level::sm_90a : Level::sm_80;
#else
    static_cast<void>(device);
    return Level::sm_80;
#endif
}

}  // namespace softdelta::cuda
