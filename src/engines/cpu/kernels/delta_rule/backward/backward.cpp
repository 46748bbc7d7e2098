#include "engines/cpu/kernels/delta_rule/backward/backward.h"

#include "engines/cpu/kernels/delta_rule/backward/replay.h"
#include "engines/cpu/kernels/delta_rule/backward/results.h"
#include "engines/cpu/kernels/delta_rule/backward/scan.h"
#include "engines/cpu/kernels/delta_rule/backward/tokens.h"
#include "engines/cpu/kernels/delta_rule/backward/unfold_channel_gate.h"
#include "engines/cpu/kernels/delta_rule/chunk/prepare.h"
#include "engines/cpu/kernels/delta_rule/forward/forward.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

// More rows would cost more in pairs, and what a chunk works with would no longer fit a core's cache; fewer, more for
// the states. Whole register tiles.
constexpr Index backward_chunk = 48;
static_assert(backward_chunk <= largest_chunk);

Index chunk_rows(const DeltaHeads& heads) {
    return min(heads.tokens, backward_chunk);
}

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

// What the forward pass kept, or what is made in its place: the states at the starts of segments, and U.
template <class P>
class Kept {
  public:
    // given: the interval of the states that the caller has; 0: there are none.
    Kept(const DeltaHeads& heads, Index given, Scratch& scratch) : interval_(given) {
        if (given != 0) return;
        interval_ = backward_interval;
        const Index K = heads.key_size, V = heads.value_size, intervals = (heads.tokens + interval_ - 1) / interval_;
        auto* states = scratch.take<float>(intervals * heads.heads() * K * V);
        states_ = {states, DType::f32, K * V, V, 1, heads.heads() * K * V};
        auto* u = scratch.take<Stored<P>>(heads.heads() * heads.tokens * V);
        u_ = {u, P::depth == 1 ? DType::f32 : DType::bf16, heads.tokens * V, V, 1};
        memory_ = scratch.take<std::byte>(static_cast<Index>(delta_forward.scratch(writing(heads))));
    }

    // Without q nothing is read from the state, and its rows are left out.
    static DeltaHeads writing(DeltaHeads heads) {
        heads.q = {};
        return heads;
    }

    // The forward pass again, where it kept nothing.
    void prepare(const DeltaHeads& heads, const DeltaGradients& grad) {
        if (grad.states.data != nullptr) {
            states_ = grad.states;
            u_ = grad.u;
            return;
        }
        DeltaOutput out;
        out.states = states_;
        out.u = u_;
        out.state_interval = interval_;
        delta_forward.run(writing(heads), memory_, out);
    }

    Index interval() const { return interval_; }  // tokens
    const DeltaRows& u() const { return u_; }
    DeltaStates states(Index segment) const { return states_at(states_, segment); }

  private:
    Index interval_;
    DeltaStates states_;
    DeltaRows u_;
    std::byte* memory_ = nullptr;
};

// A few key heads of one sequence with their value heads, segment by segment from the last to the first: the states at
// the starts of its chunks, which then are in cache, and its chunks from the last to the first.
template <class P>
class BackwardPass {
  public:
    BackwardPass(const DeltaHeads& heads, Index kept, const DeltaGradients& grad, Scratch& scratch)
        : heads_(heads),
          grad_(grad),
          writing_(Kept<P>::writing(heads)),
          sizes_{heads.key_size, heads.value_size, chunk_rows(heads)},
          kept_(heads, kept, scratch),
          prepared_(heads, sizes_, scratch),
          folded_(sizes_, scratch),
          reversed_(sizes_, scratch),
          state_(sizes_, 1, scratch),
          dstates_({heads.key_size, heads.value_size, 0}, heads.heads(), scratch),
          replay_(heads, sizes_, scratch),
          segment_states_(scratch.take<float>(heads.group * chunks_of(kept_.interval()) * transposed_state(sizes_))),
          d_(sizes_, heads.has_channel_gate(), scratch),
          unfold_(sizes_, heads.rule.own_p, scratch),
          channel_unfold_(sizes_, heads.has_channel_gate(), scratch),
          buffer_(scratch.take<float>(sizes_.value_columns() + 2 * sizes_.key_row() + 2 * sizes_.pair_row())),
          rows_(heads, grad, sizes_, buffer_, scratch),
          tokens_(heads, sizes_, scratch) {}

    void run() {
        const Index K = heads_.key_size, V = heads_.value_size;
        kept_.prepare(heads_, grad_);
        [[maybe_unused]] const typename P::Tiles tiles;
        for (Index i = 0; i < heads_.heads() * gate_sums(heads_.channels()); ++i) grad_.gate_sums[i] = 0;
        for (Index h = 0; h < heads_.heads(); ++h) load_state(grad_.dfinal_state, h, K, V, buffer_, dstates_.head(h));
        tokens_.begin();
        for (Index segment = (heads_.tokens + kept_.interval() - 1) / kept_.interval(); segment-- > 0;)
            for (Index h = 0; h < heads_.key_heads; ++h) run_segment(segment, h);
        if (grad_.dinitial_state.data == nullptr) return;
        for (Index h = 0; h < heads_.heads(); ++h)
            store_state(grad_.dinitial_state, h, K, V, buffer_, dstates_.head(h));
    }

  private:
    // Of so many tokens.
    Index chunks_of(Index tokens) const {
        return sizes_.rows == 0 ? 0 : (min(tokens, heads_.tokens) + sizes_.rows - 1) / sizes_.rows;
    }
    // A chunk of a segment; of a head of either kind.
    Tokens tokens_of(Index segment, Index chunk, Index head) const {
        const Index begin = segment * kept_.interval() + chunk * sizes_.rows;
        const Index end = min((segment + 1) * kept_.interval(), heads_.tokens);
        return {head, begin, min(sizes_.rows, end - begin)};
    }
    Index chunks(Index segment) const {
        return chunks_of(min(kept_.interval(), heads_.tokens - segment * kept_.interval()));
    }
    bool is_first_of_group(Index h) const { return h % heads_.group == 0; }
    // The transposed state before a chunk of the segment.
    float* state(Index chunk, Index hv) const {
        return segment_states_ + (chunk * heads_.group + hv % heads_.group) * transposed_state(sizes_);
    }

    // Rows that come next are prefetched while products run.
    SpreadPrefetch next_of_replay(Index segment, Index chunk, Index hv) const {
        SpreadPrefetch ahead;
        if (is_first_of_group(hv))
            ahead.memory.add(heads_.k, tokens_of(segment, chunk, hv / heads_.group), heads_.key_size);
        const Tokens at = tokens_of(segment, chunk, hv);
        ahead.memory.add(kept_.u(), at, heads_.value_size);
        if (heads_.has_channel_gate()) ahead.memory.add(heads_.g, at, heads_.key_size);
        return ahead;
    }
    SpreadPrefetch next_of_backward(Index segment, Index chunk, Index hv) const {
        SpreadPrefetch ahead = next_of_replay(segment, chunk, hv);
        if (is_first_of_group(hv))
            for (const DeltaRows* t : {&heads_.q, &heads_.p})
                ahead.memory.add(*t, tokens_of(segment, chunk, hv / heads_.group), heads_.key_size);
        const Tokens at = tokens_of(segment, chunk, hv);
        ahead.memory.add(heads_.v, at, heads_.value_size);
        ahead.memory.add(grad_.d_o, at, heads_.value_size);
        return ahead;
    }

    void run_segment(Index segment, Index h) {
        replay(segment, h);
        const Index first = h * heads_.group, end = first + heads_.group;
        for (Index chunk = chunks(segment); chunk-- > 0;) {
            const Tokens key_tokens = tokens_of(segment, chunk, h);
            prepared_.load_key_head(key_tokens);
            for (Index hv = first; hv < end; ++hv) {
                if (hv + 1 < end)
                    next_ = next_of_backward(segment, chunk, hv + 1);
                else if (chunk > 0)
                    next_ = next_of_backward(segment, chunk - 1, first);
                else if (h + 1 < heads_.key_heads)
                    next_ = next_of_replay(segment, 0, end);
                else
                    next_ = segment > 0 ? next_of_replay(segment - 1, 0, 0) : SpreadPrefetch();
                run_value_head(tokens_of(segment, chunk, hv), state(chunk, hv));
            }
            rows_.store_keys(key_tokens);
        }
    }

    // The states of the value heads of key head h.
    void replay(Index segment, Index h) {
        const Index K = heads_.key_size, V = heads_.value_size, first = h * heads_.group, end = first + heads_.group;
        for (Index hv = first; hv < end; ++hv) {
            load_state(kept_.states(segment), hv, K, V, buffer_, state_);
            transpose_state(K, V, state_, state(0, hv));
        }
        prepared_.use(writing_);
        const Index last = chunks(segment) - 1;
        for (Index chunk = 0; chunk < last; ++chunk) {
            const Tokens key_tokens = tokens_of(segment, chunk, h);
            prepared_.load_written_keys(key_tokens);
            for (Index hv = first; hv < end; ++hv) {
                if (hv + 1 < end)
                    next_ = next_of_replay(segment, chunk, hv + 1);
                else if (chunk + 1 < last)
                    next_ = next_of_replay(segment, chunk + 1, first);
                else
                    next_ = next_of_backward(segment, last, first);
                next_.spread_over(tiles(V, K));
                const Tokens at = tokens_of(segment, chunk, hv);
                if (prepared_.load_value_head(at)) {
                    replay_.run(at, prepared_.keys(), prepared_.gates(), kept_.u(), state(chunk, hv),
                                state(chunk + 1, hv), next_);
                } else {
                    prepared_.load_key_head(key_tokens);
                    restore_state(K, V, state(chunk, hv), state_);
                    tokens_.pass(at, prepared_.keys(), prepared_.gates(), state_);
                    transpose_state(K, V, state_, state(chunk + 1, hv));
                }
            }
        }
        prepared_.use(heads_);
    }

    void run_value_head(const Tokens& at, const float* state) {
        if (prepared_.load_value_head(at) && !tokens_.is_wide(at.head))
            run_chunk(at, state);
        else
            run_tokens(at, state);
        rows_.store_gates(at, prepared_.gates(), d_);
    }

    // dO [n, V]·Sᵀ → dread_query [n, K], write_key·dS' + scoreᵀ·dO → dU [n, V] → (I + erase_score)⁻ᵀ → dR [n, V],
    // dR·Uᵀ → derase_score [n, n], and so on; the unfold makes dq, dk, dp [n, K] and dg [n, K|1] of them.
    void run_chunk(const Tokens& at, const float* state) {
        const Index K = heads_.key_size, V = heads_.value_size;
        const StateOnly dstate = dstates_.head(at.head);
        const bool first = is_first_of_group(at.head);
        const KeyChunk<P>& keys = prepared_.keys();
        const GateChunk& gates = prepared_.gates();
        ChunkGradients<P> d = d_;  // of the group's first head: in place
        if (first) d.dq = rows_.first_dq(), d.dk = rows_.first_dk();
        next_.spread_over(tiles(at.n, V) + tiles(K, V) + (heads_.erases() ? 3 : 2) * tiles(at.n, K));
        prepared_.fold(0, at.n, folded_);
        rows_.load_output(at, d);
        rows_.load_written(kept_.u(), at, d);
        transpose_state(K, V, dstate, d.dstate);
        scan_backward(heads_.erases(), reversed_.of(folded_), K, dstate, d, next_);
        rows_.store_values(at, gates.beta, d);
        scan_gradients(heads_.erases(), at.n, K, V, state, d, next_);
        if (heads_.has_channel_gate())
            ChannelUnfold<P>(heads_, keys, gates, at.n, folded_.state_decay, d, channel_unfold_).run();
        else
            SharedUnfold<P>(heads_, keys, gates, at.n, folded_.state_decay, d, unfold_).run();
        rows_.add_chunk(at.n, keys, gates.beta, first, d);
    }

    void run_tokens(const Tokens& at, const float* state) {
        restore_state(heads_.key_size, heads_.value_size, state, state_);
        tokens_.run(at, prepared_.keys(), prepared_.gates(), state_, grad_.d_o, dstates_.head(at.head));
        rows_.add_tokens(at, is_first_of_group(at.head), tokens_, d_);
    }

    const DeltaHeads& heads_;
    const DeltaGradients& grad_;
    DeltaHeads writing_;  // without q
    ChunkSizes<P> sizes_;
    Kept<P> kept_;
    Preparation<P> prepared_;
    Folded<P> folded_;
    Reversed<P> reversed_;
    StatePanels<P> state_;
    StateOnly dstates_;
    Replay<P> replay_;
    float* segment_states_;  // [chunks of a segment, group, V, K] transposed
    ChunkGradients<P> d_;
    UnfoldScratch<P> unfold_;
    ChannelUnfoldScratch<P> channel_unfold_;
    float* buffer_;
    GradientRows<P> rows_;
    TokenBackward<P> tokens_;
    SpreadPrefetch next_;
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
    with_product(heads.bf16_products, [&](auto p) { return run_heads<decltype(p)>(heads, scratch, grad); });
}

}  // namespace

const DeltaBackward delta_backward = {backward_scratch, run_backward};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
