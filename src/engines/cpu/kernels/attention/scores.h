// How scores are scaled while a softmax over them is summed, and the end of a row's softmax.
//
// A score is kept as the product q·k where position alone hides keys, so that no pass over the scores scales them; else
// as softcap(scale·q·k) + bias. Exponents are (score − maximum)·scale: the difference is exact where it is small,
// however large both are. All scores of a row may be numbers such as −1e10 that stand for −∞ in a mask.
#pragma once

#include <cmath>

#include "engines/cpu/kernels/attention/mask.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Not with a scale of 0: the exponent of a hidden key would be −∞·0.
inline bool keeps_products(const AttentionHead& head) {
    return AttentionMask(head).by_position_only() && head.softcap == 0 && head.scale > 0 &&
           std::isnormal(head.scale * log2_e);
}

// A kept score times this is the score.
inline float score_scale(const AttentionHead& head) {
    return keeps_products(head) ? head.scale : 1.0F;
}

// Whether position, mask and biases of −∞ leave row r a key. The dynamic mask keeps at least one of those left.
inline bool sees_any_key(AttentionHead head, Index r) {
    head.top_w = -1;
    const AttentionMask mask(head);
    return mask.sees_any(r, mask.key_range(r), 0, head.keys);
}

// The sink of row r; −∞: none.
inline double sink_of(const AttentionHead& head, Index r) {
    return head.sink.data == nullptr ? -INFINITY : static_cast<double>(head_value(head, head.sink, r));
}

// The softmax of a row whose keys and sink are known.
struct RowSoftmax {
    double lse, lse_over_maximum;  // natural; the second is lse − maximum, which f32 would lose beside a large maximum
    double keys, sink;             // their shares of the sum, each computed without a subtraction
};

inline RowSoftmax end_softmax(const AttentionHead& head, Index r, float maximum, float sum) {
    const double high = static_cast<double>(score_scale(head)) * static_cast<double>(maximum);
    const double sink = sink_of(head, r), log_sum = std::log(static_cast<double>(sum));
    if (sink == -INFINITY) return {high + log_sum, log_sum, 1, 0};
    if (sum == 0.0F || sink == INFINITY) return {sink, INFINITY, 0, 1};
    const double over = sink - high, top = over > 0 ? over : 0;
    const double keys = static_cast<double>(sum) * std::exp(-top), other = std::exp(over - top), all = keys + other;
    return {(over > 0 ? sink : high) + std::log(all), top + std::log(all), keys / all, other / all};
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
