// A block of three warpgroups: the first copies tiles into stages of shared memory, the two others multiply.
//
//     loader      wait until stage is free → copy → filled
//     multiplier  wait until stage is filled → multiply → free
#pragma once

#include "engines/cuda/attention/call.h"
#include "engines/cuda/tile.h"

namespace softdelta::cuda::warpgroup {

inline constexpr int multipliers = 2, block_threads = 128 * (1 + multipliers);
inline constexpr int loader_registers = 40, multiplier_registers = 232;

// The block's sequence in shared memory, at `place`: what is rarely read holds no registers. The block waits
// afterwards.
__device__ inline const AttentionSequence& share_sequence(const AttentionSequences& sequences, int place) {
    auto* shared = reinterpret_cast<AttentionSequence*>(ptx::shared_memory() + place);
    if (threadIdx.x == 0) *shared = sequences[static_cast<int>(blockIdx.z)];
    __syncthreads();
    return *shared;
}

template <int stages>
struct Pipeline {
    static constexpr int bytes = 2 * stages * 8;

    std::uint32_t counters;  // in shared memory

    // By one thread; the block waits afterwards. `arrivals` fill a stage: all threads of the loader arrive with their
    // copies and with what they store themselves, unless the copy engine copies.
    __device__ void start(int arrivals = 2 * 128) const {
        for (int i = 0; i < stages; ++i) {
            ptx::start_counter(filled(i), arrivals);
            ptx::start_counter(free(i), 4 * multipliers);
        }
    }
    // Loader and multipliers count tiles alike.
    __device__ static int stage(int tile) { return tile % stages; }
    __device__ void wait_until_free(int tile) const { ptx::wait(free(tile % stages), (tile / stages & 1) ^ 1); }
    __device__ void fill(int tile) const {
        ptx::arrive_after_copies(filled(tile % stages));
        ptx::arrive(filled(tile % stages));
    }
    __device__ std::uint32_t counter(int tile) const { return filled(tile % stages); }
    __device__ void wait_until_there(int tile) const { ptx::wait(filled(tile % stages), tile / stages & 1); }
    // What products of warpgroups read.
    __device__ void wait_until_filled(int tile) const {
        wait_until_there(tile);
        ptx::publish_to_products();
    }
    // By all lanes of a warp.
    __device__ void release(int tile, int lane) const {
        __syncwarp();
        if (lane == 0) ptx::arrive(free(tile % stages));
    }

  private:
    __device__ std::uint32_t filled(int stage) const { return counters + static_cast<std::uint32_t>(8 * stage); }
    __device__ std::uint32_t free(int stage) const {
        return counters + static_cast<std::uint32_t>(8 * (stages + stage));
    }
};

}  // namespace softdelta::cuda::warpgroup
