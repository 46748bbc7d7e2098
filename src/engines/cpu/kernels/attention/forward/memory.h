// The scratch memory of a unit of the forward pass.
#pragma once

#include "engines/cpu/kernels/attention/blocks.h"
#include "engines/cpu/kernels/attention/head.h"
#include "engines/cpu/kernels/gemm/pack.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Elements between rows of probabilities, and of how many there is memory: two parts by matrix tiles.
template <class P>
constexpr Index probability_row = P::depth == 1 ? forward_blocks::score_row<P> : forward_blocks::keys_of<P> / 2 + W;
template <class P>
constexpr Index probability_size = P::Tiles::exist ? forward_blocks::group_rows<P>* forward_blocks::part_keys
                                                   : forward_blocks::rows* probability_row<P>;
template <class P>
constexpr Index score_size = P::Tiles::exist ? forward_blocks::group_rows<P>* padded(forward_blocks::part_keys)
                                             : forward_blocks::rows* forward_blocks::score_row<P>;

template <class P>
struct ForwardMemory {
    static constexpr Index R = forward_blocks::rows, L = forward_blocks::keys_of<P>;
    Element<P>* q;              // [rows, a_row_length(D)]
    float* o;                   // [rows, round_up(Dv, W)] sums that are not divided yet
    float* maximum;             // [rows] of the scores seen so far
    float* sum;                 // [rows] of 2^((score − maximum)·slope)
    float *rise, *lanes;        // [rows] by matrix tiles (by_tiles.h), negative; [rows, W] the sums
    Range* seen;                // [rows] key range of each row
    Range* tiles;               // [groups of the unit] keys of the block that some row of the group sees
    Element<P>* keys;           // [D, L] packed
    Element<P>* values;         // [L, Dv] packed
    float* scores;              // [R, score_row], or of a part by matrix tiles
    Element<P>* probabilities;  // [R, probability_row], or a part; the scores' memory when they are floats
    float* high;                // [R] largest score of a row in this block
    float* factor;              // [R] by which sums under the old maximum are multiplied
    Range* depths;              // [row tiles of a query block]
    float* addends;             // [L]
    Element<P>* staging;
    float* bound = nullptr;  // [rows] of the dynamic mask
    Index* last_tie = nullptr;
    float* row = nullptr;  // [keys]

    ForwardMemory(const AttentionHead& head, Index rows, Scratch memory) { take(head, rows, memory); }
    static std::size_t size(const AttentionHead& head, Index rows) {
        Scratch count(nullptr);
        ForwardMemory<P> unused;
        unused.take(head, rows, count);
        return count.used();
    }

  private:
    ForwardMemory() = default;
    void take(const AttentionHead& head, Index rows, Scratch& memory);
};

template <class P>
void ForwardMemory<P>::take(const AttentionHead& head, Index rows, Scratch& memory) {
    const Index longest = max(head.size, head.value_size);
    q = memory.take<Element<P>>(rows * a_row_length<P>(head.size));
    o = memory.take<float>(rows * round_up(head.value_size, W));
    maximum = memory.take<float>(rows + W);
    sum = memory.take<float>(rows + W);
    if constexpr (P::Tiles::exist) {
        rise = memory.take<float>(rows);
        lanes = memory.take<float>(rows * W);
    }
    seen = memory.take<Range>(rows);
    tiles = memory.take<Range>(rows / forward_blocks::group_rows<P> + 1);
    keys = memory.take<Element<P>>(L * a_row_length<P>(head.size));
    values = memory.take<Element<P>>(L / P::depth * round_up(head.value_size, W));
    scores = memory.take<float>(score_size<P>);
    probabilities = reinterpret_cast<Element<P>*>(scores);
    if constexpr (P::depth != 1) probabilities = memory.take<Element<P>>(probability_size<P>);
    high = memory.take<float>(R + W);
    factor = memory.take<float>(R + W);
    depths = memory.take<Range>(R / row_tile<P> + 1);
    addends = memory.take<float>(L + W);
    staging = memory.take<Element<P>>((W + 2) * round_up(longest, 2 * W));
    if (head.top_w >= 0) {
        bound = memory.take<float>(rows);
        last_tie = memory.take<Index>(rows);
        row = memory.take<float>(round_up(head.keys, W));
    }
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
