// The end of a row of the forward pass, and partial softmaxes over ranges of keys put together:
//     m = max m_p   sum = Σ_p e^(m_p − m)·sum_p   o = Σ_p e^(m_p − m)·o_p / sum
#pragma once

#include <cmath>

#include "engines/cpu/kernels/attention/scores.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// The last step of row r: o is divided and rounded once. Overwrites o. The sum is under the maximum.
[[gnu::noinline]] inline void finish_row(const AttentionHead& head, Index r, float* o, float maximum, float sum,
                                         const AttentionOutput& out) {
    const bool needs_softmax = head.sink.data != nullptr || out.lse.data != nullptr;
    const RowSoftmax softmax = needs_softmax ? end_softmax(head, r, maximum, sum) : RowSoftmax{0, 0, 1, 0};
    const bool empty = sum == 0.0F && softmax.sink == 0 && !sees_any_key(head, r);
    const F factor = splat(empty || softmax.keys == 0 ? 0.0F : static_cast<float>(softmax.keys) / sum);
    for (Index i = 0; i < head.value_size; i += W) store(o + i, load(o + i) * factor);
    const Index h = r / head.queries;
    const Index i = r % head.queries;
    if (out.o.data != nullptr)
        store_row(o, head.value_size, element(out.o.data, out.o.dtype, h * out.o.head + i * out.o.row), out.o.dtype,
                  out.o.column);
    if (out.lse.data != nullptr) {
        const float lse[W] = {empty ? head.empty_lse : static_cast<float>(softmax.lse)};
        store_row(lse, 1, element(out.lse.data, out.lse.dtype, h * out.lse.head + i * out.lse.row), out.lse.dtype, 1);
    }
}

inline Index partial_row(const AttentionHead& head) {
    return round_up(head.value_size, W);
}

// The sum is made in row r of part 0.
inline void combine(const AttentionHead& head, Index begin, Index end, const PartialSoftmax& first, Index parts,
                    Index stride, const AttentionOutput& out) {
    const Index length = round_up(head.value_size, W);
    const float slope = score_scale(head) * log2_e;
    for (Index r = begin; r < end; ++r) {
        float maximum = lowest, sum = 0;
        for (Index p = 0; p < parts; ++p) maximum = std::fmax(maximum, first.maximum[p * stride + r]);
        float* o = first.o + r * length;
        for (Index p = 0; p < parts; ++p) {
            const float factor = std::exp2((first.maximum[p * stride + r] - maximum) * slope);
            sum += factor * first.sum[p * stride + r];
            for (Index i = 0; i < length; i += W) {
                const F x = load(o + p * stride + i) * splat(factor);
                store(o + i, p == 0 ? x : load(o + i) + x);
            }
        }
        finish_row(head, r, o, maximum, sum, out);
    }
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
