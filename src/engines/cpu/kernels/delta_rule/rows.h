// Rows of the caller's tensors: where the row of a token lies; it is loaded, stored and prefetched.
#pragma once

#include "engines/cpu/kernels/delta_rule/head.h"
#include "engines/cpu/kernels/gemm/prefetch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Tokens [begin, begin + n) of a head, a value head unless said otherwise.
struct Tokens {
    Index head, begin, n;
};

// Head h, token i of a tensor; elements `step` apart.
inline Row row_at(const DeltaRows& t, Index h, Index i, Index step) {
    if (t.steps > 1) i /= t.steps;
    const Index at = (h * t.head + i * t.row) * static_cast<Index>(core::size_of(t.dtype));
    return {static_cast<std::byte*>(t.data) + at, t.dtype, step};
}

// The elements from a column on.
inline Row row_from(const DeltaRows& t, Index h, Index i, Index column) {
    const Row row = row_at(t, h, i, t.column);
    const Index bytes = column * t.column * static_cast<Index>(core::size_of(t.dtype));
    return {static_cast<const std::byte*>(row.data) + bytes, row.dtype, row.step};
}

// A range of columns as a tensor of its own.
inline void move_columns(Index first, DeltaRows& t) {
    if (t.data != nullptr)
        t.data = static_cast<std::byte*>(t.data) + first * t.column * static_cast<Index>(core::size_of(t.dtype));
}

// n columns of the i-th of these tokens, as f32. Whole vectors of `out` are written.
inline void load_token(const DeltaRows& t, const Tokens& at, Index i, Index n, float* out) {
    if (!t.has(at.begin + i)) {
        for (Index m = 0; m < n; m += W) store(out + m, splat(0.0F));
        return;
    }
    load_row(row_at(t, at.head, at.begin + i, t.column), n, out);
}
inline void store_token(const float* x, const DeltaRows& t, const Tokens& at, Index i, Index n) {
    if (!t.has(at.begin + i)) return;
    const Row to = row_at(t, at.head, at.begin + i, t.column);
    store_row(x, n, const_cast<void*>(to.data), to.dtype, to.step);
}

// One number of each of these tokens: a gate that the channels share, β.
inline void load_numbers(const DeltaRows& t, const Tokens& at, float* out) {
    if (t.steps > 1) {
        alignas(64) float one[W];
        for (Index i = 0; i < round_up(at.n, W); i += W) store(out + i, splat(0.0F));
        for (Index i = 0; i < at.n; ++i)
            if (t.has(at.begin + i)) load_row(row_at(t, at.head, at.begin + i, 1), 1, one), out[i] = one[0];
        return;
    }
    load_row(row_at(t, at.head, at.begin, t.row), at.n, out);
}
inline void store_numbers(const float* x, const DeltaRows& t, const Tokens& at) {
    for (Index i = 0; t.steps > 1 && i < at.n; ++i) {
        const Row to = row_at(t, at.head, at.begin + i, 1);
        if (t.has(at.begin + i)) store_row(x + i, 1, const_cast<void*>(to.data), to.dtype, to.step);
    }
    if (t.steps > 1) return;
    const Row to = row_at(t, at.head, at.begin, t.row);
    store_row(x, at.n, const_cast<void*>(to.data), to.dtype, to.step);
}

// n parameters of head h, which are the same for all its tokens; zeros when not given.
inline void load_parameters(const DeltaRows& t, Index h, Index n, float* out) {
    for (Index m = 0; m < round_up(n, W); ++m) out[m] = 0;
    if (t.data != nullptr) load_row(row_at(t, h, 0, t.column), n, out);
}

// The only parameter of head h; `absent` when not given.
inline float parameter_of(const DeltaRows& t, Index h, float absent) {
    alignas(64) float x[W] = {absent};
    if (t.data != nullptr) load_row(row_at(t, h, 0, 1), 1, x);
    return x[0];
}

// Rows of a head lie far apart, each in a page of its own: while one is read or written, later ones are prefetched.
inline constexpr Index prefetch_distance = 6;

inline void prefetch_token(const DeltaRows& t, const Tokens& at, Index i, Index columns) {
    if (t.data != nullptr && t.column == 1 && i < at.n) prefetch_row(row_at(t, at.head, at.begin + i, 1), columns);
}

// Before a loop over tokens the first of them; in the loop, at token i, the one to come.
inline void prefetch_first(const DeltaRows& t, const Tokens& at, Index columns) {
    for (Index i = 0; i < prefetch_distance; ++i) prefetch_token(t, at, i, columns);
}
inline void prefetch_ahead(const DeltaRows& t, const Tokens& at, Index i, Index columns) {
    prefetch_token(t, at, i + prefetch_distance, columns);
}

// Rows that the next piece of work reads, fetched while products run.
class Prefetch : public PrefetchList {
  public:
    using PrefetchList::add;

    // Rows of `columns` neighbours of a tensor; rows whose elements lie apart are left alone.
    void add(const DeltaRows& t, const Tokens& at, Index columns) {
        if (t.data == nullptr || t.column != 1 || at.n == 0) return;
        const Index size = static_cast<Index>(core::size_of(t.dtype));
        add(row_at(t, at.head, at.begin, 1).data, t.row * size, columns * size, (at.n + t.steps - 1) / t.steps);
    }

    // Memory in one piece.
    void add(const void* data, Index bytes) { add(data, 0, bytes, 1); }
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
