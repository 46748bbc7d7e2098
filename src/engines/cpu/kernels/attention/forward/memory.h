// The scratch memory of a unit of the forward pass.
#pragma once

#include "engines/cpu/kernels/attention/blocks.h"
#include "engines/cpu/kernels/attention/forward/tile_operands.h"
#include "engines/cpu/kernels/gemm/pack.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Elements between rows of probabilities.
template <class P>
constexpr Index probability_row = P::depth == 1 ? forward_blocks::score_row<P> : forward_blocks::keys_of<P> / 2 + W;

template <class Memory>
void take_top_k(Memory& m, const AttentionHead& head, Index rows, Scratch& memory) {
    if (head.top_w < 0) return;
    m.bound = memory.take<float>(rows);
    m.last_tie = memory.take<Index>(rows);
    m.row = memory.take<float>(round_up(head.keys, W));
}

// By vectors; by matrix tiles below.
template <class P, bool by_tiles = P::Tiles::exist>
struct ForwardMemory {
    static constexpr Index R = forward_blocks::rows, L = forward_blocks::keys_of<P>;
    Element<P>* q;              // [rows, a_row_length(D)]
    float* o;                   // [rows, round_up(Dv, W)] sums that are not divided yet
    float* maximum;             // [rows] of the scores seen so far
    float* sum;                 // [rows] of 2^((score − maximum)·slope)
    Range* seen;                // [rows] key range of each row
    Range* tiles;               // [groups of the unit] keys of the block that some row of the group sees
    Element<P>* keys;           // [D, L] packed
    Element<P>* values;         // [L, Dv] packed
    float* scores;              // [R, score_row]
    Element<P>* probabilities;  // [R, probability_row]; the scores' memory when they are floats
    float* high;                // [R] largest score of a row in this block
    float* factor;              // [R] by which sums under the old maximum are multiplied
    Range* depths;              // [row tiles of a query block]
    float* addends;             // [L]
    Element<P>* staging;
    float* bound = nullptr;  // [rows] of the dynamic mask
    Index* last_tie = nullptr;
    float* row = nullptr;  // [keys]

    static ForwardMemory take(const AttentionHead& head, Index rows, Scratch& memory) {
        const Index longest = max(head.size, head.value_size);
        ForwardMemory m;
        m.q = memory.take<Element<P>>(rows * a_row_length<P>(head.size));
        m.o = memory.take<float>(rows * round_up(head.value_size, W));
        m.maximum = memory.take<float>(rows + W);
        m.sum = memory.take<float>(rows + W);
        m.seen = memory.take<Range>(rows);
        m.tiles = memory.take<Range>(rows / forward_blocks::group_rows<P> + 1);
        m.keys = memory.take<Element<P>>(L * a_row_length<P>(head.size));
        m.values = memory.take<Element<P>>(L / P::depth * round_up(head.value_size, W));
        m.scores = memory.take<float>(R * forward_blocks::score_row<P>);
        m.probabilities = reinterpret_cast<Element<P>*>(m.scores);
        if constexpr (P::depth != 1) m.probabilities = memory.take<Element<P>>(R * probability_row<P>);
        m.high = memory.take<float>(R + W);
        m.factor = memory.take<float>(R + W);
        m.depths = memory.take<Range>(R / row_tile<P> + 1);
        m.addends = memory.take<float>(L + W);
        m.staging = memory.take<Element<P>>((W + 2) * round_up(longest, 2 * W));
        take_top_k(m, head, rows, memory);
        return m;
    }
};

// Operands and sums lie as whole tiles (gemm/tile_products.h). `groups`: of 32 rows.
template <class P>
struct ForwardMemory<P, true> {
    Element<P>* q;              // [groups, D / 32, 2 tiles]
    float* o;                   // [groups, Dv / 16, 2 tiles] sums that are not divided yet
    float* maximum;             // [rows] bases (tile_rows.h); −∞: none yet
    float* norms;               // [rows] sum of squares of a query
    float* offset;              // [a group] of exponents in 16 bits
    float* lanes;               // [rows, W] sums of exponentials, lane by lane
    Range *seen, *tiles;        // as above
    float* scores;              // [2 panels, 4 key tiles, 2 tiles]
    Element<P>* probabilities;  // [2 parts, 4 steps, 2 tiles]
    float* factor;              // [a group] of o
    float* addends;             // [keys of a part]
    float* row_of_o;
    Element<P>* staging;
    TileOperands operands;  // of a block, where they are not packed for the head
    float* bound = nullptr;
    Index* last_tie = nullptr;
    float* row = nullptr;

    static ForwardMemory take(const AttentionHead& head, Index rows, Scratch& memory) {
        using Operands = TileOperands;
        const Index all = round_up(rows, square);
        ForwardMemory m;
        m.staging = memory.take<Element<P>>(PackOperands<P>::staging(head));  // first: packing takes nothing else
        m.q = memory.take<Element<P>>(all * Operands::chunks_of(head) * W);
        m.o = memory.take<float>(all * round_up(head.value_size, W));
        for (float** x : {&m.maximum, &m.norms}) *x = memory.take<float>(all);
        m.lanes = memory.take<float>(all * W);
        m.seen = memory.take<Range>(rows);
        m.tiles = memory.take<Range>(all / square);
        m.scores = memory.take<float>(Operands::part_tiles * 2 * tile_words);
        m.probabilities = memory.take<Element<P>>(2 * Operands::part_steps * 2 * tile_words);
        m.factor = memory.take<float>(square);
        m.offset = memory.take<float>(square);
        m.addends = memory.take<float>(Operands::part_keys);
        m.row_of_o = memory.take<float>(round_up(head.value_size, W));
        m.operands = Operands::take(head, forward_blocks::keys_of<P>, memory);
        take_top_k(m, head, rows, memory);
        return m;
    }
};

template <class P>
std::size_t forward_scratch(const AttentionHead& head, Index rows) {
    Scratch count(nullptr);
    ForwardMemory<P>::take(head, rows, count);
    return count.used();
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
