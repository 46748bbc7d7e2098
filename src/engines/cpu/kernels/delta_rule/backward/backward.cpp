#include "engines/cpu/kernels/delta_rule/backward/backward.h"

#include "engines/cpu/kernels/delta_rule/backward/results.h"
#include "engines/cpu/kernels/delta_rule/backward/scan.h"
#include "engines/cpu/kernels/delta_rule/backward/tokens.h"
#include "engines/cpu/kernels/delta_rule/backward/unfold_channel_gate.h"
#include "engines/cpu/kernels/delta_rule/chunk/prepare.h"
#include "engines/cpu/kernels/delta_rule/forward/scan.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

// More rows would cost more in pairs, and what a chunk works with would no longer fit a core's cache; fewer, more for
// the states. Whole register tiles.
constexpr Index backward_chunk = 48;
static_assert(backward_chunk <= largest_chunk);

Index chunk_rows(const DeltaHeads& heads) {
    return min(heads.tokens, backward_chunk);
}

// What the sweep saves of every chunk of every value head.
template <class P>
struct Saved {
    float* state;   // [V, K] the transposed state that enters
    Element<P>* U;  // [n, V]
};

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

// A few key heads of one sequence with their value heads: a sweep forward that saves states and U, then the chunks from
// the last to the first.
template <class P>
class BackwardPass {
  public:
    BackwardPass(const DeltaHeads& heads, const DeltaGradients& grad, Scratch& scratch)
        : heads_(heads),
          grad_(grad),
          writing_(writing_heads(heads)),
          sizes_{heads.key_size, heads.value_size, chunk_rows(heads)},
          prepared_(heads, sizes_, scratch),
          folded_(sizes_, scratch),
          reversed_(sizes_, scratch),
          states_(sizes_, heads.heads(), scratch),
          dstates_({heads.key_size, heads.value_size, 0}, heads.heads(), scratch),
          d_(sizes_, heads.has_channel_gate(), scratch),
          unfold_(sizes_, heads.rule.own_p, scratch),
          channel_unfold_(sizes_, heads.has_channel_gate(), scratch),
          buffer_(scratch.take<float>(sizes_.value_columns() + 2 * sizes_.key_row() + 2 * sizes_.pair_row())),
          rows_(heads, grad, sizes_, buffer_, scratch),
          saved_states_(scratch.take<float>(chunks() * heads.heads() * transposed_state(sizes_))),
          saved_U_(scratch.take<Element<P>>(chunks() * heads.heads() * sizes_.rows * d_.value_row)),
          tokens_(heads, sizes_, scratch) {}

    void run() {
        const Index K = heads_.key_size, V = heads_.value_size;
        for (Index i = 0; i < heads_.heads() * gate_sums(heads_.channels()); ++i) grad_.gate_sums[i] = 0;
        for (Index h = 0; h < heads_.heads(); ++h) {
            load_state(heads_.initial_state, h, K, V, buffer_, states_.head(h));
            load_state(grad_.dfinal_state, h, K, V, buffer_, dstates_.head(h));
        }
        prepared_.use(writing_);
        for (Index chunk = 0; chunk < chunks(); ++chunk)
            for (Index h = 0; h < heads_.heads(); ++h) {
                if (is_first_of_group(h)) prepared_.load_key_head(key_tokens(chunk, h));
                next_ = h + 1 < heads_.heads() ? next_of_sweep(chunk, h + 1) : next_of_sweep(chunk + 1, 0);
                sweep(tokens_of(chunk, h), saved(chunk, h));
            }
        prepared_.use(heads_);
        tokens_.begin();
        for (Index chunk = chunks(); chunk-- > 0;)
            for (Index h = 0; h < heads_.heads(); ++h) {
                if (is_first_of_group(h)) prepared_.load_key_head(key_tokens(chunk, h));
                next_ = h + 1 < heads_.heads() ? next_of_backward(chunk, h + 1) : next_of_backward(chunk - 1, 0);
                run_value_head(tokens_of(chunk, h), saved(chunk, h));
                if (is_last_of_group(h)) rows_.store_keys(key_tokens(chunk, h));
            }
        if (grad_.dinitial_state.data == nullptr) return;
        for (Index h = 0; h < heads_.heads(); ++h)
            store_state(grad_.dinitial_state, h, K, V, buffer_, dstates_.head(h));
    }

  private:
    static DeltaHeads writing_heads(DeltaHeads heads) {
        heads.q = {};
        return heads;
    }
    Index chunks() const { return sizes_.rows == 0 ? 0 : (heads_.tokens + sizes_.rows - 1) / sizes_.rows; }
    Tokens tokens_of(Index chunk, Index h) const {
        const Index begin = chunk * sizes_.rows;
        return {h, begin, min(sizes_.rows, heads_.tokens - begin)};
    }
    Tokens key_tokens(Index chunk, Index h) const {
        const Tokens at = tokens_of(chunk, h);
        return {h / heads_.group, at.begin, at.n};
    }
    bool is_first_of_group(Index h) const { return h % heads_.group == 0; }
    bool is_last_of_group(Index h) const { return (h + 1) % heads_.group == 0; }
    Saved<P> saved(Index chunk, Index h) const {
        const Index at = chunk * heads_.heads() + h;
        return {saved_states_ + at * transposed_state(sizes_), saved_U_ + at * sizes_.rows * d_.value_row};
    }

    // What the sweep saved is prefetched while products run, and so are the rows that come next and where the sweep
    // will save.
    SpreadPrefetch with_saved(const Tokens& at, const Saved<P>& save, SpreadPrefetch ahead = {}) const {
        ahead.memory.add(save.state, transposed_state(sizes_) * static_cast<Index>(sizeof(float)));
        ahead.memory.add(save.U, at.n * d_.value_row * static_cast<Index>(sizeof(Element<P>)));
        ahead.spread_over(tiles(at.n, heads_.value_size) + tiles(heads_.key_size, heads_.value_size));
        return ahead;
    }
    SpreadPrefetch next_of_sweep(Index chunk, Index h) const {
        if (chunk >= chunks()) return {};
        return with_saved(tokens_of(chunk, h), saved(chunk, h), rows_of(writing_, chunk, h));
    }
    SpreadPrefetch next_of_backward(Index chunk, Index h) const {
        if (chunk < 0) return {};
        SpreadPrefetch ahead = rows_of(heads_, chunk, h);
        ahead.memory.add(grad_.d_o, tokens_of(chunk, h), heads_.value_size);
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
        prepared_.fold(0, at.n, folded_);
        folded_.prepare_write(heads_.key_size);
        prefetch_first(heads_.v, at, heads_.value_size);
        const auto v = [&](Index i) {
            prefetch_ahead(heads_.v, at, i, heads_.value_size);
            return row_at(heads_.v, at.head, at.begin + i, heads_.v.column);
        };
        load_values(at.n, heads_.value_size, v, prepared_.beta(0), buffer_, {0, state.columns()}, state);
        const auto prefetch_next = [this] { next_(); };
        for (Index c = 0; c < state.columns(); c += NR) {
            const auto panel = state.panel(c);
            if constexpr (P::depth == 2) round_to_pairs(heads_.key_size, panel.width, panel.state, panel.operand);
            if (heads_.erases())
                solve(folded_, panel, next_.memory, next_.lines_at_once);
            else if constexpr (P::depth == 2)
                round_to_pairs(at.n, panel.width, panel.rows, panel.operand_rows);
            copy_rows_as_a(at.n, c, panel.width, panel.operand_rows, d_.value_row, saved_U);
            product<P>(heads_.key_size, panel.width, folded_.write(), {panel.operand_rows, depth_of<P>(at.n)},
                       {panel.state, panel.width, Start::scale, folded_.state_decay}, nullptr, nullptr, prefetch_next);
        }
    }

    void run_value_head(const Tokens& at, const Saved<P>& save) {
        if (prepared_.load_value_head(at) && !tokens_.is_wide(at.head))
            run_chunk(at, save);
        else
            run_tokens(at, save);
        rows_.store_gates(at, prepared_.gates(), d_);
    }

    // dO [n, V]·Sᵀ → dread_query [n, K], write_key·dS' + scoreᵀ·dO → dU [n, V] → (I + erase_score)⁻ᵀ → dR [n, V],
    // dR·Uᵀ → derase_score [n, n], and so on; the unfold makes dq, dk, dp [n, K] and dg [n, K|1] of them.
    void run_chunk(const Tokens& at, const Saved<P>& save) {
        const Index K = heads_.key_size, V = heads_.value_size;
        const StateOnly dstate = dstates_.head(at.head);
        const bool first = is_first_of_group(at.head);
        const KeyChunk<P>& keys = prepared_.keys();
        const GateChunk& gates = prepared_.gates();
        ChunkGradients<P> d = d_;  // of the group's first head: in place
        if (first) d.dq = rows_.first_dq(), d.dk = rows_.first_dk();
        SpreadPrefetch saved = with_saved(at, save);
        prepared_.fold(0, at.n, folded_);
        rows_.load_output(at, d);
        transpose_state(K, V, dstate, d.dstate);
        scan_backward(heads_.erases(), reversed_.of(folded_), K, dstate, d, saved);
        rows_.store_values(at, gates.beta, d);
        scan_gradients(heads_.erases(), at.n, K, V, save.state, save.U, d, next_);
        if (heads_.has_channel_gate())
            ChannelUnfold<P>(heads_, keys, gates, at.n, folded_.state_decay, d, channel_unfold_).run();
        else
            SharedUnfold<P>(heads_, keys, gates, at.n, folded_.state_decay, d, unfold_).run();
        rows_.add_chunk(at.n, keys, gates.beta, first, d);
    }

    void run_tokens(const Tokens& at, const Saved<P>& save) {
        const Index K = heads_.key_size;
        const StatePanels<P> state = states_.head(at.head);
        restore_state(K, heads_.value_size, save.state, state);
        tokens_.run(at, prepared_.keys(), prepared_.gates(), state, grad_.d_o, dstates_.head(at.head));
        rows_.add_tokens(at, is_first_of_group(at.head), tokens_, d_);
    }

    const DeltaHeads& heads_;
    const DeltaGradients& grad_;
    DeltaHeads writing_;  // without q
    ChunkSizes<P> sizes_;
    Preparation<P> prepared_;
    Folded<P> folded_;
    Reversed<P> reversed_;
    StatePanels<P> states_;
    StateOnly dstates_;
    ChunkGradients<P> d_;
    UnfoldScratch<P> unfold_;
    ChannelUnfoldScratch<P> channel_unfold_;
    float* buffer_;
    GradientRows<P> rows_;
    float* saved_states_;
    Element<P>* saved_U_;
    TokenBackward<P> tokens_;
    SpreadPrefetch next_;
};

template <class P>
std::size_t count_scratch(const DeltaHeads& heads) {
    Scratch scratch(nullptr);
    const DeltaGradients none;
    const BackwardPass<P> pass(heads, none, scratch);
    return scratch.used();
}

template <class P>
void run_heads(const DeltaHeads& heads, std::byte* memory, const DeltaGradients& grad) {
    [[maybe_unused]] const typename P::Tiles tiles;
    Scratch scratch(memory);
    BackwardPass<P>(heads, grad, scratch).run();
}

std::size_t backward_scratch(const DeltaHeads& heads) {
    return with_product(heads.bf16_products, [&](auto p) { return count_scratch<decltype(p)>(heads); });
}

void run_backward(const DeltaHeads& heads, std::byte* scratch, const DeltaGradients& grad) {
    with_product(heads.bf16_products, [&](auto p) { return run_heads<decltype(p)>(heads, scratch, grad); });
}

}  // namespace

const DeltaBackward delta_backward = {backward_scratch, run_backward};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
