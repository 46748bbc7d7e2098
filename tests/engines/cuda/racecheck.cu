// What racecheck of compute-sanitizer (CUDA 13.0) reports although nothing races: three ways to hand a number on, each
// ordered by the rules of PTX. The engine's kernels use all of them; docs/cuda.md says which reports they explain.
//
//     nvcc -arch=sm_90a -std=c++20 -Isrc tests/engines/cuda/racecheck.cu -o racecheck
//     compute-sanitizer --tool racecheck ./racecheck
#include <cstdio>

#include "engines/cuda/tile/tma.h"

namespace ptx = softdelta::cuda::ptx;

// A warp stores, and one of its lanes arrives for all.
__global__ void one_lane_arrives(int* out) {
    __shared__ int numbers[32];
    __shared__ __align__(8) char memory[8];
    const std::uint32_t counter = ptx::shared_address(memory);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x == 0) ptx::start_counter(counter, 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        numbers[lane] = lane;
        __syncwarp();
        if (lane == 0) ptx::arrive(counter);
    } else {
        ptx::wait(counter, 0);
        out[lane] = numbers[31 - lane];
    }
}

// Two warps store and go on (bar.arrive), two wait for them (bar.sync), step by step.
__global__ void some_arrive_at_a_barrier(int* out) {
    __shared__ int numbers[64];
    const int thread = static_cast<int>(threadIdx.x) % 64;
    for (int step = 0; step < 4; ++step) {
        if (threadIdx.x < 64) {
            numbers[thread] = thread + step;
            ptx::arrive(4, 128);
        } else {
            ptx::barrier(4, 128);
            out[thread] = numbers[63 - thread];
        }
        __syncthreads();
    }
}

// A thread stores and meets another at a barrier, which arrives at a counter that also waits for the copy engine's
// bytes.
__global__ void a_counter_waits_for_copies_too(int* out, const int* in) {
    __shared__ volatile int number;
    __shared__ __align__(128) int copied[4];
    __shared__ __align__(8) char memory[8];
    const std::uint32_t counter = ptx::shared_address(memory);
    if (threadIdx.x == 0) ptx::start_counter(counter, 1);
    __syncthreads();
    if (threadIdx.x < 64) {
        if (threadIdx.x == 32) number = 7;
        ptx::barrier(1, 64);
        if (threadIdx.x == 0) {
            softdelta::cuda::arrive_expecting(counter, 16);
            softdelta::cuda::copy_side_by_side(ptx::shared_address(copied), in, 16, counter);
        }
    } else {
        ptx::wait(counter, 0);
        out[threadIdx.x % 32] = number + copied[threadIdx.x % 4];
    }
}

int main() {
    int* out = nullptr;
    cudaMalloc(&out, 128 * sizeof(int));
    one_lane_arrives<<<1, 64>>>(out);
    some_arrive_at_a_barrier<<<1, 128>>>(out);
    a_counter_waits_for_copies_too<<<1, 96>>>(out, out + 64);
    std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
