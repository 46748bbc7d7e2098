// States between the caller's tensors, in any layout, and panels.
#pragma once

#include "kernels/delta_rule_chunk.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Row m [V] of the state of value head h.
inline std::byte* state_row(const DeltaStates& t, Index h, Index m) {
    return static_cast<std::byte*>(t.data) + (h * t.head + m * t.key) * static_cast<Index>(core::size_of(t.dtype));
}

// Zero without a tensor. stage: a row of value columns.
template <class P>
void load_state(const DeltaStates& t, Index h, Index K, Index V, float* stage, const StatePanels<P>& to) {
    for (Index c = 0; c < to.columns(); c += W) store(stage + c, splat(0.0F));
    for (Index m = 0; m < K; ++m) {
        if (t.data != nullptr) load_row({state_row(t, h, m), t.dtype, t.value}, V, stage);
        for (Index c = 0; c < to.columns(); c += panel_width) {
            const auto panel = to.panel(c);
            for (Index i = 0; i < panel.width; i += W) store(panel.state + m * panel.width + i, load(stage + c + i));
        }
    }
}

template <class P>
void store_state(const DeltaStates& t, Index h, Index K, Index V, float* stage, const StatePanels<P>& from) {
    for (Index m = 0; m < K; ++m) {
        for (Index c = 0; c < from.columns(); c += panel_width) {
            const auto panel = from.panel(c);
            for (Index i = 0; i < panel.width; i += W) store(stage + c + i, load(panel.state + m * panel.width + i));
        }
        store_row(stage, V, state_row(t, h, m), t.dtype, t.value);
    }
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
