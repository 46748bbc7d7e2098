// Races of a launch on the host, found by happens-before: -fsanitize=thread has every access of the kernels call
// races.cpp, which keeps for each two bytes who wrote and read them last, and for each thread what it knows of the
// others. Barriers, counters and __syncwarp() pass that on; shuffles and products of a warp do not.
//
//     thread 3   writes x   __syncthreads()            knows its own 5 steps
//     thread 7              __syncthreads()   reads x  knows 5 steps of thread 3: no race
//
// Without SOFTDELTA_CUDA_RACES nothing of it is compiled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace softdelta::host::races {

// What threads know of each other: the steps of each, and those published to products of warpgroups.
struct Known {
    std::vector<std::uint32_t> steps, published;
};
// Of a barrier: what those that came brought along, and what those that leave take with them.
struct Meeting {
    Known gathered, passed;
};

#if defined(SOFTDELTA_CUDA_RACES)
void begin_launch(const void* shared, std::size_t bytes);
void begin_block(int threads);
void end_launch();
void come(Meeting& meeting);
void all_came(Meeting& meeting);
void leave(const Meeting& meeting);
// Copies in the background: on their way, and there.
void copy_begins(const void* to, std::size_t bytes);
void copy_ends(const void* to, std::size_t bytes);
// Of the copy engine, for those that meet where it ends, and begun by that thread.
void copy_ends(const void* to, std::size_t bytes, Meeting& meeting, int thread);
void store_reads(const void* from, std::size_t bytes);
void wait_for_stored();
// Operands that products of a warpgroup read until they are waited for.
void product_reads(const void* from, std::size_t bytes);
void commit_products();
void wait_for_products(int running);
void publish_to_products();
#else
inline void begin_launch(const void*, std::size_t) {}
inline void begin_block(int) {}
inline void end_launch() {}
inline void come(Meeting&) {}
inline void all_came(Meeting&) {}
inline void leave(const Meeting&) {}
inline void copy_begins(const void*, std::size_t) {}
inline void copy_ends(const void*, std::size_t) {}
inline void copy_ends(const void*, std::size_t, Meeting&, int) {}
inline void store_reads(const void*, std::size_t) {}
inline void wait_for_stored() {}
inline void product_reads(const void*, std::size_t) {}
inline void commit_products() {}
inline void wait_for_products(int) {}
inline void publish_to_products() {}
#endif

}  // namespace softdelta::host::races
