// Rows of tensors in which the numbers of a channel lie side by side, as those of weights and states mostly do, and
// those of tokens where channels come first.
//
//     memory   a0 a1 a2 a3 b0 b1 b2 b3 …        rows   a0 b0 …
//                                                      a1 b1 …
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

// The number of a channel is a constant here, so that compilers make vectors of the loops.
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

// W channels of at most W tokens from row i on, as words of floats: channel c in block[c].
template <class T>
SOFTDELTA_INLINE void load_channels(const LayerRows& t, Index i, Index count, Index c, Index n, U (&block)[W]) {
    const T* from = static_cast<const T*>(t.data) + i * t.row + c * t.column;
    for (Index j = 0; j < W; ++j)
        block[j] = as_words(j >= n - c   ? splat(0.0F)
                            : count == W ? load(from + j * t.column)
                                         : load_partial(from + j * t.column, count));
}

template <class T>
SOFTDELTA_INLINE void store_channels(const U (&block)[W], const LayerRows& t, Index i, Index count, Index c, Index n) {
    T* to = static_cast<T*>(t.data) + i * t.row + c * t.column;
    for (Index j = 0; j < W && j < n - c; ++j) {
        if (count == W) {
            store(to + j * t.column, as_floats(block[j]));
            continue;
        }
        alignas(64) T part[W];
        store(part, as_floats(block[j]));
        for (Index k = 0; k < count; ++k) to[j * t.column + k] = part[k];
    }
}

// Calls call(T{}) with the type of the tensor's numbers.
template <class Call>
SOFTDELTA_INLINE void with_type_of(const LayerRows& t, const Call& call) {
    if (t.dtype == core::DType::f32) return call(float{});
    if (t.dtype == core::DType::bf16) return call(core::bf16{});
    call(core::f16{});
}

inline bool has_channels_first(const LayerRows& t) {
    return t.data != nullptr && t.row == 1 && t.column != 1;
}

// Rows [i, i + count) of n columns as f32, at most W of them and `row` floats apart; zeros up to the next multiple of
// W.
inline void load_token_rows(const LayerRows& t, Index i, Index count, Index n, float* rows, Index row) {
    if (count == 1 || !has_channels_first(t)) {
        for (Index k = 0; k < count; ++k) load_layer_row(t, i + k, n, rows + k * row);
        return;
    }
    U block[W];
    for (Index c = 0; c < n; c += W) {
        with_type_of(t, [&](auto type) { load_channels<decltype(type)>(t, i, count, c, n, block); });
        transpose(block);
        for (Index k = 0; k < count; ++k) store(rows + k * row + c, as_floats(block[k]));
    }
}

inline void store_token_rows(const float* rows, Index row, Index n, const LayerRows& t, Index i, Index count) {
    if (count == 1 || !has_channels_first(t)) {
        for (Index k = 0; k < count; ++k) store_layer_row(rows + k * row, n, t, i + k);
        return;
    }
    U block[W];
    for (Index c = 0; c < n; c += W) {
        for (Index k = 0; k < W; ++k) block[k] = as_words(k < count ? load(rows + k * row + c) : splat(0.0F));
        transpose(block);
        with_type_of(t, [&](auto type) { store_channels<decltype(type)>(block, t, i, count, c, n); });
    }
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
