// A chunk of the backward pass on either side of the scan: rows, gates and their fold; what enters and is written; and
// the gradients, once the scan has made dR and dS'.
#pragma once

#include "engines/cpu/kernels/delta_rule/backward/results.h"
#include "engines/cpu/kernels/delta_rule/backward/scan.h"
#include "engines/cpu/kernels/delta_rule/backward/unfold_channel_gate.h"
#include "engines/cpu/kernels/delta_rule/chunk/prepare.h"
#include "engines/cpu/kernels/delta_rule/forward/scan.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// More rows would cost more in pairs, and what a chunk works with would no longer fit a core's cache; fewer, more for
// the states. Whole register tiles.
inline constexpr Index backward_chunk = 48;
static_assert(backward_chunk <= largest_chunk);

inline Index chunk_rows(const DeltaHeads& heads) {
    return min(heads.tokens, backward_chunk);
}
template <class P>
ChunkSizes<P> backward_sizes(const DeltaHeads& heads) {
    return {heads.key_size, heads.value_size, chunk_rows(heads)};
}

// Without q nothing is read from the state.
inline DeltaHeads writing_heads(DeltaHeads heads) {
    heads.q = {};
    return heads;
}

// What is saved of a chunk of a value head.
template <class P>
struct Saved {
    float* state;   // [V, K] the transposed state that enters
    Element<P>* U;  // [n, V]; null: it is loaded from what the forward pass kept
};

// The state over the tokens at `at`, U to be saved in rows of value_row elements. Asks for so many lines of what comes
// next before each register tile.
template <class P>
void advance_state(const DeltaHeads& heads, const Folded<P>& folded, const float* beta, const Tokens& at, float* buffer,
                   const StatePanels<P>& state, Element<P>* saved_U, Index value_row, Prefetch& ahead, Index lines) {
    prefetch_first(heads.v, at, heads.value_size);
    const auto v = [&](Index i) {
        prefetch_ahead(heads.v, at, i, heads.value_size);
        return row_at(heads.v, at.head, at.begin + i, heads.v.column);
    };
    load_values(at.n, heads.value_size, v, beta, buffer, {0, state.columns()}, state);
    const auto prefetch_next = [&] { ahead.next(lines); };
    for (Index c = 0; c < state.columns(); c += NR) {
        const auto panel = state.panel(c);
        if constexpr (P::depth == 2) round_to_pairs(heads.key_size, panel.width, panel.state, panel.operand);
        if (heads.erases())
            solve(folded, panel, ahead, lines);
        else if constexpr (P::depth == 2)
            round_to_pairs(at.n, panel.width, panel.rows, panel.operand_rows);
        copy_rows_as_a(at.n, c, panel.width, panel.operand_rows, value_row, saved_U);
        product<P>(heads.key_size, panel.width, folded.write(), {panel.operand_rows, depth_of<P>(at.n)},
                   {panel.state, panel.width, Start::scale, folded.state_decay}, nullptr, nullptr, prefetch_next);
    }
}

// A chunk of a value head, prepared and folded.
template <class P>
struct FoldedChunk {
    Preparation<P> prepared;
    Folded<P> folded;

    // kept: for what finish() reads.
    FoldedChunk(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& kept, Scratch& scratch)
        : prepared(heads, sizes, kept, scratch), folded(sizes, heads.has_channel_gate(), kept) {}
};

// The gradients of a few key heads, chunk by chunk.
template <class P>
struct BackwardChunk {
    const DeltaHeads& heads;
    const DeltaGradients& grad;
    ChunkGradients<P> d;
    UnfoldScratch<P> unfold;
    ChannelUnfoldScratch<P> channel_unfold;
    float* buffer;
    GradientRows<P> rows;

    BackwardChunk(const DeltaHeads& of, const DeltaGradients& gradients, const ChunkSizes<P>& sizes, Scratch& scratch)
        : heads(of),
          grad(gradients),
          d(sizes, of.has_channel_gate(), scratch),
          unfold(sizes, of.rule.own_p, scratch),
          channel_unfold(sizes, of.has_channel_gate(), scratch),
          buffer(scratch.take<float>(sizes.value_columns() + 2 * sizes.key_row() + 2 * sizes.pair_row())),
          rows(of, gradients, sizes, buffer, scratch) {}

    // Of a group's first head: in place.
    ChunkGradients<P> begin(bool first) const {
        ChunkGradients<P> own = d;
        if (first) own.dq = rows.first_dq(), own.dk = rows.first_dk();
        return own;
    }

    // Behind the fold and the scan: dO, dR and dS' are there. `between` is called between register tiles.
    template <class Between>
    void finish(const Tokens& at, bool first, const FoldedChunk<P>& chunk, const Saved<P>& save,
                const ChunkGradients<P>& own, Between&& between) {
        const KeyChunk<P>& keys = chunk.prepared.keys();
        const GateChunk& gates = chunk.prepared.gates();
        rows.store_values(at, gates.beta, own);
        if (save.U == nullptr) rows.load_written(grad.u, at, own);
        scan_gradients(heads.erases(), at.n, heads.key_size, heads.value_size, save.state,
                       save.U == nullptr ? own.U : save.U, own, between);
        if (heads.has_channel_gate()) {
            channel_unfold.left = chunk.folded.left, channel_unfold.right = chunk.folded.right;
            ChannelUnfold<P>(heads, keys, gates, chunk.folded, own, channel_unfold).run();
        } else {
            SharedUnfold<P>(heads, keys, gates, at.n, chunk.folded.state_decay, own, unfold).run();
        }
        rows.add_chunk(at.n, keys, gates.beta, first, own);
    }
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
