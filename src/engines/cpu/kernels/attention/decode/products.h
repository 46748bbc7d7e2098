// Products of few query rows with keys and values as they lie in memory.
#pragma once

#include "engines/cpu/kernels/attention/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr Index slot_keys = 4;             // keys of one call
inline constexpr int most_product_rows = MR / 3;  // rows of one call: 1, 2 or 4

// Both fetch the rows `ahead`, as many as they read and line by line as they do: a burst of fetches would delay the
// reads.

// Scales of slot_keys rows of small numbers, made into floats: that of block b of row k is scale[k·row + b].
struct SmallRows {
    const float* scale = nullptr;
    Index row = 0, block_step = 0;  // block_step in bytes
};

// A row as it lies in memory, by vectors.
template <class T>
struct Reader {
    const T* data;
    Reader(const void* row, const SmallRows& /*of*/, Index /*k*/) : data(static_cast<const T*>(row)) {}

    SOFTDELTA_INLINE F at(Index i) const { return load(data + i); }
    // Where elements begin, once for each line of the cache; every vector of f32 has one.
    SOFTDELTA_INLINE void fetch(Index i) const { prefetch_line(data + i); }
};
template <class T>
struct SmallReader {
    const T* data;
    const float* scale;
    Index block_step;
    SmallReader(const void* row, const SmallRows& of, Index k)
        : data(static_cast<const T*>(row)), scale(of.scale + k * of.row), block_step(of.block_step) {}

    SOFTDELTA_INLINE F at(Index i) const {
        const Index block = i / core::small_block;
        return load_in_block(data + block * block_step, i % core::small_block) * splat(scale[block]);
    }
    SOFTDELTA_INLINE void fetch(Index i) const {
        if (i % core::small_block == 0) prefetch_line(data + i / core::small_block * block_step);
    }
};
template <>
struct Reader<std::int8_t> : SmallReader<std::int8_t> {
    using SmallReader::SmallReader;
};
template <>
struct Reader<std::uint8_t> : SmallReader<std::uint8_t> {
    using SmallReader::SmallReader;
};
template <>
struct Reader<core::f8> : SmallReader<core::f8> {
    using SmallReader::SmallReader;
};

// Products of query rows with slot_keys keys, lane by lane of D: their sums are out[(r·slot_keys + k)·W …].
// q: [rows, q_row] words; keys: rows of `vectors` vectors.
using Dots = void (*)(const float* q, Index q_row, Index vectors, const void* const* keys, const SmallRows& small,
                      const void* const* ahead, float* out);

// o[r] += Σ p[r·slot_keys + k] · values[k], rows of `length` elements, a multiple of W.
using AddValues = void (*)(const float* p, const void* const* values, const SmallRows& small, const void* const* ahead,
                           Index length, float* o);

template <class P, class T, int rows>
void dots_of(const float* q, Index q_row, Index vectors, const void* const* keys, const SmallRows& small,
             const void* const* ahead, float* out) {
    F sums[rows][slot_keys];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (Index k = 0; k < slot_keys; ++k) sums[r][k] = splat(0.0F);
    const Reader<T> key[slot_keys] = {
        {keys[0], small, 0}, {keys[1], small, 1}, {keys[2], small, 2}, {keys[3], small, 3}};
    const Reader<T> next[slot_keys] = {
        {ahead[0], small, 0}, {ahead[1], small, 0}, {ahead[2], small, 0}, {ahead[3], small, 0}};
#pragma GCC unroll 1
    for (Index i = 0; i < vectors * W; i += W) {
        F operand[slot_keys];
#pragma GCC unroll 4
        for (Index k = 0; k < slot_keys; ++k) {
            next[k].fetch(i);
            operand[k] = key[k].at(i);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const F row = load(q + r * q_row + i);
#pragma GCC unroll 4
            for (Index k = 0; k < slot_keys; ++k) sums[r][k] = P::multiply_add(row, operand[k], sums[r][k]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (Index k = 0; k < slot_keys; ++k) store(out + (r * slot_keys + k) * W, sums[r][k]);
}

// `vectors` vectors of each row, from column c on.
template <class T, int rows, int vectors>
SOFTDELTA_INLINE void add_columns(const float* p, const void* const* values, const SmallRows& small,
                                  const void* const* ahead, Index c, Index length, float* o) {
    F sums[rows][vectors];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; ++n) sums[r][n] = load(o + r * length + c + n * W);
#pragma GCC unroll 4
    for (Index k = 0; k < slot_keys; ++k) {
        const Reader<T> value(values[k], small, k), next(ahead[k], small, 0);
        F operand[vectors];
#pragma GCC unroll 4
        for (int n = 0; n < vectors; ++n) {
            if (sizeof(T) == 1 || n * W * sizeof(T) % 64 == 0) next.fetch(c + n * W);
            operand[n] = value.at(c + n * W);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const F weight = splat(p[r * slot_keys + k]);
#pragma GCC unroll 4
            for (int n = 0; n < vectors; ++n) sums[r][n] = fma(weight, operand[n], sums[r][n]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; ++n) store(o + r * length + c + n * W, sums[r][n]);
}

template <class T, int rows>
void add_values_of(const float* p, const void* const* values, const SmallRows& small, const void* const* ahead,
                   Index length, float* o) {
    Index c = 0;
    for (; c + 4 * W <= length; c += 4 * W) add_columns<T, rows, 4>(p, values, small, ahead, c, length, o);
    for (; c < length; c += W) add_columns<T, rows, 1>(p, values, small, ahead, c, length, o);
}

// Calls f with a number of rows that is known to the compiler.
template <class Call>
auto with_rows(Index rows, const Call& call) {
    if (rows == 1) return call(std::integral_constant<int, 1>{});
    if (rows == 2) return call(std::integral_constant<int, 2>{});
    return call(std::integral_constant<int, most_product_rows>{});
}

template <class P>
Dots dots(DType keys, Index rows) {
    return with_rows(rows, [&](auto n) -> Dots {
        if constexpr (P::depth == 1) {
            if (keys == DType::bf16) return dots_of<P, core::bf16, n.value>;
            if (keys == DType::f16) return dots_of<P, core::f16, n.value>;
            if (keys == DType::i8) return dots_of<P, std::int8_t, n.value>;
            if (keys == DType::u8) return dots_of<P, std::uint8_t, n.value>;
            if (keys == DType::f8) return dots_of<P, core::f8, n.value>;
        }
        return dots_of<P, float, n.value>;  // pairs are words as floats are
    });
}

inline AddValues add_values(DType values, Index rows) {
    return with_rows(rows, [&](auto n) -> AddValues {
        if (values == DType::bf16) return add_values_of<core::bf16, n.value>;
        if (values == DType::f16) return add_values_of<core::f16, n.value>;
        if (values == DType::i8) return add_values_of<std::int8_t, n.value>;
        if (values == DType::u8) return add_values_of<std::uint8_t, n.value>;
        if (values == DType::f8) return add_values_of<core::f8, n.value>;
        return add_values_of<float, n.value>;
    });
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
