// A block adds up the shares that a head's rows have in the gradient of its sink, in f64.
#include "engines/cuda/attention/sink_gradient.h"

#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

constexpr int sink_threads = 256;
__global__ void __launch_bounds__(sink_threads)
    sink_gradient_kernel(const __grid_constant__ RowTerms rows, Index count, View dsink) {
    auto* parts = reinterpret_cast<double*>(ptx::shared_memory());
    const int thread = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.x);
    double sum = 0;
    for (Index i = thread; i < count; i += sink_threads) sum += static_cast<double>(rows.sink[head * count + i]);
    parts[thread] = sum;
    for (int step = sink_threads / 2; step > 0; step /= 2) {
        __syncthreads();
        if (thread < step) parts[thread] += parts[thread + step];
    }
    if (thread == 0) store(dsink, head * dsink.stride[0], -static_cast<float>(parts[0]));
}

}  // namespace

void launch_sink_gradient(const AttentionCall& call, const RowTerms& rows, const View& dsink, cudaStream_t stream) {
    launch(sink_gradient_kernel, {call.heads, sink_threads, sink_threads * static_cast<int>(sizeof(double))}, stream,
           "attention's gradient of the sink", rows, call.total_queries, dsink);
}

}  // namespace softdelta::cuda
