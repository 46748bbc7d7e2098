// The vectors that kernels are written in. This folder alone names instructions.
//
//     vector.h       types, width W, load and store
//     level.h        what an instruction set must state and have: the files of x86, arm and emulated
//     storage.h      bf16, f16, the first elements of a vector
//     bf16_pairs.h   words of two bf16, and their product where there is one
//     factor.h       factors that are the same for all lanes
//     tiles.h        matrix tiles
//     mathematics.h  exponentials, written with the functions above
#pragma once

#include "engines/cpu/kernels/simd/bf16_pairs.h"
#include "engines/cpu/kernels/simd/factor.h"
#include "engines/cpu/kernels/simd/level.h"
#include "engines/cpu/kernels/simd/mathematics.h"
#include "engines/cpu/kernels/simd/storage.h"
#include "engines/cpu/kernels/simd/tiles.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// p + step as one value in a register: compilers would rather prepare the addresses of a whole unrolled loop, and spill
// them.
template <class T>
SOFTDELTA_INLINE T* advance_pointer(T* p, Index step) {
    p += step;
    asm("" : "+r"(p));
    return p;
}

// Compilers would rather begin all loads of an unrolled loop at once, and spill them, too.
SOFTDELTA_INLINE void keep_loads_below() {
    asm volatile("" ::: "memory");
}

// Lane i of the result is the sum, or the maximum, of the lanes of rows[i]; overwrites rows.
SOFTDELTA_INLINE F row_sums(F (&rows)[W]) {
    return reduce_rows(rows, [](F x, F y) { return x + y; });
}
SOFTDELTA_INLINE F row_maxima(F (&rows)[W]) {
    return reduce_rows(rows, [](F x, F y) { return max(x, y); });
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
