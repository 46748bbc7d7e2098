// Packing strided rows of any storage type into operands of products: rows of A, or micropanels of B (micropanel.h)
// whose rows they are (pack_b) or whose columns (pack_b_transposed). `rows` is any callable that gives the Row of an
// index.
#pragma once

#include "engines/cpu/kernels/gemm/prefetch.h"
#include "engines/cpu/kernels/gemm/product.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// A row as f32, or as bf16 for pairs: where it lies, if it can be read so, else copied to `staging`.
inline const float* stored_row(Row row, Index n, float* staging, FloatProduct /*of*/) {
    if (row.dtype == core::DType::f32 && row.step == 1 && n % W == 0) return static_cast<const float*>(row.data);
    load_row(row, n, staging);
    return staging;
}

// For pairs row.dtype is bf16. Zeros up to the next multiple of 2·W.
inline const std::uint16_t* stored_row(Row row, Index n, std::uint16_t* staging, PairProduct /*of*/) {
    const auto* data = static_cast<const std::uint16_t*>(row.data);
    if (row.step == 1 && n % (2 * W) == 0) return data;
    for (Index i = 0; i < n; ++i) staging[i] = data[i * row.step];
    for (Index i = n; i < round_up(n, 2 * W); ++i) staging[i] = 0;
    return staging;
}

// Elements between rows of A of n numbers: whole vectors, so that rows stay aligned.
template <class P>
constexpr Index a_row_length(Index n) {
    return round_up(n, W * P::depth) / P::depth;
}

inline constexpr Index packing_distance = 4;  // rows from the one that is packed to the one that is fetched

// A[count][n] by rows: out[r·a_row_length + k].
template <class P, class Rows>
void pack_a(Index count, Index n, const Rows& rows, Element<P>* out) {
    const Index length = a_row_length<P>(n);
    for (Index r = 0; r < count; ++r) {
        if (r + packing_distance < count) prefetch_row(rows(r + packing_distance), n);
        Element<P>* to = out + r * length;
        const auto* from = stored_row(rows(r), n, reinterpret_cast<Stored<P>*>(to), P{});
        if (static_cast<const void*>(from) == to) continue;
        for (Index i = 0; i < length; i += W)
            store(reinterpret_cast<float*>(to) + i, load(reinterpret_cast<const float*>(from) + i));
    }
}

// B = rowsᵀ [n, count]: column r is row r, the depth runs along the row. Columns up to a multiple of W are zero.
// staging: [W][a_row_length(n)] elements.
template <class P, class Rows>
void pack_b_transposed(Index count, Index n, const Rows& rows, Element<P>* staging, Element<P>* out) {
    const Index length = a_row_length<P>(n);
    const Index depth = depth_of<P>(n);
    const Index columns = round_up(count, W);
    for (Index c = 0; c < columns; c += W) {
        const Index panel = c / NR * NR;
        const Index width = micropanel_width(panel, columns);
        Element<P>* to = out + panel * depth + (c - panel);
        const std::uint32_t* from[W];
        for (Index r = 0; r < W; ++r) {
            auto* own = reinterpret_cast<Stored<P>*>(staging + r * length);
            if (c + r + W < count) prefetch_row(rows(c + r + W), n);
            if (c + r < count) {
                from[r] = reinterpret_cast<const std::uint32_t*>(stored_row(rows(c + r), n, own, P{}));
            } else {
                for (Index i = 0; i < length * P::depth; ++i) own[i] = 0;
                from[r] = reinterpret_cast<const std::uint32_t*>(own);
            }
        }
        for (Index k = 0; k < depth; k += W) {
            U block[W];
            for (Index r = 0; r < W; ++r) block[r] = load(from[r] + k);
            transpose(block);
            for (Index r = 0; r < W && k + r < depth; ++r)
                store(reinterpret_cast<std::uint32_t*>(to) + (k + r) * width, block[r]);
        }
    }
}

// B = rows [count, n]: the depth runs over rows. Columns up to a multiple of W are zero, and so is the second row of an
// odd last pair. staging: [2][round_up(n, 2·W)] stored elements.
template <class Rows>
void pack_b(Index count, Index n, const Rows& rows, float* staging, FloatProduct::Element* out, FloatProduct of) {
    for (Index r = 0; r < count; ++r) {
        const float* from = stored_row(rows(r), n, staging, of);
        const Index columns = round_up(n, W);
        for (Index c = 0; c < columns; c += NR) {
            const Index width = micropanel_width(c, columns);
            float* to = out + c * count + r * width;
            for (Index i = 0; i < width; i += W) store(to + i, load(from + c + i));
        }
    }
}

template <class Rows>
void pack_b(Index count, Index n, const Rows& rows, std::uint16_t* staging, PairProduct::Element* out, PairProduct of) {
    const Index depth = (count + 1) / 2;
    const Index columns = round_up(n, W);
    std::uint16_t* other = staging + round_up(n, 2 * W);
    for (Index r = 0; r < depth; ++r) {
        for (Index i = 2 * r + 2 * packing_distance; i < min(2 * r + 2 * packing_distance + 2, count); ++i)
            prefetch_row(rows(i), n);
        const std::uint16_t* first = stored_row(rows(2 * r), n, staging, of);
        const std::uint16_t* second = other;
        if (2 * r + 1 < count)
            second = stored_row(rows(2 * r + 1), n, other, of);
        else
            for (Index i = 0; i < columns; ++i) other[i] = 0;
        for (Index c = 0; c < columns; c += NR) {
            const Index width = micropanel_width(c, columns);
            std::uint32_t* to = out + c * depth + r * width;
            for (Index i = 0; i < width; i += W)
                store(to + i, load_u16(first + c + i) | (load_u16(second + c + i) << 16));
        }
    }
}

// Row `row` of B, packed by pack_b from `count` rows of n, becomes zero.
template <class P>
void clear_b_row(Index row, Index count, Index n, Element<P>* b) {
    const Index depth = depth_of<P>(count);
    auto* stored = reinterpret_cast<Stored<P>*>(b);
    const Index columns = round_up(n, W);
    for (Index c = 0; c < columns; ++c) {
        const Index panel = c / NR * NR;
        const Index width = micropanel_width(panel, columns);
        const Index word = panel * depth + row / P::depth * width + (c - panel);
        stored[word * P::depth + row % P::depth] = 0;
    }
}

// Whether no element of a packed operand is infinite or NaN; n words, a multiple of W. 0·x is NaN of those, else 0.
inline bool all_finite(const float* data, Index n) {
    F total = splat(0.0F);
    for (Index i = 0; i < n; i += W) total = fma(load(data + i), splat(0.0F), total);
    return all(total == total);
}
inline bool all_finite(const std::uint32_t* pairs, Index n) {
    F total = splat(0.0F);
    for (Index i = 0; i < n; i += W) {
        const U words = load(pairs + i);
        total = fma(as_floats(words << 16), splat(0.0F), total);
        total = fma(as_floats(words & U(0xffff0000U)), splat(0.0F), total);
    }
    return all(total == total);
}

// The first or second half of a word, as a number.
inline float half_of(std::uint32_t word, Index half) {
    return std::bit_cast<float>(half == 0 ? word << 16 : word & 0xffff0000U);
}

// Number k of a row of A.
inline float a_element(const float* row, Index k, FloatProduct /*of*/) {
    return row[k];
}
inline float a_element(const std::uint32_t* row, Index k, PairProduct /*of*/) {
    return half_of(row[k / 2], k % 2);
}

// W numbers of a row of A: floats, or rounded to W/2 pairs of bf16.
SOFTDELTA_INLINE void store_a(float* p, F x, FloatProduct /*of*/) {
    store(p, x);
}
SOFTDELTA_INLINE void store_a(std::uint32_t* p, F x, PairProduct /*of*/) {
    store_bf16(p, x);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
