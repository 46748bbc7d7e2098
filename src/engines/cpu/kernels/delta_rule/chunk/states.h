// States between the caller's tensors, in any layout, and panels of value columns; and transposed, in panels of keys.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/operands.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Row m of the state of value head h, from value column c on.
inline Row state_row(const DeltaStates& t, Index h, Index m, Index c) {
    const Index at = (h * t.head + m * t.key + c * t.value) * static_cast<Index>(core::size_of(t.dtype));
    return {static_cast<std::byte*>(t.data) + at, t.dtype, t.value};
}

// The panels whose first columns lie in `part`; zero without a tensor. buffer: a row of value columns.
template <class P>
void load_state(const DeltaStates& t, Index h, Index K, Index V, float* buffer, const StatePanels<P>& to, Range part) {
    const Index width = part.end < V ? part.end - part.begin : V - part.begin;
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

// States are [K, V] in panels of value columns; out: [V, K] in panels of keys, 0 beyond K.
template <class P>
void transpose_state(Index K, Index V, const StatePanels<P>& state, float* out) {
    const Index keys = round_up(K, W);
    for (Index v = 0; v < V; v += W) {
        const auto panel = state.panel(v / NR * NR);
        const float* from = panel.state + v % NR;
        for (Index m = 0; m < keys; m += W) {
            const Index first = m / NR * NR;
            const Index width = keys - first < NR ? W : NR;
            float* to = out + first * V + v * width + (m - first);
            U block[W];
            for (Index r = 0; r < W; ++r) block[r] = m + r < K ? as_words(load(from + (m + r) * panel.width)) : U(0U);
            transpose(block);
            for (Index r = 0; r < W && v + r < V; ++r) store(to + r * width, as_floats(block[r]));
        }
    }
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
