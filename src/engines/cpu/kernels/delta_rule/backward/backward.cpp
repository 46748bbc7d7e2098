// The backward pass of the delta rules, for the table: a forward sweep that saves states and U, then chunks from the
// last to the first.
#include "engines/cpu/kernels/isa_unit.h"

#include "engines/cpu/kernels/delta_rule/backward/chunk.h"
#include "engines/cpu/kernels/delta_rule/backward/replay.h"
#include "engines/cpu/kernels/delta_rule/backward/tokens.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

// Memory that is prefetched line by line between register tiles.
struct SpreadPrefetch {
    Prefetch memory;
    Index lines_at_once = 0;

    void spread_over(Index tiles) { lines_at_once = memory.lines() / tiles + 1; }
    void operator()() { memory.next(lines_at_once); }
};

Index tiles(Index rows, Index columns) {
    return round_up(rows, MR) / MR * (round_up(columns, NR) / NR);
}

// A few key heads of one sequence with their value heads, segment by segment from the last to the first: the states at
// the starts of its chunks are made, then come its chunks from the last to the first. Where the forward pass kept
// nothing, the sequence is one segment, and a sweep forward saves states and U. Else a segment begins with a state that
// was kept, and a key head after another is run, so that the states of its chunks stay in cache:
//
//     kept    S0              S8              S16            8 chunks of 48 tokens between them
//     replay                                  S16 S17 S18    the last segment; U is there, no product with S is needed
//     then    S8 S9 … S15
template <class P>
class BackwardPass {
  public:
    // kept: the interval of the states that the forward pass kept, or 0.
    BackwardPass(const DeltaHeads& heads, Index kept, const DeltaGradients& grad, Scratch& scratch)
        : heads_(heads),
          grad_(grad),
          writing_(writing_heads(heads)),
          sizes_(backward_sizes<P>(heads)),
          is_kept_(kept != 0),
          segment_(is_kept_ ? kept : heads.tokens),
          heads_at_once_(is_kept_ ? heads.group : heads.heads()),
          current_(heads, sizes_, scratch, scratch),
          prepared_(current_.prepared),
          chunk_(heads, grad, sizes_, scratch),
          d_(chunk_.d),
          buffer_(chunk_.buffer),
          reversed_(sizes_, scratch),
          states_(sizes_, is_kept_ ? 1 : heads.heads(), scratch),
          replay_(heads, sizes_, scratch),
          by_token_from_(scratch.take<Index>(heads_at_once_)),
          dstates_({heads.key_size, heads.value_size, 0}, heads.heads(), scratch),
          saved_states_(scratch.take<float>(chunks(0) * heads_at_once_ * transposed_state(sizes_))),
          saved_U_(is_kept_ ? nullptr
                            : scratch.take<Element<P>>(chunks(0) * heads.heads() * sizes_.rows * d_.value_row)),
          tokens_(heads, sizes_, scratch) {}

    void run() {
        const Index K = heads_.key_size, V = heads_.value_size;
        for (Index i = 0; i < heads_.heads() * gate_sums(heads_.channels()); ++i) grad_.gate_sums[i] = 0;
        for (Index h = 0; h < heads_.heads(); ++h) load_state(grad_.dfinal_state, h, K, V, buffer_, dstates_.head(h));
        tokens_.begin();
        const Index segments = heads_.tokens == 0 ? 0 : (heads_.tokens + segment_ - 1) / segment_;
        for (Index segment = segments; segment-- > 0;)
            for (first_ = 0; first_ < heads_.heads(); first_ += heads_at_once_) {
                begin_ = segment * segment_;
                prepared_.use(writing_);
                is_kept_ ? replay() : sweep();
                prepared_.use(heads_);
                run_segment();
            }
        if (grad_.dinitial_state.data == nullptr) return;
        for (Index h = 0; h < heads_.heads(); ++h)
            store_state(grad_.dinitial_state, h, K, V, buffer_, dstates_.head(h));
    }

  private:
    // Of the segment that begins at token `begin`.
    Index chunks(Index begin) const {
        return sizes_.rows == 0 ? 0 : (min(segment_, heads_.tokens - begin) + sizes_.rows - 1) / sizes_.rows;
    }
    // A chunk of the segment that is run.
    Tokens tokens_of(Index chunk, Index h) const {
        const Index begin = chunk * sizes_.rows, end = min(segment_, heads_.tokens - begin_);
        return {h, begin_ + begin, min(sizes_.rows, end - begin)};
    }
    Tokens key_tokens(Index chunk, Index h) const {
        const Tokens at = tokens_of(chunk, h);
        return {h / heads_.group, at.begin, at.n};
    }
    bool is_first_of_group(Index h) const { return h % heads_.group == 0; }
    bool is_last_of_group(Index h) const { return (h + 1) % heads_.group == 0; }
    // Whether nothing is added to dq, dk and dp before this head.
    bool begins_sums(Index h) const { return is_first_of_group(h) && grad_.relay.before == nullptr; }
    Saved<P> saved(Index chunk, Index h) const {
        const Index at = chunk * heads_at_once_ + h - first_;
        return {saved_states_ + at * transposed_state(sizes_),
                is_kept_ ? nullptr : saved_U_ + at * sizes_.rows * d_.value_row};
    }

    // What the sweep saved is prefetched while products run, and so are the rows that come next and where the sweep
    // will save.
    SpreadPrefetch with_saved(const Tokens& at, const Saved<P>& save, SpreadPrefetch ahead = {}) const {
        ahead.memory.add(save.state, transposed_state(sizes_) * static_cast<Index>(sizeof(float)));
        ahead.memory.add(save.U, at.n * d_.value_row * static_cast<Index>(sizeof(Element<P>)));
        ahead.spread_over(tiles(at.n, heads_.value_size) + tiles(heads_.key_size, heads_.value_size));
        return ahead;
    }
    // Where gradients are stored once a chunk of a value head is done.
    SpreadPrefetch results_of(const Tokens& at) const {
        SpreadPrefetch ahead;
        ahead.memory.add(grad_.dv, at, heads_.value_size);
        if (heads_.has_channel_gate()) ahead.memory.add(grad_.dg, at, heads_.key_size);
        if (is_last_of_group(at.head))
            for (const DeltaRows* t : {&grad_.dq, &grad_.dk, &grad_.dp})
                ahead.memory.add(*t, {at.head / heads_.group, at.begin, at.n}, heads_.key_size);
        ahead.spread_over(tiles(at.n, heads_.value_size) + tiles(heads_.key_size, heads_.value_size));
        return ahead;
    }
    SpreadPrefetch next_of_sweep(Index chunk, Index h) const {
        if (chunk >= chunks(begin_)) return {};
        return with_saved(tokens_of(chunk, h), saved(chunk, h), rows_of(writing_, chunk, h));
    }
    SpreadPrefetch next_of_backward(Index chunk, Index h) const {
        if (chunk < 0) return {};
        SpreadPrefetch ahead = rows_of(heads_, chunk, h);
        ahead.memory.add(grad_.d_o, tokens_of(chunk, h), heads_.value_size);
        if (is_kept_) ahead.memory.add(grad_.u, tokens_of(chunk, h), heads_.value_size);
        ahead.spread_over((heads_.erases() ? 3 : 2) * tiles(sizes_.rows, heads_.key_size));
        return ahead;
    }
    SpreadPrefetch rows_of(const DeltaHeads& heads, Index chunk, Index h) const {
        SpreadPrefetch ahead;
        if (is_first_of_group(h))
            for (const DeltaRows* t : {&heads.q, &heads.k, &heads.p})
                ahead.memory.add(*t, key_tokens(chunk, h), heads.key_size);
        ahead.memory.add(heads.v, tokens_of(chunk, h), heads.value_size);
        if (heads.has_channel_gate()) ahead.memory.add(heads.g, tokens_of(chunk, h), heads.key_size);
        return ahead;
    }

    // Keys, U and gates of what is replayed next.
    SpreadPrefetch next_of_replay(Index chunk, Index h) const {
        SpreadPrefetch ahead;
        if (is_first_of_group(h)) ahead.memory.add(heads_.k, key_tokens(chunk, h), heads_.key_size);
        ahead.memory.add(grad_.u, tokens_of(chunk, h), heads_.value_size);
        if (heads_.has_channel_gate()) ahead.memory.add(heads_.g, tokens_of(chunk, h), heads_.key_size);
        ahead.spread_over(tiles(heads_.value_size, heads_.key_size));
        return ahead;
    }

    // States and U of all chunks.
    void sweep() {
        for (Index h = 0; h < heads_.heads(); ++h)
            load_state(heads_.initial_state, h, heads_.key_size, heads_.value_size, buffer_, states_.head(h));
        for (Index chunk = 0; chunk < chunks(begin_); ++chunk)
            for (Index h = 0; h < heads_.heads(); ++h) {
                if (is_first_of_group(h)) prepared_.load_key_head(key_tokens(chunk, h));
                next_ = h + 1 < heads_.heads() ? next_of_sweep(chunk, h + 1) : next_of_sweep(chunk + 1, 0);
                sweep(tokens_of(chunk, h), saved(chunk, h));
            }
    }

    // States of a segment's chunks, from the first and U.
    void replay() {
        const Index K = heads_.key_size, V = heads_.value_size, end = first_ + heads_at_once_;
        const DeltaStates kept = states_at(grad_.states, begin_ / segment_);
        for (Index h = first_; h < end; ++h) {
            load_state(kept, h, K, V, buffer_, states_);
            transpose_state(K, V, states_, saved(0, h).state);
            replay_.begin(h - first_, saved(0, h).state);
            by_token_from_[h - first_] = heads_.tokens;
        }
        const Index last = chunks(begin_) - 1;
        for (Index chunk = 0; chunk < last; ++chunk)
            for (Index h = first_; h < end; ++h) {
                const Tokens at = tokens_of(chunk, h);
                if (is_first_of_group(h)) prepared_.load_written_keys(key_tokens(chunk, h));
                next_ = h + 1 < end        ? next_of_replay(chunk, h + 1)
                        : chunk + 1 < last ? next_of_replay(chunk + 1, first_)
                                           : next_of_backward(last, first_);
                const float* before = saved(chunk, h).state;
                float* after = saved(chunk + 1, h).state;
                if (prepared_.load_value_head(at) && !goes_by_token(at)) {
                    const auto prefetch_next = [this] { next_(); };
                    replay_.run(at, prepared_.keys(), prepared_.gates(), grad_.u, before, after, prefetch_next);
                    if (!replay_.loses_digits(h - first_, after)) continue;
                    by_token_from_[h - first_] = at.begin + at.n;
                    prepared_.load_value_head(at);  // run() has summed the gates
                }
                prepared_.load_key_head(key_tokens(chunk, h));
                restore_state(K, V, before, states_);
                tokens_.pass(at, prepared_.keys(), prepared_.gates(), states_);
                transpose_state(K, V, states_, after);
            }
    }

    void run_segment() {
        const Index end = first_ + heads_at_once_;
        for (Index chunk = chunks(begin_); chunk-- > 0;)
            for (Index h = first_; h < end; ++h) {
                if (is_first_of_group(h)) begin_key_head(key_tokens(chunk, h));
                next_ = h + 1 < end ? next_of_backward(chunk, h + 1) : next_of_backward(chunk - 1, first_);
                run_value_head(tokens_of(chunk, h), saved(chunk, h));
                if (is_last_of_group(h)) end_key_head(key_tokens(chunk, h));
            }
    }

    void begin_key_head(const Tokens& at) {
        prepared_.load_key_head(at);
        const DeltaRelay& relay = grad_.relay;
        if (relay.before == nullptr) return;
        relay.wait(*relay.before, ++taken_);
        chunk_.rows.take_sums(at);
    }
    void end_key_head(const Tokens& at) {
        std::atomic<Index>* done = grad_.relay.done;
        if (done == nullptr) return chunk_.rows.store_keys(at, prepared_.keys());
        chunk_.rows.pass_sums(at);
        done->fetch_add(1, std::memory_order_release);
    }

    // Behind a chunk whose state the replay could not keep the digits of.
    bool goes_by_token(const Tokens& at) const { return is_kept_ && at.begin >= by_token_from_[at.head - first_]; }

    void sweep(const Tokens& at, const Saved<P>& save) {
        const StatePanels<P> state = states_.head(at.head);
        transpose_state(heads_.key_size, heads_.value_size, state, save.state);
        if (prepared_.load_value_head(at))
            advance(at, state, save.U);
        else
            tokens_.pass(at, prepared_.keys(), prepared_.gates(), state);
    }

    // The state over the tokens at `at`, U to be saved.
    void advance(const Tokens& at, const StatePanels<P>& state, Element<P>* saved_U) {
        prepared_.fold(0, at.n, current_.folded);
        current_.folded.prepare_write(heads_.key_size);
        advance_state(heads_, current_.folded, prepared_.beta(0), at, buffer_, state, saved_U, d_.value_row,
                      next_.memory, next_.lines_at_once);
    }

    void run_value_head(const Tokens& at, const Saved<P>& save) {
        if (prepared_.load_value_head(at) && !tokens_.is_wide(at.head) && !goes_by_token(at))
            run_chunk(at, save);
        else
            run_tokens(at, save);
        chunk_.rows.store_gates(at, prepared_.gates(), d_);
    }

    //     dO [n, V]·Sᵀ → dread_query [n, K]
    //     write_key·dS' + scoreᵀ·dO → dU [n, V] → (I + erase_score)⁻ᵀ → dR [n, V]
    //     dR·Uᵀ → derase_score [n, n]
    //
    // And so on. The unfold makes dq, dk, dp [n, K] and dg [n, K|1] of them.
    void run_chunk(const Tokens& at, const Saved<P>& save) {
        const Index K = heads_.key_size, V = heads_.value_size;
        const StateOnly dstate = dstates_.head(at.head);
        const bool first = begins_sums(at.head);
        const ChunkGradients<P> d = chunk_.begin(first);
        SpreadPrefetch ahead = results_of(at);
        if (!is_kept_) ahead = with_saved(at, save, ahead);  // within a segment states stay in cache
        prepared_.fold(0, at.n, current_.folded);
        chunk_.rows.load_output(at, d);
        transpose_state(K, V, dstate, d.dstate);
        scan_backward(heads_.erases(), reversed_.of(current_.folded), K, dstate, d, ahead);
        chunk_.finish(at, first, current_, save, d, next_);
    }

    void run_tokens(const Tokens& at, const Saved<P>& save) {
        const Index K = heads_.key_size;
        const StatePanels<P> state = states_.head(is_kept_ ? 0 : at.head);
        restore_state(K, heads_.value_size, save.state, state);
        tokens_.run(at, prepared_.keys(), prepared_.gates(), state, grad_.d_o, dstates_.head(at.head));
        chunk_.rows.add_tokens(at, begins_sums(at.head), tokens_, d_);
    }

    const DeltaHeads& heads_;
    const DeltaGradients& grad_;
    DeltaHeads writing_;  // without q
    ChunkSizes<P> sizes_;
    bool is_kept_;
    Index segment_, heads_at_once_;  // tokens; value heads
    Index begin_ = 0, first_ = 0;    // the token and the value head that the segment begins with
    FoldedChunk<P> current_;
    Preparation<P>& prepared_;  // of it
    BackwardChunk<P> chunk_;
    const ChunkGradients<P>& d_;  // of it, and so is the next
    float* buffer_;
    Reversed<P> reversed_;
    StatePanels<P> states_;
    Replay<P> replay_;
    Index* by_token_from_;  // [heads_at_once_], where states were kept: a token
    StateOnly dstates_;
    float* saved_states_;
    Element<P>* saved_U_;
    TokenBackward<P> tokens_;
    SpreadPrefetch next_;
    Index taken_ = 0;  // chunks whose sums came from another unit
};

template <class P>
std::size_t count_scratch(const DeltaHeads& heads, Index kept) {
    Scratch scratch(nullptr);
    const DeltaGradients none;
    const BackwardPass<P> pass(heads, kept, none, scratch);
    return scratch.used();
}

template <class P>
void run_heads(const DeltaHeads& heads, std::byte* memory, const DeltaGradients& grad) {
    Scratch scratch(memory);
    BackwardPass<P>(heads, grad.states.data == nullptr ? 0 : grad.state_interval, grad, scratch).run();
}

std::size_t backward_scratch(const DeltaHeads& heads, Index kept) {
    return with_product(heads.bf16_products, [&](auto p) { return count_scratch<decltype(p)>(heads, kept); });
}

void run_backward(const DeltaHeads& heads, std::byte* scratch, const DeltaGradients& grad) {
    compute_with(heads.bf16_products, [&](auto p) { return run_heads<decltype(p)>(heads, scratch, grad); });
}

}  // namespace

const DeltaBackward delta_backward = {backward_scratch, run_backward};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
