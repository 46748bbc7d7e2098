// What the kernels of the gradients share: the terms of queries' rows, and ds.
//
//     P = e^(S − lse)     ds = P∘(dP − D)
#pragma once

#include "engines/cuda/attention/far_rows.h"
#include "engines/cuda/attention/warpgroup/mask.h"
#include "engines/cuda/attention/warpgroup/scores.h"

namespace softdelta::cuda::warpgroup {

// log2(e)·lse, and D. A row without a key, or beyond the last, has lse = ∞: its probabilities are 0. One whose lse is
// far from 0 has lse − top instead, where the kernel takes both apart; elsewhere top is 0.
struct RowTerm {
    float lse, D, top;
};
// What dP and D are multiplied by, beside P·2^weight_exponent. f16 holds normal numbers from 2⁻¹⁴ to 65504,
// and so ds from 2⁻¹⁸ to 4094: what is smaller makes gradients that f16 does not hold either. What is larger is
// infinite in the sums of its block, which says so and is left to the kernels of planes.
template <class T>
inline constexpr float d_p_scale = type_of<T> == DType::f16 ? 0x1p-6F : 1;
template <class T>
inline constexpr float ds_scale = weight_scale<T> / d_p_scale<T>;

// Of sums of ds q and ds k.
template <class T>
__device__ inline float gradient_scale(const AttentionCall& call) {
    return ds_scale<T> * call.scale;
}

template <class T>
__device__ inline float scaled_d_p(float d_p, float D) {
    return type_of<T> == DType::f16 ? fmaf(d_p, d_p_scale<T>, -D) : d_p - D;
}

template <class T>
__device__ inline RowTerm term_of(const AttentionCall& call, const RowTerms& rows, const AttentionSequence& s, int head,
                                  Index i, bool apart) {
    if (i >= s.q_count) return {INFINITY, 0, 0};
    const Index at = call.row_of(s, head) + i;
    const float top = rows.sums.top[at], log_sum = rows.sums.log_sum[at], D = d_p_scale<T> * rows.D[at];
    if (apart && is_far(top + log_sum)) return {log_sum * log2_e - weight_exponent<T>, D, top};
    const float lse = top + log_sum;
    return {isinf(lse) ? INFINITY : lse * log2_e - weight_exponent<T>, D, 0};
}

// The exponent of a product's weight where rows are far: their top goes first.
__device__ inline float far_exponent(float product, float factor, float bias, float top, float lse) {
    return fmaf(fmaf(product, factor, bias) - top, log2_e, -lse);
}

// ds = P∘(dP − D) in place of dP; row_terms(half, column) has D of a pair.
template <class T, int N, class D>
__device__ inline void to_ds(Acc<64, N>& ds, Acc<64, N>& p, bool hides, const D& row_terms) {
    each_pair_of(ds, p, [&](float& e, float& next, float& weight, float& next_weight, int half, int column) {
        const float2 of = row_terms(half, column);
        e = weight * scaled_d_p<T>(e, of.x);
        next = next_weight * scaled_d_p<T>(next, of.y);
        if (hides && weight == 0) e = 0;  // though dP is no number
        if (hides && next_weight == 0) next = 0;
    });
}

}  // namespace softdelta::cuda::warpgroup
