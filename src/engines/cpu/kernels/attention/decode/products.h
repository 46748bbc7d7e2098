// Products of few query rows with keys and values as they lie in memory.
#pragma once

#include "engines/cpu/kernels/attention/decode/scales.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr int most_product_rows = MR / 3;  // rows of one call: 1, 2 or 4

// Both products fetch the rows `ahead`, as many as they read and line by line as they do: a burst of fetches would
// delay the reads.

// A row as it lies in memory, by vectors.
template <class T>
struct Reader {
    static constexpr bool is_quantised = false;
    const T* data;
    Reader(const void* row, const QuantisedRows& /*of*/) : data(static_cast<const T*>(row)) {}

    SOFTDELTA_INLINE F at(Index i) const { return load(data + i); }
    // Where elements begin, once for each line of the cache; every vector of f32 has one.
    template <bool to_second>
    SOFTDELTA_INLINE void fetch(Index i) const {
        if constexpr (to_second)
            prefetch_line_to_second(data + i);
        else
            prefetch_line(data + i);
    }
};
// The same without scales.
template <class T>
struct QuantisedReader {
    static constexpr bool is_quantised = true;
    const T* data;
    Index block_step;
    QuantisedReader(const void* row, const QuantisedRows& of)
        : data(static_cast<const T*>(row)), block_step(of.block_step) {}

    SOFTDELTA_INLINE F at(Index i) const {
        return load_in_block(data + i / core::quantised_block * block_step, i % core::quantised_block);
    }
    template <bool to_second>
    SOFTDELTA_INLINE void fetch(Index i) const {
        if (i % core::quantised_block == 0) prefetch_line(data + i / core::quantised_block * block_step);
    }
};
template <>
struct Reader<std::int8_t> : QuantisedReader<std::int8_t> {
    using QuantisedReader::QuantisedReader;
};
template <>
struct Reader<std::uint8_t> : QuantisedReader<std::uint8_t> {
    using QuantisedReader::QuantisedReader;
};
template <>
struct Reader<core::f8> : QuantisedReader<core::f8> {
    using QuantisedReader::QuantisedReader;
};

// Products of query rows with slot_keys keys: out[r·slot_keys + k]. Where they do not fill a vector, rows·slot_keys <
// W, the lanes of each are still to be summed: out[(r·slot_keys + k)·W …]. q: [rows, q_row] words; keys: rows of
// `vectors` vectors.
using Dots = void (*)(const float* q, Index q_row, Index vectors, const void* const* keys,
                      const QuantisedRows& quantised, const void* const* ahead, float* out);

// Factors of slot_keys values: that of value k in row r is p[r·row + k]; of quantised numbers it has the scale in it,
// and the factor of block b is p[r·row + b·slot_keys + k].
struct Factors {
    const float* p;
    Index row;
};

// o[r] += Σ factor · values[k], rows of `length` elements, a multiple of W.
using AddValues = void (*)(Factors factors, const void* const* values, const QuantisedRows& quantised,
                           const void* const* ahead, Index length, float* o);

template <int rows>
SOFTDELTA_INLINE void store_sums(const F (&sums)[rows][slot_keys], float* out) {
    constexpr Index count = rows * slot_keys;
    if constexpr (count < W) {
#pragma GCC unroll 8
        for (Index i = 0; i < count; ++i) store(out + i * W, sums[i / slot_keys][i % slot_keys]);
    } else {
#pragma GCC unroll 4
        for (Index i = 0; i < count; i += W) {
            F part[W];
#pragma GCC unroll 16
            for (Index l = 0; l < W; ++l) part[l] = sums[(i + l) / slot_keys][(i + l) % slot_keys];
            store(out + i, row_sums(part));
        }
    }
}

template <class P, class T, int rows, bool to_second = false>
void dots_of(const float* q, Index q_row, Index vectors, const void* const* keys, const QuantisedRows& quantised,
             const void* const* ahead, float* out) {
    F sums[rows][slot_keys];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (Index k = 0; k < slot_keys; ++k) sums[r][k] = splat(0.0F);
    const Reader<T> key[slot_keys] = {
        {keys[0], quantised}, {keys[1], quantised}, {keys[2], quantised}, {keys[3], quantised}};
    const Reader<T> next[slot_keys] = {
        {ahead[0], quantised}, {ahead[1], quantised}, {ahead[2], quantised}, {ahead[3], quantised}};
#pragma GCC unroll 1
    for (Index i = 0; i < vectors * W; i += W) {
        F operand[slot_keys];
#pragma GCC unroll 4
        for (Index k = 0; k < slot_keys; ++k) {
            next[k].template fetch<to_second>(i);
            operand[k] = key[k].at(i);
            if constexpr (Reader<T>::is_quantised)
                operand[k] = operand[k] * splat(quantised.scale[i / core::quantised_block * slot_keys + k]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const F row = load(q + r * q_row + i);
#pragma GCC unroll 4
            for (Index k = 0; k < slot_keys; ++k) sums[r][k] = P::multiply_add(row, operand[k], sums[r][k]);
        }
    }
    store_sums<rows>(sums, out);
}
// The same of one row and quantised keys: products of a block are summed before its scale multiplies them.
template <class T>
void dots_of_blocks(const float* q, Index /*q_row*/, Index vectors, const void* const* keys,
                    const QuantisedRows& quantised, const void* const* ahead, float* out) {
    F sums[1][slot_keys];
#pragma GCC unroll 4
    for (Index k = 0; k < slot_keys; ++k) sums[0][k] = splat(0.0F);
#pragma GCC unroll 1
    for (Index i = 0, block = 0; i < vectors * W; i += core::quantised_block, ++block) {
        const Index n = min(core::quantised_block, vectors * W - i);
#pragma GCC unroll 4
        for (Index k = 0; k < slot_keys; ++k) {
            const Reader<T> key(keys[k], quantised), next(ahead[k], quantised);
            next.template fetch<false>(i);
            F sum = load(q + i) * key.at(i);
            if (n == core::quantised_block) {
#pragma GCC unroll 8
                for (Index j = W; j < core::quantised_block; j += W) sum = fma(load(q + i + j), key.at(i + j), sum);
            } else {
                for (Index j = W; j < n; j += W) sum = fma(load(q + i + j), key.at(i + j), sum);
            }
            sums[0][k] = fma(sum, splat(quantised.scale[block * slot_keys + k]), sums[0][k]);
        }
    }
    store_sums<1>(sums, out);
}

// `vectors` vectors of each row, from column c on.
template <class T, int rows, int vectors, bool to_second>
SOFTDELTA_INLINE void add_columns(Factors factors, const void* const* values, const QuantisedRows& quantised,
                                  const void* const* ahead, Index c, Index length, float* o) {
    static_assert(core::quantised_block % (vectors * W) == 0 || vectors * W % core::quantised_block == 0);
    F sums[rows][vectors];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; ++n) sums[r][n] = load(o + r * length + c + n * W);
#pragma GCC unroll 4
    for (Index k = 0; k < slot_keys; ++k) {
        const Reader<T> value(values[k], quantised), next(ahead[k], quantised);
        F operand[vectors];
#pragma GCC unroll 4
        for (int n = 0; n < vectors; ++n) {
            if (sizeof(T) == 1 || n * W * sizeof(T) % 64 == 0) next.template fetch<to_second>(c + n * W);
            operand[n] = value.at(c + n * W);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const float* factor = factors.p + r * factors.row + k;
            if constexpr (Reader<T>::is_quantised) factor += c / core::quantised_block * slot_keys;
#pragma GCC unroll 4
            for (int n = 0; n < vectors; ++n) {
                const Index block = Reader<T>::is_quantised ? n * W / core::quantised_block : 0;
                sums[r][n] = fma(splat(factor[block * slot_keys]), operand[n], sums[r][n]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; ++n) store(o + r * length + c + n * W, sums[r][n]);
}

template <class T, int rows, bool to_second = false>
void add_values_of(Factors factors, const void* const* values, const QuantisedRows& quantised, const void* const* ahead,
                   Index length, float* o) {
    Index c = 0;
    for (; c + 4 * W <= length; c += 4 * W)
        add_columns<T, rows, 4, to_second>(factors, values, quantised, ahead, c, length, o);
    for (; c < length; c += W) add_columns<T, rows, 1, to_second>(factors, values, quantised, ahead, c, length, o);
}

// Calls f with a number of rows that is known to the compiler.
template <class Call>
auto with_rows(Index rows, const Call& call) {
    if (rows == 1) return call(std::integral_constant<int, 1>{});
    if (rows == 2) return call(std::integral_constant<int, 2>{});
    return call(std::integral_constant<int, most_product_rows>{});
}

template <class T, int rows>
Dots dots_of_quantised() {
    if constexpr (rows == 1)
        return dots_of_blocks<T>;
    else
        return dots_of<FloatProduct, T, rows>;
}

// to_second: AttentionHead::fetches_to_second_cache, of f32 and bf16.
template <class P>
Dots dots(DType keys, Index rows, bool to_second) {
    return with_rows(rows, [&](auto n) -> Dots {
        if constexpr (P::depth == 1) {
            if (keys == DType::bf16 && to_second) return dots_of<P, core::bf16, n.value, true>;
            if (keys == DType::bf16) return dots_of<P, core::bf16, n.value>;
            if (keys == DType::f16) return dots_of<P, core::f16, n.value>;
            if (keys == DType::i8) return dots_of_quantised<std::int8_t, n.value>();
            if (keys == DType::u8) return dots_of_quantised<std::uint8_t, n.value>();
            if (keys == DType::f8) return dots_of_quantised<core::f8, n.value>();
        }
        if (to_second) return dots_of<P, float, n.value, true>;
        return dots_of<P, float, n.value>;  // pairs are words as floats are
    });
}

inline AddValues add_values(DType values, Index rows, bool to_second) {
    return with_rows(rows, [&](auto n) -> AddValues {
        if (values == DType::bf16 && to_second) return add_values_of<core::bf16, n.value, true>;
        if (values == DType::f32 && to_second) return add_values_of<float, n.value, true>;
        if (values == DType::bf16) return add_values_of<core::bf16, n.value>;
        if (values == DType::f16) return add_values_of<core::f16, n.value>;
        if (values == DType::i8) return add_values_of<std::int8_t, n.value>;
        if (values == DType::u8) return add_values_of<std::uint8_t, n.value>;
        if (values == DType::f8) return add_values_of<core::f8, n.value>;
        return add_values_of<float, n.value>;
    });
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
