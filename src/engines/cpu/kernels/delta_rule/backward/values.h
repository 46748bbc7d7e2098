// Along the value columns of a chunk: dO comes in as an operand, dv goes out.
#pragma once

#include "engines/cpu/kernels/delta_rule/backward/operands.h"
#include "engines/cpu/kernels/delta_rule/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// dO as panels and as A; zeros when not given.
template <class P>
void load_output_gradients(const DeltaRows& d_o, const Tokens& at, Index V, const ChunkGradients<P>& d) {
    for (Index c = 0; c < d.columns; c += W) store(d.v + c, splat(0.0F));
    prefetch_first(d_o, at, V);
    for (Index i = 0; i < at.n; ++i) {
        prefetch_ahead(d_o, at, i, V);
        if (d_o.data != nullptr) load_token(d_o, at, i, V, d.v);
        for (Index c = 0; c < d.columns; c += NR) {
            const auto panel = d.panel(c, at.n);
            for (Index m = 0; m < panel.width; m += W) {
                const F x = load(d.v + c + m);
                store(panel.d_o + i * panel.width + m, x);
                store_a(d.d_o + i * d.value_row + (c + m) / P::depth, x, P{});
            }
        }
    }
}

// dR as A, dv = β∘dR, and the part of dβ in β∘v.
template <class P>
void store_value_gradients(const DeltaRows& v, const DeltaRows& dv, const Tokens& at, Index V, const float* beta,
                           const ChunkGradients<P>& d) {
    prefetch_first(v, at, V);
    prefetch_first(dv, at, V);
    for (Index i = 0; i < at.n; ++i) {
        prefetch_ahead(v, at, i, V);
        prefetch_ahead(dv, at, i, V);
        load_token(v, at, i, V, d.v);
        F along = splat(0.0F);
        for (Index c = 0; c < d.columns; c += NR) {
            const auto panel = d.panel(c, at.n);
            for (Index m = 0; m < panel.width; m += W) {
                const F x = load(panel.dR + i * panel.width + m);
                store_a(d.dR + i * d.value_row + (c + m) / P::depth, x, P{});
                along = fma(x, load(d.v + c + m), along);
                store(d.v + c + m, splat(beta[i]) * x);
            }
        }
        d.dbeta[i] = sum(along);
        if (dv.data != nullptr) store_token(d.v, dv, at, i, V);
    }
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
