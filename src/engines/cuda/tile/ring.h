// Stages of shared memory between warps that fill them and warps that read them:
//
//     loader      wait until stage is free → copy → filled
//     multiplier  wait until stage is filled → multiply → free
#pragma once

#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

template <int stages>
struct Pipeline {
    static constexpr int bytes = 2 * stages * 8;

    std::uint32_t counters;  // in shared memory

    // By one thread; the block waits afterwards. A loader's threads arrive with their copies and with what they store
    // themselves, unless the copy engine copies; warps of others once for each.
    __device__ void start(int filling = 2 * 128, int releasing = 4 * 2) const {
        for (int i = 0; i < stages; ++i) {
            ptx::start_counter(filled(i), filling);
            ptx::start_counter(free(i), releasing);
        }
        ptx::show_counters();
    }
    // Loader and multipliers count tiles alike.
    __device__ static int stage(int tile) { return tile % stages; }
    __device__ void wait_until_free(int tile) const { ptx::wait(free(tile % stages), (tile / stages & 1) ^ 1); }
    __device__ void fill(int tile) const {
        ptx::arrive_after_copies(filled(tile % stages));
        ptx::arrive(filled(tile % stages));
    }
    // What a warp's lanes stored, for products of another warpgroup.
    __device__ void hand_on(int tile, int lane) const {
        ptx::publish_to_products();
        announce(tile, lane);
    }
    __device__ void announce(int tile, int lane) const { ptx::arrive_as_warp(filled(tile % stages), lane); }
    __device__ std::uint32_t counter(int tile) const { return filled(tile % stages); }
    __device__ void wait_until_there(int tile) const { ptx::wait(filled(tile % stages), tile / stages & 1); }
    // What products of warpgroups read. They see what the copy engine copied; what threads did must be shown to them.
    __device__ void wait_until_filled(int tile, bool by_engine = false) const {
        wait_until_there(tile);
        if (!by_engine) ptx::publish_to_products();
    }
    // By all lanes of a warp.
    __device__ void release(int tile, int lane) const { ptx::arrive_as_warp(free(tile % stages), lane); }
    // By one thread, which counts as a warp.
    __device__ void release_by_one(int tile) const { ptx::arrive(free(tile % stages)); }

  private:
    __device__ std::uint32_t filled(int stage) const { return counters + static_cast<std::uint32_t>(8 * stage); }
    __device__ std::uint32_t free(int stage) const {
        return counters + static_cast<std::uint32_t>(8 * (stages + stage));
    }
};

}  // namespace softdelta::cuda
