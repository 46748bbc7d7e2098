// A block of three warpgroups: the first copies tiles into stages of shared memory (engines/cuda/tile/ring.h),
// the two others multiply.
#pragma once

#include "engines/cuda/attention/call.h"
#include "engines/cuda/attention/warpgroup/tiles.h"
#include "engines/cuda/tile/ring.h"
#include "engines/cuda/tile/shared.h"

namespace softdelta::cuda::warpgroup {

inline constexpr int multipliers = 2, block_threads = 128 * (1 + multipliers);
inline constexpr int loader_registers = 40, multiplier_registers = 232;

// The thread's warpgroup and its warp there, as numbers that the compiler knows to be one for all lanes: what is made
// of them, operands above all, needs no registers of each lane.
__device__ inline int own_group() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / group_threads, 0);
}
__device__ inline int own_warp() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % group_threads / 32, 0);
}

// The two start products by turns: while one multiplies, the other weighs. Barriers 4 and 5 are theirs.
__device__ inline void take_turn(int group) {
    ptx::barrier(4 + group, 128 * multipliers);
}
__device__ inline void give_turn(int group) {
    ptx::arrive(5 - group, 128 * multipliers);
}
// Group 0 is the first.
__device__ inline void take_first_turn(int group) {
    if (group == 1) give_turn(group);
    take_turn(group);
}

// The block's sequence in shared memory, at `place`: what is rarely read holds no registers. The block waits
// afterwards.
__device__ inline const AttentionSequence& share_sequence(const AttentionSequences& sequences, int place) {
    auto* shared = reinterpret_cast<AttentionSequence*>(ptx::shared_memory() + place);
    if (threadIdx.x == 0) *shared = sequences[static_cast<int>(blockIdx.z)];
    __syncthreads();
    return *shared;
}

}  // namespace softdelta::cuda::warpgroup
