// Scales of a few rows of quantised numbers, read together. Example of 2 blocks:
//     k₀b₀ k₁b₀ k₂b₀ k₃b₀ | k₀b₁ k₁b₁ k₂b₁ k₃b₁
// so that the probabilities of a slot, p₀ p₁ p₂ p₃ in every four lanes, multiply whole vectors of them.
#pragma once

#include "engines/cpu/kernels/attention/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr Index slot_keys = 4;  // keys of one call of the products

// Of slot_keys rows: the scale of block b of row k is scale[b·slot_keys + k].
struct QuantisedRows {
    const float* scale = nullptr;
    Index block_step = 0;  // bytes from a block to the next
};

constexpr Index quantised_blocks(Index n) {
    return round_up(n, core::quantised_block) / core::quantised_block;
}
// Floats that the scales of rows of n elements fill.
constexpr Index scales_length(Index n) {
    return round_up(quantised_blocks(n) * slot_keys, W);
}

// Scale i of those of slot_keys rows, in the order above.
template <class T>
SOFTDELTA_INLINE T scale_of(const void* const* rows, Index step, Index i) {
    return static_cast<const T*>(rows[i % slot_keys])[i / slot_keys * step];
}

// A vector of scales from scale i on; lanes beyond the last have the last.
template <class T, class At>
SOFTDELTA_INLINE F scales_at(const void* const* rows, Index step, const At& at) {
    if constexpr (std::is_same_v<T, core::f16>)
        return lanes_of_f16([&](Index l) { return scale_of<T>(rows, step, at(l)).bits; });
    else if constexpr (std::is_same_v<T, core::bf16>)
        return lanes_of([&](Index l) { return core::to_float(scale_of<T>(rows, step, at(l))); });
    else
        return lanes_of([&](Index l) { return scale_of<T>(rows, step, at(l)); });
}

// rows[k]: where the scales of row k begin. Fills scales_length(n) floats.
inline QuantisedRows load_scales(const Scales& scales, const void* const* rows, Index n, float* out) {
    const Index count = quantised_blocks(n) * slot_keys, step = scales.step;
    const auto load_all = [&](auto type) {
        using T = decltype(type);
        Index i = 0;
        for (; i + W <= count; i += W) {
            const Index block = i / slot_keys;
            store(out + i, scales_at<T>(rows, step, [block](Index l) { return block * slot_keys + l; }));
        }
        for (; i < count; i += W)
            store(out + i, scales_at<T>(rows, step, [i, count](Index l) { return min(i + l, count - 1); }));
    };
    if (scales.dtype == DType::f16)
        load_all(core::f16{});
    else if (scales.dtype == DType::bf16)
        load_all(core::bf16{});
    else
        load_all(0.0F);
    return {out, scales.block_step};
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
