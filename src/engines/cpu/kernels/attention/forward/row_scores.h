// Where the scores of a row of tiles come from, vector by vector: products as they lie in memory, or with the biases or
// flags of a mask, which are read beside the exponentials.
#pragma once

#include "engines/cpu/kernels/attention/mask.h"
#include "engines/cpu/kernels/gemm/tile_products.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// bounded: no larger than |q|·|k|, or −∞.
struct Products {
    static constexpr bool bounded = true;
    const float* products;
    SOFTDELTA_INLINE F operator()(Index v) const { return load(products + v * 2 * tile_words); }
};

struct FinishedScores : Products {
    static constexpr bool bounded = false;
};

template <class T>
struct BiasedScores : Products {
    static constexpr bool bounded = false;
    F scale;
    const T* bias;
    SOFTDELTA_INLINE F operator()(Index v) const { return fma(Products::operator()(v), scale, load(bias + v * W)); }
};

struct MaskedScores : Products {
    static constexpr bool bounded = false;
    F scale;
    const std::uint8_t* flags;
    SOFTDELTA_INLINE F operator()(Index v) const {
        return select(nonzero_bytes(flags + v * W), Products::operator()(v) * scale, F(-infinity));
    }
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
