// A block of three warpgroups: the first, the producer, copies tiles into stages of shared memory (tile/ring.h); the
// two others, the consumers, multiply.
#pragma once

#include "engines/cuda/attention/call.h"
#include "engines/cuda/attention/warpgroup/tiles.h"
#include "engines/cuda/tile/ring.h"

namespace softdelta::cuda::warpgroup {

inline constexpr int consumers = 2, block_threads = warpgroup_threads * (1 + consumers);
inline constexpr int producer_registers = 40, consumer_registers = 232;

// The thread's warpgroup and its warp there, as numbers that the compiler knows to be one for all lanes: what is made
// of them, operands above all, needs no registers of each lane.
__device__ inline int own_warpgroup() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / warpgroup_threads, 0);
}
__device__ inline int own_warp() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % warpgroup_threads / 32, 0);
}

// produce() or consume(warpgroup, warp, lane), each with its registers.
template <class Produce, class Consume>
__device__ void share_roles(const Produce& produce, const Consume& consume) {
    const int warpgroup = own_warpgroup();
    if (warpgroup == 0) {
        ptx::release_registers<producer_registers>();
        produce();
    } else {
        ptx::take_registers<consumer_registers>();
        consume(warpgroup - 1, own_warp(), static_cast<int>(threadIdx.x) % 32);
    }
}

// The consumers take turns in starting products: while one multiplies, the other computes exponentials. Barriers 4 and
// 5 are theirs.
__device__ inline void take_turn(int warpgroup) {
    ptx::barrier(4 + warpgroup, warpgroup_threads * consumers);
}
__device__ inline void give_turn(int warpgroup) {
    ptx::arrive(5 - warpgroup, warpgroup_threads * consumers);
}
// Consumer 0 is the first.
__device__ inline void take_first_turn(int warpgroup) {
    if (warpgroup == 1) give_turn(warpgroup);
    take_turn(warpgroup);
}

// Whether x is true for a thread of the consumers.
__device__ inline bool any_consumer(bool x) {
    return ptx::any(1, warpgroup_threads * consumers, x);
}

// Sequence i in shared memory, at `place`: what is rarely read holds no registers. The block waits
// afterwards.
__device__ inline AttentionSequence& share_sequence(const AttentionSequences& sequences, int i, int place) {
    auto* shared = reinterpret_cast<AttentionSequence*>(ptx::shared_memory() + place);
    if (threadIdx.x == 0) *shared = sequences[i];
    __syncthreads();
    return *shared;
}

// Keys that the block's queries from `first` on see, from a multiple of N on.
template <int N>
__device__ inline Span keys_of_block(const AttentionCall& call, const AttentionSequence& s, int first) {
    if (first >= s.q_count) return {};
    const Index last = min(Index(first + warpgroup_rows), s.q_count) - 1;
    return Span(visible_keys(call, s, first).begin / N * N, visible_keys(call, s, last).end);
}

}  // namespace softdelta::cuda::warpgroup
