// States between the caller's tensors, in any layout, and panels.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/chunk.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Row m of the state of value head h, from value column c on.
inline Row state_row(const DeltaStates& t, Index h, Index m, Index c) {
    const Index at = (h * t.head + m * t.key + c * t.value) * static_cast<Index>(core::size_of(t.dtype));
    return {static_cast<std::byte*>(t.data) + at, t.dtype, t.value};
}

// The panels whose first columns lie in `part`; zero without a tensor. stage: a row of value columns.
template <class P>
void load_state(const DeltaStates& t, Index h, Index K, Index V, float* stage, const StatePanels<P>& to, Range part) {
    const Index width = part.end < V ? part.end - part.begin : V - part.begin;
    for (Index c = 0; c < part.end - part.begin; c += W) store(stage + c, splat(0.0F));
    for (Index m = 0; m < K; ++m) {
        if (t.data != nullptr) load_row(state_row(t, h, m, part.begin), width, stage);
        for (Index c = part.begin; c < part.end; c += NR) {
            const auto panel = to.panel(c);
            for (Index i = 0; i < panel.width; i += W)
                store(panel.state + m * panel.width + i, load(stage + (c - part.begin) + i));
        }
    }
}

template <class P>
void store_state(const DeltaStates& t, Index h, Index K, Index V, float* stage, const StatePanels<P>& from,
                 Range part) {
    const Index width = part.end < V ? part.end - part.begin : V - part.begin;
    for (Index m = 0; m < K; ++m) {
        for (Index c = part.begin; c < part.end; c += NR) {
            const auto panel = from.panel(c);
            for (Index i = 0; i < panel.width; i += W)
                store(stage + (c - part.begin) + i, load(panel.state + m * panel.width + i));
        }
        const Row to = state_row(t, h, m, part.begin);
        store_row(stage, width, const_cast<void*>(to.data), to.dtype, to.step);
    }
}

// All of it.
template <class P>
void load_state(const DeltaStates& t, Index h, Index K, Index V, float* stage, const StatePanels<P>& to) {
    load_state(t, h, K, V, stage, to, {0, to.columns()});
}
template <class P>
void store_state(const DeltaStates& t, Index h, Index K, Index V, float* stage, const StatePanels<P>& from) {
    store_state(t, h, K, V, stage, from, {0, from.columns()});
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
