// How often this process has allocated memory, how much it holds, and what it does where there is none. A program that
// calls this lists allocations.cpp among its sources.
#pragma once

#include <cstdint>

namespace softdelta::test {

// Less than 0 where allocations are not counted: where a sanitizer has the allocator, and with clang's OpenMP, which
// allocates for regions of one thread.
int count_allocations();

// Blocks and bytes that were allocated and not yet freed; the most bytes since follow_peak() began.
std::int64_t blocks_held();
std::int64_t bytes_held();
std::int64_t peak_bytes();
void follow_peak();

// Of the allocations from now on, number `first` fails (0: the next one), or all from it on.
void fail_allocations(int first, bool all);
// From now on there is memory. Whether an allocation has failed.
bool stop_failing();

}  // namespace softdelta::test
