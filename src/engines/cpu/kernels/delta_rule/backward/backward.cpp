#include "engines/cpu/kernels/delta_rule/backward/backward.h"

#include "engines/cpu/kernels/delta_rule/backward/results.h"
#include "engines/cpu/kernels/delta_rule/backward/scan.h"
#include "engines/cpu/kernels/delta_rule/backward/tokens.h"
#include "engines/cpu/kernels/delta_rule/backward/unfold_channel_gate.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

// More rows would cost more in pairs, and what a chunk works with would no longer fit a core's cache; fewer, more for
// the states. Whole register tiles.
constexpr Index most_rows = 48;
static_assert(most_rows <= largest_chunk);

Index chunk_rows(const DeltaHeads& heads) {
    return heads.tokens < most_rows ? heads.tokens : most_rows;
}

// What the sweep saves of every chunk of every value head.
template <class P>
struct Saved {
    float* state;   // [V, K] the transposed state that enters
    Element<P>* U;  // [n, V]
};

// Memory that is asked for line by line between register tiles.
struct Ahead {
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
    BackwardPass(const DeltaHeads& heads, Scratch& scratch)
        : heads_(heads),
          writing_(writing_heads(heads)),
          channels_(heads.has_channel_gate() ? heads.key_size : 1),
          sizes_{heads.key_size, heads.value_size, chunk_rows(heads)},
          keys_(sizes_, heads.rule.own_p, scratch),
          pairs_(sizes_, scratch),
          gates_(sizes_, heads.has_channel_gate(), heads.rule.erase == core::Erase::from_previous_state, scratch,
                 heads.raw_gate != core::RawGate::none),
          folded_(sizes_, scratch),
          reversed_(sizes_, scratch),
          states_(sizes_, heads.heads(), scratch),
          dstates_({heads.key_size, heads.value_size, 0}, heads.heads(), scratch),
          d_(sizes_, heads.has_channel_gate(), scratch),
          unfold_(sizes_, heads.rule.own_p, scratch),
          channel_unfold_(sizes_, heads.has_channel_gate(), scratch),
          stage_(scratch.take<float>(sizes_.value_columns() + 2 * sizes_.key_row() + 2 * sizes_.pair_row())),
          sums_(sizes_, scratch),
          saved_states_(scratch.take<float>(chunks() * heads.heads() * transposed_state(sizes_))),
          saved_U_(scratch.take<Element<P>>(chunks() * heads.heads() * sizes_.rows * d_.value_row)),
          tokens_(heads, sizes_, scratch) {}

    void run(const DeltaGradients& grad) {
        const Index K = heads_.key_size, V = heads_.value_size;
        for (Index i = 0; i < heads_.heads() * gate_sums(channels_); ++i) grad.gate_sums[i] = 0;
        for (Index h = 0; h < heads_.heads(); ++h) {
            load_state(heads_.initial_state, h, K, V, stage_, states_.head(h));
            load_state(grad.dfinal_state, h, K, V, stage_, dstates_.head(h));
        }
        for (Index chunk = 0; chunk < chunks(); ++chunk)
            for (Index h = 0; h < heads_.heads(); ++h) {
                if (h % heads_.group == 0) load_keys<P>(writing_, key_tokens(chunk, h), keys_, pairs_);
                next_rows_ = h + 1 < heads_.heads() ? sweep_ahead(chunk, h + 1) : sweep_ahead(chunk + 1, 0);
                sweep(tokens_of(chunk, h), saved(chunk, h));
            }
        tokens_.begin();
        for (Index chunk = chunks(); chunk-- > 0;)
            for (Index h = 0; h < heads_.heads(); ++h) {
                if (h % heads_.group == 0) load_keys<P>(heads_, key_tokens(chunk, h), keys_, pairs_);
                next_rows_ = h + 1 < heads_.heads() ? next_rows_ahead(grad.d_o, chunk, h + 1)
                                                    : next_rows_ahead(grad.d_o, chunk - 1, 0);
                go_back(tokens_of(chunk, h), saved(chunk, h), grad);
                if (is_last_of_group(h)) store_key_gradients(key_tokens(chunk, h), grad);
            }
        if (grad.dinitial_state.data == nullptr) return;
        for (Index h = 0; h < heads_.heads(); ++h) store_state(grad.dinitial_state, h, K, V, stage_, dstates_.head(h));
    }

  private:
    // dq, dk, dp of a key head's chunk, summed over its value heads.
    struct KeySums {
        float *q, *k, *p;

        KeySums(const ChunkSizes<P>& sizes, Scratch& scratch)
            : q(scratch.take<float>(sizes.rows * sizes.key_row())),
              k(scratch.take<float>(sizes.rows * sizes.key_row())),
              p(scratch.take<float>(sizes.rows * sizes.key_row())) {}
    };

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
    bool is_last_of_group(Index h) const { return (h + 1) % heads_.group == 0; }
    Saved<P> saved(Index chunk, Index h) const {
        const Index at = chunk * heads_.heads() + h;
        return {saved_states_ + at * transposed_state(sizes_), saved_U_ + at * sizes_.rows * d_.value_row};
    }

    // What the sweep saved is asked for while products run, and so are the rows that come next and where the sweep
    // will save.
    Ahead saved_ahead(const Tokens& at, const Saved<P>& save, Ahead ahead = {}) const {
        ahead.memory.add(save.state, transposed_state(sizes_) * static_cast<Index>(sizeof(float)));
        ahead.memory.add(save.U, at.n * d_.value_row * static_cast<Index>(sizeof(Element<P>)));
        ahead.spread_over(tiles(at.n, heads_.value_size) + tiles(heads_.key_size, heads_.value_size));
        return ahead;
    }
    Ahead sweep_ahead(Index chunk, Index h) const {
        if (chunk >= chunks()) return {};
        return saved_ahead(tokens_of(chunk, h), saved(chunk, h), rows_of(writing_, chunk, h));
    }
    Ahead next_rows_ahead(const DeltaRows& d_o, Index chunk, Index h) const {
        if (chunk < 0) return {};
        Ahead ahead = rows_of(heads_, chunk, h);
        ahead.memory.add(d_o, tokens_of(chunk, h), heads_.value_size);
        ahead.spread_over((heads_.erases() ? 3 : 2) * tiles(sizes_.rows, heads_.key_size));
        return ahead;
    }
    Ahead rows_of(const DeltaHeads& heads, Index chunk, Index h) const {
        Ahead ahead;
        if (h % heads_.group == 0)
            for (const DeltaRows* t : {&heads.q, &heads.k, &heads.p})
                ahead.memory.add(*t, key_tokens(chunk, h), heads.key_size);
        ahead.memory.add(heads.v, tokens_of(chunk, h), heads.value_size);
        if (heads.has_channel_gate()) ahead.memory.add(heads.g, tokens_of(chunk, h), heads.key_size);
        return ahead;
    }

    bool load_gates_and_beta(const Tokens& at) {
        load_gates(heads_, at, gates_.row, gates_.bias, gates_.g, gates_.g_rest);
        load_beta(heads_, at, gates_.beta);
        return is_steady(heads_, gates_.g, gates_.row, at.n);
    }

    void sweep(const Tokens& at, const Saved<P>& save) {
        const StatePanels<P> state = states_.head(at.head);
        transpose_state(heads_.key_size, heads_.value_size, state, save.state);
        if (load_gates_and_beta(at))
            advance(at, state, save.U);
        else
            tokens_.pass(at, keys_, gates_, state);
    }

    // The state over the tokens at `at`, U to be saved.
    void advance(const Tokens& at, const StatePanels<P>& state, Element<P>* saved_U) {
        fold(writing_, at);
        prefetch_first_rows(heads_.v, at, heads_.value_size);
        const auto v = [&](Index i) {
            prefetch_row_ahead(heads_.v, at, i, heads_.value_size);
            return row_at(heads_.v, at.head, at.begin + i, heads_.v.column);
        };
        load_values(at.n, heads_.value_size, v, gates_.beta, stage_, {0, state.columns()}, state);
        const auto ask_for_next = [this] { next_rows_(); };
        for (Index c = 0; c < state.columns(); c += NR) {
            const auto panel = state.panel(c);
            if constexpr (P::depth == 2) round_to_pairs(heads_.key_size, panel.width, panel.state, panel.operand);
            if (heads_.erases())
                solve(folded_, panel, next_rows_.memory, next_rows_.lines_at_once);
            else if constexpr (P::depth == 2)
                round_to_pairs(at.n, panel.width, panel.rows, panel.operand_rows);
            save_rows(at.n, c, panel.width, panel.operand_rows, d_.value_row, saved_U);
            product<P>(heads_.key_size, panel.width, {folded_.write_key, 1, folded_.write_row},
                       {panel.operand_rows, depth_of<P>(at.n)},
                       {panel.state, panel.width, Start::scale, folded_.state_decay}, nullptr, nullptr, ask_for_next);
        }
    }

    void fold(const DeltaHeads& heads, const Tokens& at) {
        folded_.n = at.n;
        if (heads_.has_channel_gate())
            ChannelFold<P>(heads, keys_, gates_, pairs_, folded_).run();
        else
            fold_shared_gate(heads, keys_, gates_, folded_);
    }

    void go_back(const Tokens& at, const Saved<P>& save, const DeltaGradients& grad) {
        if (load_gates_and_beta(at) && !tokens_.is_wide(at.head))
            go_back_over(at, save, grad);
        else
            go_back_by_tokens(at, save, grad);
        store_beta_gradient(heads_, grad.dbeta, at, gates_.beta, d_.dbeta, stage_);
        GateAdjoint(heads_, at, gates_.bias, stage_, grad.gate_sums + at.head * gate_sums(channels_))
            .store_to(grad.dg, gates_.g, d_.dg, d_.key_row);
    }

    void go_back_over(const Tokens& at, const Saved<P>& save, const DeltaGradients& grad) {
        const Index K = heads_.key_size, V = heads_.value_size;
        const StateOnly dstate = dstates_.head(at.head);
        const bool first = at.head % heads_.group == 0;
        ChunkGradients<P> d = d_;  // of the group's first head: in place
        if (first) d.dq = sums_.q, d.dk = sums_.k;
        Ahead saved = saved_ahead(at, save);
        fold(heads_, at);
        load_output_gradients(grad.d_o, at, d);
        transpose_state(K, V, dstate, d.dstate);
        scan_backward(heads_.erases(), reversed_.of(folded_), K, dstate, d, saved);
        store_value_gradients(at, gates_.beta, d, grad);
        scan_gradients(heads_.erases(), at.n, K, V, save.state, save.U, d, next_rows_);
        if (heads_.has_channel_gate())
            ChannelUnfold<P>(heads_, keys_, gates_, at.n, folded_.state_decay, d, channel_unfold_).run();
        else
            SharedUnfold<P>(heads_, keys_, gates_, at.n, folded_.state_decay, d, unfold_).run();
        add_key_gradients(at.n, gates_.beta, first, d);
    }

    void go_back_by_tokens(const Tokens& at, const Saved<P>& save, const DeltaGradients& grad) {
        const Index K = heads_.key_size;
        const StatePanels<P> state = states_.head(at.head);
        restore_state(K, heads_.value_size, save.state, state);
        tokens_.run(at, keys_, gates_, state, grad.d_o, dstates_.head(at.head));
        const bool first = at.head % heads_.group == 0;
        const auto add = [first](double x, float& to) {
            to = static_cast<float>(first ? x : x + static_cast<double>(to));
        };
        for (Index i = 0; i < at.n; ++i) {
            const Index row = i * d_.key_row;
            for (Index m = K; m < round_up(K, W); ++m)  // whole vectors are read
                sums_.q[row + m] = sums_.k[row + m] = sums_.p[row + m] = 0;
            for (Index m = 0; m < K; ++m) {
                add(tokens_.dq(i)[m], sums_.q[row + m]);
                add(heads_.rule.own_p ? tokens_.dk(i)[m] : tokens_.dk(i)[m] + tokens_.dp(i)[m], sums_.k[row + m]);
                if (heads_.rule.own_p) add(tokens_.dp(i)[m], sums_.p[row + m]);
            }
            d_.dbeta[i] = static_cast<float>(tokens_.dbeta(i));
            double dg = 0;  // of all channels
            for (Index m = 0; m < K; ++m) {
                dg += tokens_.dg(i)[m];
                if (heads_.has_channel_gate()) d_.dg[row + m] = static_cast<float>(tokens_.dg(i)[m]);
            }
            if (!heads_.has_channel_gate()) d_.dg[i] = static_cast<float>(dg);
            if (grad.dv.data != nullptr)
                store_row_at(grad.dv, at.head, at.begin + i, heads_.value_size, grad.dv.column, tokens_.dv(i));
        }
    }

    void load_output_gradients(const DeltaRows& d_o, const Tokens& at, const ChunkGradients<P>& d) {
        for (Index c = 0; c < d.columns; c += W) store(d.v + c, splat(0.0F));
        prefetch_first_rows(d_o, at, heads_.value_size);
        for (Index i = 0; i < at.n; ++i) {
            prefetch_row_ahead(d_o, at, i, heads_.value_size);
            if (d_o.data != nullptr) load_row(row_at(d_o, at.head, at.begin + i, d_o.column), heads_.value_size, d.v);
            for (Index c = 0; c < d.columns; c += NR) {
                const auto panel = d.panel(c, at.n);
                for (Index m = 0; m < panel.width; m += W) {
                    const F x = load(d.v + c + m);
                    store(panel.d_o + i * panel.width + m, x);
                    store_a(d.d_o + i * d.value_row + (c + m) / P::depth, x, P{});
                }
            }
        }
    }

    // dR as a left operand, dv = β∘dR, and the part of dβ in β∘v.
    void store_value_gradients(const Tokens& at, const float* beta, const ChunkGradients<P>& d,
                               const DeltaGradients& grad) {
        prefetch_first_rows(heads_.v, at, heads_.value_size);
        prefetch_first_rows(grad.dv, at, heads_.value_size);
        for (Index i = 0; i < at.n; ++i) {
            prefetch_row_ahead(heads_.v, at, i, heads_.value_size);
            prefetch_row_ahead(grad.dv, at, i, heads_.value_size);
            load_row(row_at(heads_.v, at.head, at.begin + i, heads_.v.column), heads_.value_size, d.v);
            F along = splat(0.0F);
            for (Index c = 0; c < d.columns; c += NR) {
                const auto panel = d.panel(c, at.n);
                for (Index m = 0; m < panel.width; m += W) {
                    const F x = load(panel.dR + i * panel.width + m);
                    store_a(d.dR + i * d.value_row + (c + m) / P::depth, x, P{});
                    along = fma(x, load(d.v + c + m), along);
                    store(d.v + c + m, splat(beta[i]) * x);
                }
            }
            d.dbeta[i] = sum(along);
            if (grad.dv.data != nullptr)
                store_row_at(grad.dv, at.head, at.begin + i, heads_.value_size, grad.dv.column, d.v);
        }
    }

    // The group's sums, and the part of dβ in the key that erases.
    void add_key_gradients(Index n, const float* beta, bool first, const ChunkGradients<P>& d) {
        const Index columns = round_up(heads_.key_size, W);
        for (Index i = 0; i < n; ++i) {
            const Index row = i * d.key_row;
            for (Index m = 0; !first && m < columns; m += W) {
                store(sums_.q + row + m, load(sums_.q + row + m) + load(d.dq + row + m));
                store(sums_.k + row + m, load(sums_.k + row + m) + load(d.dk + row + m));
            }
            if (!heads_.erases()) continue;
            d.dbeta[i] += dot(keys_.p + i * keys_.row, d.de + row, columns);
            float* dp = heads_.rule.own_p ? sums_.p : sums_.k;
            const bool starts = heads_.rule.own_p && first;
            for (Index m = 0; m < columns; m += W) {
                const F x = splat(beta[i]) * load(d.de + row + m);
                store(dp + row + m, starts ? x : load(dp + row + m) + x);
            }
        }
    }

    void store_key_gradients(const Tokens& at, const DeltaGradients& grad) {
        const auto store_one = [&](const DeltaRows& given, const DeltaRows& t, float* dy) {
            store_key_gradient(given, t, at, heads_.key_size, heads_.l2norm, dy, d_.key_row, stage_);
        };
        store_one(heads_.q, grad.dq, sums_.q);
        store_one(heads_.k, grad.dk, sums_.k);
        if (heads_.rule.own_p) store_one(heads_.p, grad.dp, sums_.p);
    }

    const DeltaHeads& heads_;
    DeltaHeads writing_;  // without q
    Index channels_;
    ChunkSizes<P> sizes_;
    KeyChunk<P> keys_;
    PairScratch<P> pairs_;
    GateChunk gates_;
    Folded<P> folded_;
    Reversed<P> reversed_;
    StatePanels<P> states_;
    StateOnly dstates_;
    ChunkGradients<P> d_;
    UnfoldScratch<P> unfold_;
    ChannelUnfoldScratch<P> channel_unfold_;
    float* stage_;
    KeySums sums_;
    float* saved_states_;
    Element<P>* saved_U_;
    TokenBackward<P> tokens_;
    Ahead next_rows_;
};

template <class P>
std::size_t count_scratch(const DeltaHeads& heads) {
    Scratch scratch(nullptr);
    const BackwardPass<P> pass(heads, scratch);
    return scratch.used();
}

template <class P>
void run_heads(const DeltaHeads& heads, std::byte* memory, const DeltaGradients& grad) {
    [[maybe_unused]] const typename P::Tiles tiles;
    Scratch scratch(memory);
    BackwardPass<P>(heads, scratch).run(grad);
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
