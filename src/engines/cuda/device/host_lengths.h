// Lengths that lie on the host, brought to the device by launches: a copy would wait for the host's memory.
#pragma once

#include <algorithm>

#include "core/tensor.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

struct HostLengths {
    static constexpr int most = 480;  // of one launch
    core::Index at[most];
};

static __global__ void store_lengths_kernel(const __grid_constant__ HostLengths lengths, int count, core::Index* to) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) to[i] = lengths.at[i];
}

// Writes t [N] to device memory.
inline void store_lengths(const core::Tensor& t, core::Index* to, cudaStream_t stream) {
    for (core::Index first = 0; first < t.shape[0]; first += HostLengths::most) {
        HostLengths some;
        const int count = static_cast<int>(std::min(t.shape[0] - first, core::Index(HostLengths::most)));
        for (int i = 0; i < count; ++i) some.at[i] = core::load_index(t, (first + i) * t.stride[0]);
        launch(store_lengths_kernel, {1, 256}, stream, "lengths of sequences", some, count, to + first);
    }
}

}  // namespace softdelta::cuda
