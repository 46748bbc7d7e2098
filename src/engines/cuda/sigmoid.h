// The logistic function.
#pragma once

namespace softdelta::cuda {

__device__ inline float sigmoid(float x) {
    const float e = expf(-fabsf(x));  // no exponential of a positive number
    return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}

}  // namespace softdelta::cuda
