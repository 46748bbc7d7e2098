// A GPU's programming model on the host, for tests without one: the threads of a block are fibers of one thread, which
// take turns at barriers and shuffles. It tells wrong results, wrong addresses, threads that wait for ever and,
// compiled for them, races (races.h): a launch's shared memory and the device's allocations have exactly the bytes
// asked for, so that AddressSanitizer sees accesses beyond them.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "engines/cuda/host/races.h"

#define __launch_bounds__(...)
#if defined(SOFTDELTA_CUDA_RACES)  // a function whose accesses are no race
#define SOFTDELTA_UNSEEN __attribute__((no_sanitize("thread"), noinline))
#else
#define SOFTDELTA_UNSEEN
#endif

extern constinit thread_local uint3 threadIdx, blockIdx;
extern constinit thread_local dim3 blockDim, gridDim;

using std::isfinite;
using std::isinf;
using std::isnan;

namespace softdelta::host {

// Waits for `threads` fibers of the block at barrier `which`; of the warp.
void wait_for_block(int which, int threads);
void arrive_at_block(int which, int threads);  // others wait for it
void wait_for_warp();
// Counters of arrivals, named by their address.
void start_counter(std::uint32_t counter, int arrivals);
void show_counters();  // those started so far, to the copy engine
void arrive(std::uint32_t counter);
void wait_for_counter(std::uint32_t counter, int parity);
// Copies of 16 bytes, zeros from nowhere, that are there when they were waited for.
constexpr std::size_t copy_bytes = 16;
void begin_copy(std::byte* to, const void* from);
void commit_copies();
void wait_for_copies(int groups);  // all but the last groups
// A block begins with as many registers for each thread as one block on a multiprocessor can have. Threads that take
// more wait until others have given so many back.
void release_registers(int registers);
void take_registers(int registers);
// The copy engine: a counter's phase also waits for so many bytes, and for 16-byte copies of as many elements of 16
// bits, zeros after them, that are there when it ends. Stored bytes are read until the thread waits for that.
void expect(std::uint32_t counter, int bytes);
void begin_copy(std::uint32_t counter, std::byte* to, const void* from, int elements);
void store(std::byte* from, void* to, int elements);
void wait_for_stored();

// What instructions ask about the block that runs.
struct Running {
    int thread = 0;
    std::byte* shared = nullptr;
    std::size_t shared_bytes = 0;
    bool is_hopper = false;
};
extern constinit thread_local Running running;
SOFTDELTA_UNSEEN inline int running_thread() {
    return running.thread;
}
// Accesses and mistakes count as that thread's.
SOFTDELTA_UNSEEN inline void act_as(int thread) {
    running.thread = thread;
}
SOFTDELTA_UNSEEN inline int lane() {
    return running.thread % 32;
}
bool is_private(const void* at);  // the running warp's stacks, and what its lanes hand in

// Stops the program, saying what is wrong.
[[noreturn]] void stop(const char* wrong);
inline void check(bool right, const char* wrong) {
    if (!right) stop(wrong);
}
SOFTDELTA_UNSEEN inline std::byte* shared_memory() {
    return running.shared;
}
// Of instructions that other cards have not.
SOFTDELTA_UNSEEN inline void check_hopper() {
    check(running.is_hopper, "an instruction of sm_90a on another card");
}
constexpr std::uint32_t first_shared = 1024;  // the address of its first byte
// `bytes` of it from an address on that is a multiple of them; stops the program where there are none.
SOFTDELTA_UNSEEN inline std::byte* shared_at(std::uint32_t address, std::uint32_t bytes) {
    check(address % bytes == 0, "an address in shared memory is not aligned");
    check(address >= first_shared && address - first_shared + bytes <= running.shared_bytes,
          "an address is outside of the launch's shared memory");
    return running.shared + (address - first_shared);
}

// The warp's lanes hand something in. The last of them gets what each handed in; the others wait until it goes on, and
// get nothing. Orders no memory.
void* const* hand_in(void* mine);
// What a warp's lanes do together, done by the last of them, so that threads change once: act(of) with of(i) what lane
// i handed in.
template <class Mine, class Act>
void together(Mine& mine, const Act& act) {
    if (void* const* all = hand_in(&mine)) act([all](int i) -> Mine& { return *static_cast<Mine*>(all[i]); });
}
// act(i) as lane i of the warp, for the first of them.
template <class Act>
void as_lanes(int lanes, const Act& act) {
    const int own = running_thread();
    for (int i = 0; i < lanes; ++i) {
        act_as(own / 32 * 32 + i);
        act(i);
    }
    act_as(own);
}

// Runs kernel() for every thread of every block.
void run(dim3 blocks, int threads, std::size_t shared_bytes, bool is_hopper, const std::function<void()>& kernel);

template <class T>
T from_lane(T x, int source) {
    struct Exchange {
        T x, out;
        int source;
    } mine{x, x, source};
    together(mine, [](const auto& of) {
        for (int i = 0; i < 32; ++i) of(i).out = of(of(i).source).x;
    });
    return mine.out;
}

}  // namespace softdelta::host

template <class T>
T __shfl_xor_sync(unsigned, T x, int lanes) {
    return softdelta::host::from_lane(x, softdelta::host::lane() ^ lanes);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int lanes) {
    const int lane = softdelta::host::lane();
    return softdelta::host::from_lane(x, lane >= lanes ? lane - lanes : lane);
}
template <class T>
T __shfl_down_sync(unsigned, T x, int lanes) {
    const int lane = softdelta::host::lane();
    return softdelta::host::from_lane(x, lane + lanes < 32 ? lane + lanes : lane);
}
template <class T>
T __shfl_sync(unsigned, T x, int source) {
    return softdelta::host::from_lane(x, source % 32);
}
SOFTDELTA_UNSEEN inline int atomicAdd(int* to, int x) {
    const int before = *to;
    *to += x;
    return before;
}
inline bool __any_sync(unsigned, bool x) {
    softdelta::host::together(x, [](const auto& of) {
        bool any = false;
        for (int i = 0; i < 32; ++i) any = any || of(i);
        for (int i = 0; i < 32; ++i) of(i) = any;
    });
    return x;
}
inline unsigned __ballot_sync(unsigned, bool x) {
    struct Exchange {
        bool x;
        unsigned out;
    } mine{x, 0};
    softdelta::host::together(mine, [](const auto& of) {
        unsigned all = 0;
        for (int i = 0; i < 32; ++i) all |= of(i).x ? 1U << i : 0U;
        for (int i = 0; i < 32; ++i) of(i).out = all;
    });
    return mine.out;
}
inline float __expf(float x) {
    return std::exp(x);
}
inline float __logf(float x) {
    return std::log(x);
}
inline float __uint_as_float(std::uint32_t x) {
    float out;
    std::memcpy(&out, &x, sizeof out);
    return out;
}
inline std::uint32_t __float_as_uint(float x) {
    std::uint32_t out;
    std::memcpy(&out, &x, sizeof out);
    return out;
}
inline float __fdividef(float x, float y) {
    return x / y;
}
inline void __syncwarp() {
    softdelta::host::wait_for_warp();
}
inline void __syncthreads() {
    softdelta::host::wait_for_block(0, static_cast<int>(blockDim.x));
}

template <class T>
T __ldcs(const T* from) {
    return *from;
}
template <class T>
void __stcs(T* to, T x) {
    *to = x;
}

template <class T>
T min(T x, T y) {
    return y < x ? y : x;
}
template <class T>
T max(T x, T y) {
    return x < y ? y : x;
}
