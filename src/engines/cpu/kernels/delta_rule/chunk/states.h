// States between the caller's tensors, in any layout, and panels of value columns; and transposed, in panels of keys.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/operands.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Row m of the state of value head h, from value column c on.
inline Row state_row(const DeltaStates& t, Index h, Index m, Index c) {
    const Index at = (h * t.head + m * t.key + c * t.value) * static_cast<Index>(core::size_of(t.dtype));
    return {static_cast<std::byte*>(t.data) + at, t.dtype, t.value};
}

// A range of value columns as states of their own.
inline void move_columns(Index first, DeltaStates& t) {
    if (t.data != nullptr)
        t.data = static_cast<std::byte*>(t.data) + first * t.value * static_cast<Index>(core::size_of(t.dtype));
}

// Whether a state's columns are rows in memory, as of a state kept [V, K]. Blocks of W rows then go through registers:
// one element after the other, each of another row, would read or write every cache line W times.
inline bool columns_are_rows(const DeltaStates& t) {
    return t.data != nullptr && t.key == 1 && t.value != 1;
}

// Rows m .. m + W of column c of value head h, as they lie.
inline Row state_column(const DeltaStates& t, Index h, Index m, Index c) {
    return {state_row(t, h, m, c).data, t.dtype, 1};
}

// A block of such columns: rows m .. m + W of columns c .. c + W. Those of the next columns are fetched meanwhile.
class ColumnBlock {
  public:
    ColumnBlock(const DeltaStates& t, Index h, Index K, Index V, Index m, Index c)
        : first_(state_column(t, h, m, c)),
          column_(t.value * static_cast<Index>(core::size_of(t.dtype))),
          rows_(min(W, K - m)),
          columns_(min(W, V - c)) {
        for (Index r = W; r < W + min(W, V - c - W); ++r) prefetch_line(at(r));
    }

    Index rows() const { return rows_; }

    // Element [i][r] is row m + r of column c + i; zero beyond K and V.
    void load_to(U (&block)[W]) const {
        for (Index r = 0; r < W; ++r) {
            block[r] = U(0U);
            if (r < columns_) block[r] = as_words(column(r));
        }
    }
    void store_from(const U (&block)[W]) const {
        alignas(64) float x[W];
        for (Index r = 0; r < columns_; ++r) {
            if (is_whole()) {
                store(static_cast<float*>(at(r)), as_floats(block[r]));
                continue;
            }
            store(x, as_floats(block[r]));
            store_row(x, rows_, at(r), first_.dtype, 1);
        }
    }

  private:
    bool is_whole() const { return first_.dtype == core::DType::f32 && rows_ == W; }
    void* at(Index r) const { return static_cast<std::byte*>(const_cast<void*>(first_.data)) + r * column_; }
    F column(Index r) const {
        if (is_whole()) return load(static_cast<const float*>(at(r)));
        alignas(64) float x[W];
        load_row({at(r), first_.dtype, 1}, rows_, x);
        return load(x);
    }

    Row first_;
    Index column_;  // bytes from one column to the next
    Index rows_, columns_;
};

// Columns i .. i + W of a panel, which are columns c .. c + W of the state.
template <class Panel>
void load_columns(const DeltaStates& t, Index h, Index K, Index V, Index c, const Panel& panel, Index i) {
    for (Index m = 0; m < K; m += W) {
        const ColumnBlock lying(t, h, K, V, m, c);
        U block[W];
        lying.load_to(block);
        transpose(block);
        for (Index r = 0; r < lying.rows(); ++r) store(panel.state + (m + r) * panel.width + i, as_floats(block[r]));
    }
}
template <class Panel>
void store_columns(const DeltaStates& t, Index h, Index K, Index V, Index c, const Panel& panel, Index i) {
    for (Index m = 0; m < K; m += W) {
        const ColumnBlock lying(t, h, K, V, m, c);
        U block[W];
        for (Index r = 0; r < W; ++r)
            block[r] = r < lying.rows() ? as_words(load(panel.state + (m + r) * panel.width + i)) : U(0U);
        transpose(block);
        lying.store_from(block);
    }
}

// One of the states at intervals; its data is null where it is not wanted.
inline DeltaStates states_at(DeltaStates t, Index interval, const StateEntries& entries = {}) {
    if (entries.list != nullptr) {
        const Index place = interval * entries.stride;
        interval = entries.wide ? static_cast<Index>(static_cast<const std::int64_t*>(entries.list)[place])
                                : static_cast<const std::int32_t*>(entries.list)[place];
        if (interval < 0) return {};
    }
    t.data = static_cast<std::byte*>(t.data) + interval * t.interval * static_cast<Index>(core::size_of(t.dtype));
    return t;
}

// The panels whose first columns lie in `part`; zero without a tensor. buffer: a row of value columns.
template <class P>
void load_state(const DeltaStates& t, Index h, Index K, Index V, float* buffer, const StatePanels<P>& to, Range part) {
    const Index width = part.end < V ? part.end - part.begin : V - part.begin;
    if (columns_are_rows(t)) {
        for (Index c = part.begin; c < part.end; c += NR) {
            const auto panel = to.panel(c);
            for (Index i = 0; i < panel.width; i += W) load_columns(t, h, K, V, c + i, panel, i);
        }
        return;
    }
    for (Index c = 0; c < part.end - part.begin; c += W) store(buffer + c, splat(0.0F));
    for (Index m = 0; m < K; ++m) {
        if (t.data != nullptr) load_row(state_row(t, h, m, part.begin), width, buffer);
        for (Index c = part.begin; c < part.end; c += NR) {
            const auto panel = to.panel(c);
            for (Index i = 0; i < panel.width; i += W)
                store(panel.state + m * panel.width + i, load(buffer + (c - part.begin) + i));
        }
    }
}

template <class P>
void store_state(const DeltaStates& t, Index h, Index K, Index V, float* buffer, const StatePanels<P>& from,
                 Range part) {
    const Index width = part.end < V ? part.end - part.begin : V - part.begin;
    if (columns_are_rows(t)) {
        for (Index c = part.begin; c < part.end; c += NR) {
            const auto panel = from.panel(c);
            for (Index i = 0; i < panel.width; i += W) store_columns(t, h, K, V, c + i, panel, i);
        }
        return;
    }
    for (Index m = 0; m < K; ++m) {
        for (Index c = part.begin; c < part.end; c += NR) {
            const auto panel = from.panel(c);
            for (Index i = 0; i < panel.width; i += W)
                store(buffer + (c - part.begin) + i, load(panel.state + m * panel.width + i));
        }
        const Row to = state_row(t, h, m, part.begin);
        store_row(buffer, width, const_cast<void*>(to.data), to.dtype, to.step);
    }
}

// All of it.
template <class P>
void load_state(const DeltaStates& t, Index h, Index K, Index V, float* buffer, const StatePanels<P>& to) {
    load_state(t, h, K, V, buffer, to, {0, to.columns()});
}
template <class P>
void store_state(const DeltaStates& t, Index h, Index K, Index V, float* buffer, const StatePanels<P>& from) {
    store_state(t, h, K, V, buffer, from, {0, from.columns()});
}

// Floats of a transposed state: [V, K] in panels of keys.
template <class P>
constexpr Index transposed_state(const ChunkSizes<P>& sizes) {
    return sizes.values * round_up(sizes.keys, W);
}

// States are [K, V] in panels of value columns; out: [V, K] in panels of keys, 0 beyond K. Here `count` columns, which
// become rows of `out` from the first on.
template <class P>
void transpose_columns(Index K, Index count, const StatePanels<P>& state, Index V, Index first_row, float* out) {
    const Index keys = round_up(K, W);
    for (Index v = 0; v < count; v += W) {
        const auto panel = state.panel(v / NR * NR);
        const float* from = panel.state + v % NR;
        for (Index m = 0; m < keys; m += W) {
            const Index first = m / NR * NR;
            const Index width = keys - first < NR ? W : NR;
            float* to = out + first * V + (first_row + v) * width + (m - first);
            U block[W];
            for (Index r = 0; r < W; ++r) block[r] = m + r < K ? as_words(load(from + (m + r) * panel.width)) : U(0U);
            transpose(block);
            for (Index r = 0; r < W && v + r < count; ++r) store(to + r * width, as_floats(block[r]));
        }
    }
}
template <class P>
void transpose_state(Index K, Index V, const StatePanels<P>& state, float* out) {
    transpose_columns(K, V, state, V, 0, out);
}

// And back.
template <class P>
void restore_state(Index K, Index V, const float* transposed, const StatePanels<P>& state) {
    const Index keys = round_up(K, W);
    for (Index v = 0; v < round_up(V, W); v += W) {
        const auto panel = state.panel(v / NR * NR);
        for (Index m = 0; m < keys; m += W) {
            const Index first = m / NR * NR;
            const Index width = keys - first < NR ? W : NR;
            const float* from = transposed + first * V + v * width + (m - first);
            U block[W];
            for (Index r = 0; r < W; ++r) block[r] = v + r < V ? as_words(load(from + r * width)) : U(0U);
            transpose(block);
            for (Index r = 0; r < W && m + r < K; ++r)
                store(panel.state + (m + r) * panel.width + v % NR, as_floats(block[r]));
        }
    }
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
