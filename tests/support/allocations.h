// How often this process has allocated memory.
#pragma once

namespace softdelta::test {

// Less than 0 where allocations are not counted: where a sanitizer has the allocator, and with clang's OpenMP, which
// allocates for regions of one thread. A program that calls it lists allocations.cpp among its sources.
int count_allocations();

}  // namespace softdelta::test
