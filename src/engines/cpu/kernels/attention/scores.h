// The unit of scores while a softmax over them is summed, and the end of a row's softmax.
//
// A score is kept as the product q·k where nothing but position hides keys, so that products stay as they are; else as
// softcap(scale·q·k) + bias. Exponents are (score − maximum)·unit: the difference is exact where it is small, however
// large both are. Numbers such as −1e10 that stand for −∞ in a mask may be all that a row has.
#pragma once

#include <cmath>

#include "engines/cpu/kernels/attention/visibility.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// With a scale of 0 an exponent of a hidden key would be −∞·0.
inline bool keeps_products(const AttentionHead& head) {
    return Visibility(head).by_position_only() && head.softcap == 0 && head.scale > 0 &&
           std::isnormal(head.scale * log2_e);
}

// A kept score times its unit is the score.
inline float score_unit(const AttentionHead& head) {
    return keeps_products(head) ? head.scale : 1.0F;
}

// A row may see no key: all are hidden by position, mask or −∞. A selection keeps at least one of those that are not.
inline bool sees_any_key(AttentionHead head, Index r) {
    head.top_w = -1;
    const Visibility visibility(head);
    return visibility.any(r, visibility.range(r), 0, head.keys);
}

// The sink of row r; −∞: none.
inline double sink_of(const AttentionHead& head, Index r) {
    return head.sink.data == nullptr ? -INFINITY : static_cast<double>(head_value(head, head.sink, r));
}

// The softmax of a row whose keys and sink are known.
struct RowSoftmax {
    double lse, lse_over_maximum;  // natural; the second without the maximum, which may be so large that it swallows it
    double keys, sink;             // what they have of all, each without a subtraction
};

inline RowSoftmax end_softmax(const AttentionHead& head, Index r, float maximum, float sum) {
    const double high = static_cast<double>(score_unit(head)) * static_cast<double>(maximum);
    const double sink = sink_of(head, r), log_sum = std::log(static_cast<double>(sum));
    if (sink == -INFINITY) return {high + log_sum, log_sum, 1, 0};
    if (sum == 0.0F || sink == INFINITY) return {sink, INFINITY, 0, 1};
    const double over = sink - high, top = over > 0 ? over : 0;
    const double keys = static_cast<double>(sum) * std::exp(-top), other = std::exp(over - top), all = keys + other;
    return {(over > 0 ? sink : high) + std::log(all), top + std::log(all), keys / all, other / all};
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
