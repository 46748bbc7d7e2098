// The scratch memory of a tile step of the backward pass.
#pragma once

#include "engines/cpu/kernels/attention/blocks.h"
#include "engines/cpu/kernels/attention/head.h"
#include "engines/cpu/kernels/gemm/pack.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Elements between rows of ds as A.
template <class P>
constexpr Index ds_row = P::depth == 1 ? backward_blocks::score_row : backward_blocks::keys / 2 + W;

template <class P>
struct BackwardMemory {
    static constexpr Index R = backward_blocks::rows, L = backward_blocks::keys, score_row = backward_blocks::score_row;
    Element<P>*q, *d_o;            // [R, a_row_length] as A
    Element<P>*keys_t, *values_t;  // [D, L], [Dv, L] kᵀ and vᵀ packed as B
    Element<P>* keys;              // [L, D] packed as B
    Element<P>*q_b, *d_o_b;        // [R, D], [R, Dv] packed as B
    float *p, *ds;                 // [R, score_row] scores, then p; dp, then ds
    Element<P>*p_t, *ds_t;  // p and ds as A of pᵀ do and dsᵀ q; pairs of rows [R / 2, score_row], of floats p and ds
    Element<P>* ds_a;       // [R, ds_row] ds as A of ds k; of floats ds itself
    float* addends;         // [P::depth, L]
    float* bias_rows;       // [P::depth, L] ds without scale
    float* zeros;           // [longest row]
    Element<P>* staging;    // [W + 2, longest row]

    static BackwardMemory take(const AttentionHead& head, Scratch& memory) {
        const Index size = head.size, value_size = head.value_size;
        const Index longest = round_up(max(size, value_size), 2 * W);
        BackwardMemory m;
        m.q = memory.take<Element<P>>(R * a_row_length<P>(size));
        m.d_o = memory.take<Element<P>>(R * a_row_length<P>(value_size));
        m.keys_t = memory.take<Element<P>>(L * a_row_length<P>(size));
        m.values_t = memory.take<Element<P>>(L * a_row_length<P>(value_size));
        m.keys = memory.take<Element<P>>(L / P::depth * round_up(size, W));
        m.q_b = memory.take<Element<P>>(R / P::depth * round_up(size, W));
        m.d_o_b = memory.take<Element<P>>(R / P::depth * round_up(value_size, W));
        m.p = memory.take<float>(R * score_row);
        m.ds = memory.take<float>(R * score_row);
        if constexpr (P::depth == 1) {
            m.p_t = m.p;
            m.ds_t = m.ds_a = m.ds;
        } else {
            m.p_t = memory.take<Element<P>>(R / 2 * score_row);
            m.ds_t = memory.take<Element<P>>(R / 2 * score_row);
            m.ds_a = memory.take<Element<P>>(R * ds_row<P>);
        }
        m.addends = memory.take<float>(P::depth * L);
        m.bias_rows = memory.take<float>(P::depth * L);
        m.zeros = memory.take<float>(longest);
        m.staging = memory.take<Element<P>>((W + 2) * longest);
        return m;
    }
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
