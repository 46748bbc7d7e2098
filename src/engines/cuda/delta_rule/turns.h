// Tiles in shared memory that some warps fill and others empty, each at its own pace.
#pragma once

#include <cstdint>

#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

// Counters of arrivals of a kind of tile: how often it was filled, how often it was emptied, for each of its places.
struct Turns {
    std::uint32_t counters;
    int places;

    __device__ std::uint32_t filled(unsigned n) const { return counters + 8 * (n % static_cast<unsigned>(places)); }
    __device__ std::uint32_t emptied(unsigned n) const { return filled(n) + 8 * static_cast<std::uint32_t>(places); }
    __device__ int parity(unsigned n) const { return static_cast<int>(n / static_cast<unsigned>(places) % 2); }

    __device__ void start(int fills, int readers) const {  // by one thread
        for (unsigned n = 0; n < static_cast<unsigned>(places); ++n) {
            ptx::start_counter(filled(n), fills);
            ptx::start_counter(emptied(n), readers);
        }
        ptx::show_counters();
    }
    // Of the n-th tile. Those who read it:
    __device__ void wait_until_there(unsigned n) const { ptx::wait(filled(n), parity(n)); }
    __device__ void wait_until_filled(unsigned n) const {  // for products of warpgroups
        wait_until_there(n);
        ptx::publish_to_products();
    }
    __device__ void release(unsigned n, int lane) const { ptx::arrive_as_warp(emptied(n), lane); }
    // Those who fill it:
    __device__ void come(unsigned n, int lane) const { ptx::arrive_as_warp(filled(n), lane); }
    __device__ void wait_until_free(unsigned n) const { ptx::wait(emptied(n), parity(n) ^ 1); }
    __device__ void fill_with_copies(unsigned n) const { ptx::arrive_after_copies(filled(n)); }
    __device__ void fill(unsigned n) const {  // every thread, for products of warpgroups, too
        ptx::publish_to_products();
        ptx::arrive(filled(n));
    }
};

}  // namespace softdelta::cuda
