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

extern thread_local uint3 threadIdx, blockIdx;
extern thread_local dim3 blockDim, gridDim;

using std::isfinite;
using std::isinf;
using std::isnan;

namespace softdelta::host {

// Waits for `threads` fibers of the block at barrier `which`; of the warp.
void wait_for_block(int which, int threads);
void arrive_at_block(int which, int threads);  // others wait for it
void wait_for_warp();
void shuffle();  // as wait_for_warp(), but orders no memory
// Counters of arrivals, named by their address.
void start_counter(std::uint32_t counter, int arrivals);
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
int lane();
int running_thread();
bool is_private(const void* at);  // of the running thread, or where lanes exchange numbers
// 32 places of place_bytes that the warp's lanes exchange numbers by.
constexpr std::size_t place_bytes = 32;
void* place(int lane);

std::byte* shared_memory();
constexpr std::uint32_t first_shared = 1024;  // the address of its first byte
// `bytes` of it from an address on that is a multiple of them; stops the program where there are none.
std::byte* shared_at(std::uint32_t address, std::uint32_t bytes);
// Stops the program, saying what is wrong.
void check(bool right, const char* wrong);

// Runs kernel() for every thread of every block.
void run(dim3 blocks, int threads, std::size_t shared_bytes, const std::function<void()>& kernel);

template <class T>
T from_lane(T x, int source) {
    std::memcpy(place(lane()), &x, sizeof x);
    shuffle();
    T out;
    std::memcpy(&out, place(source), sizeof x);
    shuffle();
    return out;
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
    bool any = x;
    for (int lanes = 1; lanes < 32; lanes *= 2) any = __shfl_xor_sync(0, any, lanes) || any;
    return any;
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
