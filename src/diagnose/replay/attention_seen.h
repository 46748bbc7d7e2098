// Which keys a row of queries sees: causal, window, mask, dynamic mask.
#pragma once

#include <algorithm>
#include <vector>

#include "diagnose/replay/attention_call.h"

namespace softdelta::diagnose {

// Sequence n: where its rows and its keys lie, and its index into mask and bias.
struct AttentionPlace {
    Index batch, key_batch, index;
    Index q_begin, q_count, k_begin, k_count;
};

AttentionPlace attention_place(const io::Call& call, const Mistakes& mistakes, Index n);
inline Index attention_sequences(const AttentionCall& c) {
    const io::Bounds& queries = c.call.packing.queries;
    return queries.empty() ? c.q.size(0) : static_cast<Index>(queries.size()) - 1;
}

inline constexpr Index attention_tile = 64;  // rows and keys

// Where row i and key j of query head h lie in a mask or bias, whatever it is broadcast over; a mistaken index stays
// within.
inline Index place_in(const Dense& t, const AttentionPlace& at, Index heads, Index h, Index i, Index j) {
    const auto in = [&](std::size_t dim, Index index) { return std::min<Index>(index, t.size(dim) - 1); };
    const Index head = t.size(1) == 1 ? 0 : h / (heads / t.size(1));
    return ((in(0, at.index) * t.size(1) + head) * t.size(2) + in(2, i)) * t.size(3) + in(3, j);
}

// What is added to the score: the bias times its slope, less ALiBi's distance.
double addend_of(const AttentionCall& c, const AttentionPlace& at, Index h, Index i, Index j);

// Fills `seen`, one flag a key, for row i of query head h.
void find_seen(const AttentionCall& call, const Mistakes& mistakes, const AttentionPlace& at, Index h, Index i,
               std::vector<char>& seen);

}  // namespace softdelta::diagnose
