// The end of a query's row in the forward pass: the sink joins the sum, and lse and sums are stored.
#pragma once

#include "engines/cuda/attention/far_rows.h"

namespace softdelta::cuda {

struct RowEnd {
    float top, log_sum;
    float scale;  // of the weighted sum; 0: the row has no key
    bool empty;
};

// A row whose e^(score − top) sum up to `sum`, where `top` is near the largest score. seen: a key is visible.
__device__ inline RowEnd end_of_row(const AttentionCall& call, int head, float top, float sum, bool seen) {
    const float sink = call.sink ? load(call.sink, head * call.sink.stride[0]) : -INFINITY;
    float factor = 1;
    if (!seen || sink == INFINITY) {
        top = sink, sum = 1, factor = 0;
    } else if (sink != -INFINITY) {
        const float joined = fmaxf(top, sink);
        factor = top == joined ? 1.0F : expf(top - joined);
        sum = factor * sum + (sink == joined ? 1.0F : expf(sink - joined));
        top = joined;
    }
    const bool empty = top == -INFINITY && !seen;
    return {top, empty ? 0.0F : logf(sum), factor == 0 ? 0.0F : factor / sum, empty};
}

// Whether the fast kernels leave a row to those of planes. Its sum is at least about 1, unless a score times c has lost
// digits. Without a key that counts although one is visible, all scores are −∞.
__device__ inline bool is_lost(const AttentionCall& call, float sum, bool seen, bool sees_keys) {
    return !isfinite(sum) || (seen && sum < 0.5F) || (!seen && !call.mask && !call.bias && sees_keys);
}

__device__ inline void store_row_end(const AttentionCall& call, const ForwardOutputs& out, const AttentionSequence& s,
                                     int head, Index query, const RowEnd& end) {
    const Index row = s.q_begin + query;
    float lse = end.top + end.log_sum;
    if (end.empty && call.empty_row != core::EmptyRow::minus_infinity)
        lse = call.empty_row == core::EmptyRow::zero ? 0.0F : INFINITY;
    if (out.lse) store(out.lse, s.batch * out.lse.stride[0] + head * out.lse.stride[1] + row * out.lse.stride[2], lse);
    if (out.far_lse && !is_far(load(out.far_lse, s.batch * out.far_lse.stride[0] + head * out.far_lse.stride[1] +
                                                     row * out.far_lse.stride[2])))
        return;
    if (out.sums.top != nullptr) {
        const Index at = call.row_of(s, head) + query;
        out.sums.top[at] = end.top;
        out.sums.log_sum[at] = end.log_sum;
    }
}

}  // namespace softdelta::cuda
