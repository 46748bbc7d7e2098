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
template <class T>
__device__ inline RowTerm term_of(const AttentionCall& call, const RowTerms& rows, const AttentionSequence& s, int head,
                                  Index i, float d_p_unit) {
    if (i >= s.q_count) return {INFINITY, 0};
    const Index at = head * call.total_queries + s.batch * call.queries + s.q_begin + i;
    const float lse = rows.sums.top[at] + rows.sums.log_sum[at];
    return {isinf(lse) ? INFINITY : lse * log2_e - weight_exponent<T>, d_p_unit * rows.D[at]};
}

// What dP and D are multiplied by before they meet P, a power of 2: f16 ends at 65504 and 2⁻²⁴, and with it the
// largest ‖do‖ of the call is about 2⁻⁶. What is still beyond 65504 is infinite in the sums of its block, which says so
// and is left to the kernels of planes.
template <class T>
__device__ inline float unit_of_d_p(const RowTerms& rows) {
    if constexpr (type_of<T> != DType::f16) return 1;
    const int exponent = static_cast<int>(*rows.largest >> 23) - 127;
    return ptx::exp2(static_cast<float>(-7 - min(max(exponent, -100), 100)));
}
template <class T>
__device__ inline float d_p_in_units(float d_p, float unit, float D) {
    return type_of<T> == DType::f16 ? fmaf(d_p, unit, -D) : d_p - D;
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
