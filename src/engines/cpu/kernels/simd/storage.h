// Storage types: bf16 on every level, f16 as the level has it, and the first elements of a vector alone.
#pragma once

#include "core/dtype.h"
#include "engines/cpu/kernels/simd/level.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

SOFTDELTA_INLINE F load(const core::bf16* p) {
    return as_floats(load_u16(&p->bits) << 16);
}

// bf16 in the lower halves of words: nearest even; NaN stays NaN.
SOFTDELTA_INLINE U round_to_bf16(F x) {
    const U bits = as_words(x);
    const U rounded = (bits + U(0x7fffU) + ((bits >> 16) & U(1U))) >> 16;
    const U nan = (bits >> 16) | U(0x40U);
    return as_words(select(x == x, as_floats(rounded), as_floats(nan)));
}

SOFTDELTA_INLINE void store(core::bf16* p, F x) {
    store_u16(&p->bits, round_to_bf16(x));
}

// The first n ≤ W elements, zeros after them; nothing beyond them is read or written.
template <class T>
SOFTDELTA_INLINE F load_partial(const T* p, Index n) {
    alignas(64) T part[W] = {};
    for (Index i = 0; i < n; ++i) part[i] = p[i];
    return load(part);
}
template <class T>
SOFTDELTA_INLINE void store_partial(T* p, F x, Index n) {
    alignas(64) T part[W];
    store(part, x);
    for (Index i = 0; i < n; ++i) p[i] = part[i];
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
