// Pairs of bf16: words that hold two neighbours along the depth of a product, the first in the lower half.
#pragma once

#include "engines/cpu/kernels/simd/level.h"
#include "engines/cpu/kernels/simd/storage.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

#if !defined(SOFTDELTA_LEVEL_HAS_BF16_PRODUCTS)
inline constexpr bool has_bf16_products = false;
#endif

struct NoBlocks {
    static constexpr bool exist = false;
};

// An instruction that multiplies 2 × 4 numbers by 4 × 2. Level neon_bf16 has one.
#if !defined(SOFTDELTA_LEVEL_HAS_BLOCKS)
using Blocks = NoBlocks;
#endif

#if !defined(SOFTDELTA_LEVEL_HAS_BF16_PAIRS)

// Two vectors as words {first, second}, rounded to nearest even.
SOFTDELTA_INLINE U bf16_pairs(F first, F second) {
    return round_to_bf16(first) | (round_to_bf16(second) << 16);
}

// W floats as W/2 words of neighbours, rounded to nearest even.
SOFTDELTA_INLINE void store_bf16(std::uint32_t* p, F x) {
    store(reinterpret_cast<core::bf16*>(p), x);
}
#endif

// Two vectors as W words of neighbours.
#if !defined(SOFTDELTA_LEVEL_HAS_BF16_PRODUCTS)
SOFTDELTA_INLINE void store_bf16(std::uint32_t* p, F x, F y) {
    store_bf16(p, x);
    store_bf16(p + W / 2, y);
}
#endif

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
