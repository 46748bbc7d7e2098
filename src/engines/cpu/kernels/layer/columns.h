// Weights and states as callers mostly have them: the few numbers of a channel lie side by side.
//
//     memory   a0 a1 a2 a3 b0 b1 b2 b3 …        rows   a0 b0 …
//                                                      a1 b1 …
//
// The number of a channel is a constant in each of the loops here, so that compilers make vectors of them.
#pragma once

#include <cstdint>

#include "engines/cpu/kernels/layer/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr Index most_side_by_side = 4;

inline bool lies_side_by_side(const LayerRows& t, Index count) {
    return t.data != nullptr && t.row == 1 && t.column == count && count >= 2 && count <= most_side_by_side;
}

SOFTDELTA_INLINE float as_float(float x) {
    return x;
}
SOFTDELTA_INLINE float as_float(core::bf16 x) {
    return core::to_float(x);
}

template <int count, class T>
void separate(const T* __restrict from, Index n, float* __restrict rows, Index row) {
    for (Index c = 0; c < n; ++c)
        for (int i = 0; i < count; ++i) rows[i * row + c] = as_float(from[c * count + i]);
}

template <class T>
void separate(const LayerRows& t, Index count, Index n, float* rows, Index row) {
    const T* from = static_cast<const T*>(t.data);
    if (count == 2) separate<2>(from, n, rows, row);
    if (count == 3) separate<3>(from, n, rows, row);
    if (count == 4) separate<4>(from, n, rows, row);
}

// Rows [0, count) of n columns as f32, `row` floats apart; zeros up to the next multiple of W.
inline void load_layer_rows(const LayerRows& t, Index count, Index n, float* rows, Index row) {
    if (!lies_side_by_side(t, count) || t.dtype == core::DType::f16) {
        for (Index i = 0; i < count; ++i) load_layer_row(t, i, n, rows + i * row);
        return;
    }
    if (t.dtype == core::DType::f32)
        separate<float>(t, count, n, rows, row);
    else
        separate<core::bf16>(t, count, n, rows, row);
    for (Index i = 0; i < count; ++i)
        for (Index c = n; c < round_up(n, W); ++c) rows[i * row + c] = 0;
}

template <int count, class Bits>
void shift(Bits* __restrict state, const Bits* __restrict x, Index n) {
    for (Index c = 0; c < n; ++c) {
        Bits* channel = state + c * count;
        for (int i = 0; i + 1 < count; ++i) channel[i] = channel[i + 1];
        channel[count - 1] = x[c];
    }
}

template <class Bits>
void shift(const LayerRows& state, Index count, const void* x, Index n) {
    auto* to = static_cast<Bits*>(state.data);
    const auto* from = static_cast<const Bits*>(x);
    if (count == 2) shift<2>(to, from, n);
    if (count == 3) shift<3>(to, from, n);
    if (count == 4) shift<4>(to, from, n);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
