// Stands in for src/engines/cuda/device/grid.h: a launch runs on the host.
#pragma once

#include <cstdio>

#include "engines/cuda/device/card.h"
#include "engines/cuda/host/device.h"

namespace softdelta::cuda {

struct Grid {
    Blocks blocks;
    int threads;
    int shared_bytes = 0;
    bool early = false;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t, const char* what,
            const Arguments&... arguments) {
    const Card card = card_of({});
    if (std::getenv("SOFTDELTA_CUDA_LAUNCHES") != nullptr)
        std::fprintf(stderr, "%s: %s, %d threads, %d bytes\n", card.name, what, grid.threads, grid.shared_bytes);
    host::check(grid.shared_bytes <= card.shared_bytes, "a launch asks for more shared memory than the card has");
    host::run(grid.blocks, grid.threads, static_cast<std::size_t>(grid.shared_bytes), card.level == Level::sm_90a,
              [&] { kernel(arguments...); });
}

}  // namespace softdelta::cuda
