// A kernel's launch as a function.
#pragma once

#include "engines/cuda/device/launch.h"

namespace softdelta::cuda {

struct Grid {
    Blocks blocks;
    int threads;
    int shared_bytes = 0;
    bool early = false;  // begins when the blocks of the launch before let it: ptx::let_next_begin()
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream, const char* what,
            const Arguments&... arguments) {
    if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return;
    if (grid.shared_bytes > 48 * 1024)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.shared_bytes), what);
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid.blocks;
    config.blockDim = dim3(static_cast<unsigned>(grid.threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(grid.shared_bytes);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = grid.early ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

}  // namespace softdelta::cuda
