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
__device__ inline RowTerm term_of(const AttentionCall& call, const RowTerms& rows, const AttentionSequence& s, int head,
                                  Index i) {
    if (i >= s.q_count) return {INFINITY, 0};
    const Index at = head * call.total_queries + s.batch * call.queries + s.q_begin + i;
    const float lse = rows.sums.top[at] + rows.sums.log_sum[at];
    return {isinf(lse) ? INFINITY : lse * log2_e, rows.D[at]};
}

template <int n>
__device__ inline bool all_finite(const float (&x)[n][4], int half) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < n; ++i) all = all && isfinite(x[i][2 * half]) && isfinite(x[i][2 * half + 1]);
    return all;
}

}  // namespace softdelta::cuda::warpgroup
