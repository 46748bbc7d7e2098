#include "engines/cpu/work.h"

#include <algorithm>

namespace softdelta::cpu {

using engines::bytes_of;

namespace {

double number(Index n) {
    return static_cast<double>(n);
}

Index element_bytes(const Tensor& t) {
    return t ? static_cast<Index>(core::size_of(t.dtype)) : 0;
}

}  // namespace

core::Work attention_work(const AttentionHeads& heads, const core::AttentionInputs& in, Direction direction) {
    const Index D = in.q.shape[3], Dv = in.v.shape[3];
    const bool backward = direction == Direction::backward;
    core::Work work;
    work.bytes = bytes_of(in.q) * (backward ? 3 : 2);  // o; do, dq
    // Sums over the sequences: a call of many short ones would spend more on each sequence's work than on computing it.
    double all_keys = 0, all_pairs = 0, pairs_with_addends = 0;  // a pair: a row of a key head, and a key
    for (Index n = 0; n < heads.sequences(); ++n) {
        const AttentionOutline head = heads.outline(n);
        const Index first = std::clamp<Index>(head.left, 0, head.keys);
        const Index keys = std::clamp<Index>(head.queries + head.right, first, head.keys) - first;
        const double pairs = number(head.rows()) * number(keys);
        all_keys += number(keys);
        all_pairs += pairs;
        pairs_with_addends += head.queries > 1 ? pairs : 0;
    }
    const double key_heads = number(heads.key_heads());
    const Index addends = element_bytes(in.mask) + element_bytes(in.bias);
    const Index key_bytes = D * element_bytes(in.k) + Dv * element_bytes(in.v);
    work.flops = key_heads * all_pairs * number((backward ? 5 : 2) * (D + Dv) + engines::exponential_flops);
    work.bytes += key_heads * all_keys * number(key_bytes * (backward ? 2 : 1));
    work.bytes += key_heads * pairs_with_addends * number(addends);
    return work;
}

core::Work delta_work(const DeltaCall& call, const core::DeltaInputs& in, Direction direction) {
    constexpr Index chunk = 64;
    const Index K = in.q.shape[3], V = in.v.shape[3], T = in.v.shape[1];
    const double heads = number(in.q.shape[0]) * number(T) * number(call.value_heads());
    const double states = number(call.sequences()) * number(call.value_heads()) * number(K * V);
    core::Work work;
    work.flops = heads * number(6 * K * V + 2 * std::min(T, chunk) * (K + V));
    work.bytes = bytes_of(in.q) + bytes_of(in.k) + bytes_of(in.p) + 2 * bytes_of(in.v) + bytes_of(in.g) +
                 2 * number(sizeof(float)) * states;  // read and written
    if (direction == Direction::backward) work += {work.bytes, 2 * work.flops};
    return work;
}

}  // namespace softdelta::cpu
