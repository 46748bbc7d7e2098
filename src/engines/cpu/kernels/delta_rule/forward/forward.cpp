// The forward pass of the delta rules, chunk by chunk.
#include "engines/cpu/kernels/isa_unit.h"

#include "engines/cpu/kernels/delta_rule/forward/chunk.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

// A few key heads of one sequence with their value heads, chunk by chunk.
template <class P>
class ForwardPass {
  public:
    ForwardPass(const DeltaHeads& heads, Scratch& scratch)
        : heads_(heads),
          sizes_(forward_sizes<P>(heads)),
          prepared_(heads, sizes_, scratch),
          folded_(sizes_, scratch),
          states_(sizes_, heads.heads(), scratch),
          chunk_(heads, sizes_, scratch),
          tile_fold_(heads, scratch),
          tiles_(tile_fold_.is_used() ? heads.key_size : 0, scratch),
          rounded_until_(scratch.take<Index>(heads.heads())) {}

    void run(const DeltaOutput& out) {
        for (Index h = 0; h < heads_.heads(); ++h) {
            load_state(heads_.initial_state, h, heads_.key_size, heads_.value_size, chunk_.buffer(), states_.head(h));
            rounded_until_[h] = -1;
        }
        for (Index begin = 0, n = 0; begin < heads_.tokens; begin += n) {
            n = min(sizes_.rows, heads_.tokens - begin);
            if (out.states.data != nullptr) {
                const Index within = begin % out.state_interval;
                n = min(n, out.state_interval - within);
                if (within == 0) store_states(states_at(out.states, begin / out.state_interval, out.entries));
            }
            for (Index h = 0; h < heads_.heads(); ++h) {
                if (h % heads_.group == 0) is_loaded_ = false, loaded_by_tiles_ = 0;
                run_value_head({h, begin, n}, out);
            }
        }
        store_states(out.final_state);
    }

  private:
    void store_states(const DeltaStates& t) {
        if (t.data == nullptr) return;
        for (Index h = 0; h < heads_.heads(); ++h)
            store_state(t, h, heads_.key_size, heads_.value_size, chunk_.buffer(), states_.head(h));
    }

    // Steady tokens before others have their results from the chunk form, and the state is left to the token form.
    void run_value_head(const Tokens& at, const DeltaOutput& out) {
        const Index steady = prepared_.load_value_head(at) ? at.n : prepared_.count_steady(0, at.n);
        if constexpr (P::depth == 1)
            if (is_walked<P>(heads_)) {
                load_key_head(at);
                Prefetch ahead;
                ahead.add(out.o, at, heads_.value_size);
                add_next_work(at, ahead);
                return chunk_.run_walk(at, steady, prepared_, chunk_.all_columns(), states_.head(at.head), out, ahead);
            }
        if (steady > 0) run_chunk(at, steady, out);
        if (steady == at.n) return;
        load_key_head(at);
        chunk_.run_tokens(at, steady, prepared_, chunk_.all_columns(), states_.head(at.head), out);
    }

    // The first n tokens.
    void run_chunk(const Tokens& at, Index n, const DeltaOutput& out) {
        if (tile_fold_.fits(at.n, n, prepared_.gates()) && run_by_tiles(at, n, out)) return;
        load_key_head(at);
        Prefetch ahead;
        ahead.add(out.o, {at.head, at.begin, n}, heads_.value_size);
        add_next_work(at, ahead);
        prepared_.fold(0, n, folded_);
        folded_.prepare_write(heads_.key_size);
        chunk_.run({at.head, at.begin, n}, folded_, prepared_.beta(0), chunk_.all_columns(), states_.head(at.head), out,
                   ahead, n == at.n);
    }

    // Gives whether it could.
    bool run_by_tiles(const Tokens& at, Index n, const DeltaOutput& out) {
        const Tokens first{at.head, at.begin, n};
        const bool done = tile_fold_.run(first, prepared_.gates(), loaded_by_tiles_ == n, tiles_);
        loaded_by_tiles_ = done ? n : 0;
        if (!done) return false;
        Prefetch ahead;
        ahead.fetch_to_second_cache();
        add_next_work(at, ahead);
        if (!chunk_.passes_caches(out.o)) ahead.add(out.o, next_tokens(at), heads_.value_size);
        Index& until = rounded_until_[at.head];
        chunk_.run_tiles(first, tiles_, chunk_.all_columns(), states_.head(at.head), out, ahead, n == at.n,
                         until == at.begin);
        until = n == at.n ? at.begin + n : -1;
        return true;
    }

    void load_key_head(const Tokens& at) {
        if (!is_loaded_) prepared_.load_key_head({at.head / heads_.group, at.begin, at.n});
        is_loaded_ = true;
    }

    // What comes after these tokens of a value head: the next head, or the next chunk.
    Tokens next_tokens(const Tokens& at) const {
        const Index begin = at.begin + at.n;
        if (at.head + 1 < heads_.heads()) return {at.head + 1, at.begin, at.n};
        return {0, begin, min(sizes_.rows, heads_.tokens - begin)};
    }
    void add_next_work(const Tokens& at, Prefetch& ahead) const {
        const Tokens next = next_tokens(at);
        if (next.head % heads_.group == 0)
            for (const DeltaRows* t : {&heads_.q, &heads_.k, &heads_.p})
                ahead.add(*t, {next.head / heads_.group, next.begin, next.n}, heads_.key_size);
        ahead.add(heads_.v, next, heads_.value_size);
        if (heads_.has_channel_gate()) ahead.add(heads_.g, next, heads_.key_size);
    }

    const DeltaHeads& heads_;
    ChunkSizes<P> sizes_;
    Preparation<P> prepared_;
    Folded<P> folded_;
    StatePanels<P> states_;
    ForwardChunk<P> chunk_;
    TileFold<P> tile_fold_;
    TileChunk tiles_;
    Index* rounded_until_;       // [heads] the token whose chunk finds the state's operands
    bool is_loaded_ = false;     // the rows of the key head
    Index loaded_by_tiles_ = 0;  // so many of them
};

template <class P>
std::size_t count_scratch(const DeltaHeads& heads) {
    Scratch scratch(nullptr);
    const ForwardPass<P> pass(heads, scratch);
    return scratch.used();
}

template <class P>
void run_head(const DeltaHeads& heads, std::byte* memory, const DeltaOutput& out) {
    Scratch scratch(memory);
    ForwardPass<P>(heads, scratch).run(out);
}

std::size_t forward_scratch(const DeltaHeads& heads) {
    return with_product(heads.bf16_products, [&](auto p) { return count_scratch<decltype(p)>(heads); });
}

void run_forward(const DeltaHeads& heads, std::byte* scratch, const DeltaOutput& out) {
    compute_with(heads.bf16_products, [&](auto p) { return run_head<decltype(p)>(heads, scratch, out); });
}

}  // namespace

const DeltaForward delta_forward = {forward_scratch, run_forward};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
