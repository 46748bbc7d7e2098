// What all levels of x86 share: the prefetch instruction, and reductions of 128 bits, with which those of wider vectors
// end.
#pragma once

#include <immintrin.h>

#include "engines/cpu/kernels/simd/vector.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Fetches the cache line at p to all levels of the cache. Written in assembly: g++ 12 takes a function that only calls
// __builtin_prefetch for one without effect.
SOFTDELTA_INLINE void prefetch_line(const void* p) {
    asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p)));
}

// To the second cache alone.
SOFTDELTA_INLINE void prefetch_line_to_second(const void* p) {
    asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p)));
}

// The same as prefetch_line() for a line that is going to be written.
SOFTDELTA_INLINE void prefetch_for_write(const void* p) {
    __builtin_prefetch(p, 1);
}

// While an object of this class lives, results of its thread below 2^-126 become 0; operands below count as they are.
class FlushSubnormals {
  public:
    FlushSubnormals() { _mm_setcsr(before_ | 0x8000U); }
    ~FlushSubnormals() { _mm_setcsr(before_); }
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

  private:
    unsigned before_ = _mm_getcsr();
};

// Over four lanes, in the first lane of the result.
SOFTDELTA_INLINE __m128 sum_of_four(__m128 x) {
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_add_ss(x, _mm_shuffle_ps(x, x, 1));
}
SOFTDELTA_INLINE __m128 maximum_of_four(__m128 x) {
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_max_ss(x, _mm_shuffle_ps(x, x, 1));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
