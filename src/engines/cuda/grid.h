// A kernel's launch as a function.
#pragma once

#include "engines/cuda/launch.h"

namespace softdelta::cuda {

struct Grid {
    dim3 blocks;
    int threads;
    int shared_bytes = 0;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream, const char* what,
            const Arguments&... arguments) {
    if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return;
    if (grid.shared_bytes > 48 * 1024)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.shared_bytes), what);
    kernel<<<grid.blocks, static_cast<unsigned>(grid.threads), static_cast<std::size_t>(grid.shared_bytes), stream>>>(
        arguments...);
    check(cudaGetLastError(), what);
}

}  // namespace softdelta::cuda
