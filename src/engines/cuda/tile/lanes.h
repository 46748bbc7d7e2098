// Sums and maxima over lanes of a warp. All of these lanes get the result, of running sums each its own; the order of
// additions is fixed.
#pragma once

namespace softdelta::cuda {

// Over 32 lanes, the two halves first.
template <class Number>
__device__ Number sum_of_warp(Number x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}
__device__ inline float maximum_of_warp(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

// Over `count` lanes side by side, a power of two, neighbours first.
template <int count, class Number>
__device__ Number sum_of_lanes(Number x) {
#pragma unroll
    for (int lanes = 1; lanes < count; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}
template <int count>
__device__ float maximum_of_lanes(float x) {
#pragma unroll
    for (int lanes = 1; lanes < count; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

// Of each lane: the sum from the first of `count` lanes side by side up to this one, which is number `lane` of them.
template <int count, class Number>
__device__ Number running_sum_of_lanes(Number x, int lane) {
#pragma unroll
    for (int lanes = 1; lanes < count; lanes *= 2) {
        const Number before = __shfl_up_sync(0xffffffffu, x, lanes);
        if (lane >= lanes) x += before;
    }
    return x;
}

// The same over the threads of a block; `all` grows by the sum of all. For all of its threads, through memory [warps].
template <int warps, class Number>
__device__ Number running_sum_of_block(Number x, Number& all, Number* of_warps) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    Number sum = all + running_sum_of_lanes<32>(x, lane);
    if (lane == 31) of_warps[warp] = sum - all;
    __syncthreads();
    for (int w = 0; w < warps; ++w) {
        if (w < warp) sum += of_warps[w];
        all += of_warps[w];
    }
    __syncthreads();
    return sum;
}

}  // namespace softdelta::cuda
