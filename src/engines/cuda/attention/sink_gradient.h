// The gradient of a head's sink: −Σ P(sink)·D over its rows. row_terms.cu takes each row's share.
#pragma once

#include "engines/cuda/attention/launch_kernels.h"

namespace softdelta::cuda {

__device__ inline float sink_share(const AttentionCall& call, int head, float top, float log_sum, float D) {
    const float sink = load(call.sink, head * call.sink.stride[0]);
    float probability = sink == INFINITY ? 1.0F : 0.0F;
    if (isfinite(sink)) probability = expf((sink - top) - log_sum);
    return probability != 0 ? probability * D : 0.0F;
}

void launch_sink_gradient(const AttentionCall& call, const RowTerms& rows, const View& dsink, cudaStream_t stream);

}  // namespace softdelta::cuda
