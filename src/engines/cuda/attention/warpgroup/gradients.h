// What the kernels of the gradients share: the terms of queries' rows, and where blocks stop at once.
//
//     P = e^(S − lse)     ds = P∘(dP − D)
#pragma once

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/warpgroup/pipeline.h"
#include "engines/cuda/attention/warpgroup/query_scores.h"

namespace softdelta::cuda::warpgroup {

// log2(e)·lse, and D. A row without a key, or beyond the last, has lse = ∞: its probabilities are 0.
struct RowTerm {
    float lse, D;
};
// What dP and D are multiplied by before they meet P·2^weight_exponent. f16 holds normal numbers from 2⁻¹⁴ to 65504,
// and so ds from 2⁻¹⁸ to 4094: what is smaller makes gradients that f16 does not hold either. What is larger is
// infinite in the sums of its block, which says so and is left to the kernels of planes.
template <class T>
inline constexpr float d_p_unit = type_of<T> == DType::f16 ? 0x1p-6F : 1;
template <class T>
inline constexpr float ds_unit = weight_unit<T> / d_p_unit<T>;

template <class T>
__device__ inline float d_p_in_units(float d_p, float D) {
    return type_of<T> == DType::f16 ? fmaf(d_p, d_p_unit<T>, -D) : d_p - D;
}

template <class T>
__device__ inline RowTerm term_of(const AttentionCall& call, const RowTerms& rows, const AttentionSequence& s, int head,
                                  Index i) {
    if (i >= s.q_count) return {INFINITY, 0};
    const Index at = call.row_of(s, head) + i;
    const float lse = rows.sums.top[at] + rows.sums.log_sum[at];
    return {isinf(lse) ? INFINITY : lse * log2_e - weight_exponent<T>, d_p_unit<T> * rows.D[at]};
}

// P·2^weight_exponent of a product q·k, which becomes what ds is multiplied by: P∘softcap'. x of −∞ is hidden.
template <class T>
__device__ inline float take_capped(float& x, const AttentionCall& call, float lse) {
    const float u = x * call.scale / call.softcap;
    const float e = ptx::exp2(-2 * log2_e * fabsf(u)), of = __fdividef(1.0F, 1 + e);
    const float score = copysignf(call.softcap * (1 - e) * of, u);
    const float p = x == -INFINITY ? 0.0F : ptx::exp2(fmaf(score, log2_e, -lse));
    x = p * (4 * e * of * of);
    return p;
}
// A product that is −∞ is not hidden.
template <int n>
__device__ inline void keep_from_hiding(float (&x)[n][4]) {
#pragma unroll
    for (int i = 0; i < n; ++i)
#pragma unroll
        for (int m = 0; m < 4; ++m) x[i][m] = x[i][m] == -INFINITY ? -FLT_MAX : x[i][m];
}

template <int n>
__device__ inline bool all_finite(const float (&x)[n][4], int half) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < n; ++i) all = all && isfinite(x[i][2 * half]) && isfinite(x[i][2 * half + 1]);
    return all;
}

}  // namespace softdelta::cuda::warpgroup
