// What a product multiplies: floats, or pairs of bf16. The same code serves both through P = FloatProduct or
// PairProduct. With pairs an element is a word of two neighbours along the depth, and every depth and step of an
// operand counts words. A thread has an object of P::Tiles while it multiplies.
#pragma once

#include <bit>
#include <type_traits>

#include "engines/cpu/kernels/gemm/micropanel.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr int tile_size = 16;  // rows of a matrix tile, and pairs of a row of A

struct FloatProduct {
    using Element = float;
    using Tiles = NoTiles;
    using Blocks = NoBlocks;
    static constexpr Index depth = 1;  // numbers along the depth in an element
    SOFTDELTA_INLINE static F multiply_add(F a, F b, F c) { return fma(a, b, c); }  // c + a·b, lane by lane
    template <int lane = 0>
    SOFTDELTA_INLINE static F multiply_add_by_factor(F factors, F b, F c) {
        return multiply_add_factor<lane>(factors, b, c);
    }
};

struct PairProduct {
    using Element = std::uint32_t;
    using Tiles = MatrixTiles;
    using Blocks = kernels::SOFTDELTA_ISA_NAMESPACE::Blocks;
    static constexpr Index depth = 2;
    // A template: only levels with has_bf16_products have what it calls.
    template <class Vector>
    SOFTDELTA_INLINE static Vector multiply_add(Vector a, Vector b, Vector c) {
        return multiply_add_pairs(a, b, c);
    }
    template <int lane = 0, class Vector>
    SOFTDELTA_INLINE static Vector multiply_add_by_factor(Vector factors, Vector b, Vector c) {
        return multiply_add_pairs_by_factor<lane>(factors, b, c);
    }
};

// Rows of C that a microkernel computes at most: those of a register tile, or of a matrix tile.
template <class P>
inline constexpr int row_tile = P::Tiles::exist ? tile_size : MR;

// The type of one number of an operand: f32, or the bits of bf16.
template <class P>
using Stored = std::conditional_t<P::depth == 1, float, std::uint16_t>;

// Calls call(PairProduct{}) where pairs of bf16 are wanted and the level multiplies them, else call(FloatProduct{}).
template <class Call>
SOFTDELTA_INLINE auto with_product(bool bf16_products, const Call& call) {
    if constexpr (has_bf16_products)
        if (bf16_products) return call(PairProduct{});
    return call(FloatProduct{});
}

// What a thread has while it computes: matrix tiles where P multiplies by them, and results below 2^-126 that become 0.
// Decays make such results in folds, in sums of products and in states that fade, and each costs up to 240 cycles.
template <class P>
struct Computing {
    typename P::Tiles tiles;
    FlushSubnormals flush;
};

// The same as with_product(), for what computes.
template <class Call>
SOFTDELTA_INLINE auto compute_with(bool bf16_products, const Call& call) {
    return with_product(bf16_products, [&](auto p) {
        [[maybe_unused]] const Computing<decltype(p)> computing;
        return call(p);
    });
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
