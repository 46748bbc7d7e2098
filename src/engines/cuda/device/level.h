// Which kernels a GPU runs: those of sm_90a (Hopper), or those that run on everything newer than sm_80.
// SOFTDELTA_CUDA_LEVEL=sm_80 keeps from the first.
#pragma once

#include <cstdlib>
#include <string>

#include "core/error.h"
#include "core/once.h"
#include "engines/cuda/device/launch.h"

namespace softdelta::cuda {

enum class Level { sm_80, sm_90a };

// Read once: a host may change its environment later, and no thread may read it then.
inline const std::string& named_level() {
    static constinit core::Once<std::string> once;
    return once.get([] {
        const char* named = std::getenv("SOFTDELTA_CUDA_LEVEL");
        return std::string(named == nullptr ? "sm_90a" : named);
    });
}

inline Level level_of(core::Device device) {
#if defined(SOFTDELTA_CUDA_HAS_SM_90A)
    const std::string& name = named_level();
    if (name != "sm_80" && name != "sm_90a")
        throw core::InvalidArgument("SOFTDELTA_CUDA_LEVEL is " + core::printable(name) + ", expected sm_80 or sm_90a");
    int major = 0;
    const bool known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.id) == cudaSuccess;
    return known && major == 9 && name == "sm_90a" ? Level::sm_90a : Level::sm_80;
#else
    static_cast<void>(device);
    return Level::sm_80;
#endif
}

}  // namespace softdelta::cuda
