// Stages of shared memory between warps that fill them (producers) and warps that read them (consumers), each at its
// own pace:
//
//     producer    acquire(n) → copy     → commit(n)
//     consumer    wait(n)    → multiply → release(n)
#pragma once

#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

// Two mbarriers for each stage, full and empty. Producers and consumers count tiles alike: n of any integer type.
template <int stages>
struct Ring {
    static constexpr int bytes = 2 * stages * 8;

    std::uint32_t barriers;  // in shared memory

    // By one thread; the block waits afterwards. Threads that copy by cp.async arrive with their copies and with what
    // they store themselves, so twice; warps that read arrive once each.
    __device__ void start(int producers, int consumers) const {
        for (int i = 0; i < stages; ++i) {
            ptx::start_counter(full(i), producers);
            ptx::start_counter(empty(i), consumers);
        }
        ptx::show_counters();
    }
    __device__ static auto stage(auto n) { return n % stages; }
    __device__ std::uint32_t full(auto n) const { return barriers + static_cast<std::uint32_t>(8 * (n % stages)); }
    __device__ std::uint32_t empty(auto n) const { return full(n) + 8 * stages; }

    __device__ void acquire(auto n) const { ptx::wait(empty(n), parity(n) ^ 1); }
    __device__ void commit_copies(auto n) const {  // of this thread, in the background, and what it stored
        ptx::arrive_after_copies(full(n));
        ptx::arrive(full(n));
    }
    __device__ void commit(auto n, int lane) const { ptx::arrive_as_warp(full(n), lane); }
    __device__ void commit_to_products(auto n) const {  // what this thread stored
        ptx::publish_to_products();
        ptx::arrive(full(n));
    }

    __device__ void wait(auto n) const { ptx::wait(full(n), parity(n)); }
    // For products of warpgroups. They see what TMA copied; what threads did must be shown to them.
    __device__ void wait_for_products(auto n, bool by_tma = false) const {
        wait(n);
        if (!by_tma) ptx::publish_to_products();
    }
    __device__ void release(auto n, int lane) const { ptx::arrive_as_warp(empty(n), lane); }
    __device__ void release_by_one(auto n) const { ptx::arrive(empty(n)); }  // a thread that counts as a warp

  private:
    __device__ static int parity(auto n) { return static_cast<int>(n / stages & 1); }
};

}  // namespace softdelta::cuda
