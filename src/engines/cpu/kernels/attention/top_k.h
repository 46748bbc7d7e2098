// The dynamic mask: of the keys that a row sees otherwise, the top_w of largest bias, ties to the lower index.
#pragma once

#include "engines/cpu/kernels/attention/mask.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Floats as integers in the same order: a < b exactly when ordered(a) < ordered(b).
SOFTDELTA_INLINE I ordered(F x) {
    const I bits = bits_as<I>(as_words(x));
    return bits ^ bits_as<I>(bits_as<U>(bits >> 31) >> 1);
}

inline Index count_at_least(const I* keys, Index vectors, std::int32_t bound) {
    I count(0);
    for (Index i = 0; i < vectors; ++i) count = select(keys[i] >= I(bound), count + I(1), count);
    alignas(64) std::int32_t counts[W];
    count.store_aligned(counts);
    Index total = 0;
    for (const std::int32_t c : counts) total += c;
    return total;
}

// Finds bound and last_tie of row r (mask.h). addends: [keys rounded up to W], scratch.
inline void find_top_k(const AttentionHead& head, Index r, float* addends, float* bound, Index* last_tie) {
    *bound = -infinity;
    *last_tie = head.keys;
    if (head.keys == 0) return;  // without keys there is no bias: a compiler may read it before the loop over keys
    AttentionHead all = head;
    all.top_w = -1;
    const AttentionMask mask(all);
    const Index length = round_up(head.keys, W);
    mask.addends(r, mask.key_range(r), 0, head.keys, addends);
    // Zeros of either sign are equal biases.
    const Index vectors = length / W;
    auto* keys = reinterpret_cast<I*>(addends);
    for (Index i = 0; i < vectors; ++i) keys[i] = ordered(load(addends + i * W) + splat(0.0F));

    // The largest bound that at least top_w keys reach, found bit by bit from the highest. If fewer keys than top_w
    // reach any bound, `reached` stays the smallest and all are kept.
    constexpr std::int32_t smallest = std::numeric_limits<std::int32_t>::min();
    std::int32_t reached = smallest;
    for (int bit = 31; bit >= 0; --bit) {
        const auto next = static_cast<std::int32_t>(static_cast<std::uint32_t>(reached) + (1U << bit));
        if (count_at_least(keys, vectors, next) >= head.top_w) reached = next;
    }
    const Index larger_ones =
        reached == std::numeric_limits<std::int32_t>::max() ? 0 : count_at_least(keys, vectors, reached + 1);
    Index ties = head.top_w - larger_ones;
    const auto* key = reinterpret_cast<const std::int32_t*>(addends);
    for (Index j = 0; j < head.keys && ties > 0; ++j)
        if (key[j] == reached && --ties == 0) *last_tie = j;
    const std::int32_t bits = reached ^ static_cast<std::int32_t>(static_cast<std::uint32_t>(reached >> 31) >> 1);
    if (reached != smallest) *bound = std::bit_cast<float>(bits);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
