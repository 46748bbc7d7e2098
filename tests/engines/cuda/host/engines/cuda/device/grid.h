// Stands in for src/engines/cuda/device/grid.h: a launch runs on the host.
#pragma once

#include "engines/cuda/device/launch.h"
#include "engines/cuda/host/device.h"

namespace softdelta::cuda {

struct Grid {
    Blocks blocks;
    int threads;
    int shared_bytes = 0;
    bool early = false;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t, const char*, const Arguments&... arguments) {
    host::run(grid.blocks, grid.threads, static_cast<std::size_t>(grid.shared_bytes), [&] { kernel(arguments...); });
}

}  // namespace softdelta::cuda
