#include "kernels/delta_rule_forward.h"

#include "kernels/delta_rule_channel_gate.h"
#include "kernels/delta_rule_keys.h"
#include "kernels/delta_rule_scan.h"
#include "kernels/delta_rule_states.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

constexpr Index smaller(Index a, Index b) {
    return a < b ? a : b;
}

Index chunk_rows(const DeltaHeads& heads) {
    return heads.tokens < largest_chunk ? heads.tokens : largest_chunk;
}

// A few key heads of one sequence with their value heads, chunk by chunk.
template <class P>
class ForwardPass {
  public:
    ForwardPass(const DeltaHeads& heads, Scratch& scratch)
        : heads_(heads),
          sizes_{heads.key_size, heads.value_size, chunk_rows(heads)},
          keys_(sizes_, heads.rule.own_p, scratch),
          pairs_(sizes_, scratch),
          gates_(sizes_, heads.has_channel_gate(), heads.rule.erase == core::Erase::from_previous_state, scratch,
                 heads.raw_gate != core::RawGate::none),
          folded_(sizes_, scratch),
          states_(sizes_, heads.heads(), scratch),
          o_(scratch.take<float>(sizes_.rows * sizes_.value_columns())),
          stage_(scratch.take<float>(sizes_.value_columns())) {}

    void run(const DeltaOutput& out) {
        for (Index h = 0; h < heads_.heads(); ++h)
            load_state(heads_.initial_state, h, heads_.key_size, heads_.value_size, stage_, states_.head(h));
        for (Index begin = 0, n = 0; begin < heads_.tokens; begin += n) {
            n = smaller(sizes_.rows, heads_.tokens - begin);
            if (out.states.data != nullptr) {
                const Index within = begin % out.state_interval;
                n = smaller(n, out.state_interval - within);
                if (within == 0) store_states(interval_states(out, begin));
            }
            for (Index h = 0; h < heads_.heads(); ++h) {
                if (h % heads_.group == 0) load_keys<P>(heads_, {h / heads_.group, begin, n}, keys_, pairs_);
                run_value_head({h, begin, n}, out);
            }
        }
        if (out.final_state.data != nullptr) store_states(out.final_state);
    }

  private:
    void store_states(const DeltaStates& t) {
        for (Index h = 0; h < heads_.heads(); ++h)
            store_state(t, h, heads_.key_size, heads_.value_size, stage_, states_.head(h));
    }

    static DeltaStates interval_states(const DeltaOutput& out, Index begin) {
        DeltaStates t = out.states;
        const Index at = begin / out.state_interval * t.interval * static_cast<Index>(core::size_of(t.dtype));
        t.data = static_cast<std::byte*>(t.data) + at;
        return t;
    }

    void run_value_head(const Tokens& at, const DeltaOutput& out) {
        const bool channel = heads_.has_channel_gate();
        load_gates(heads_, at, gates_.row, gates_.bias, gates_.g, gates_.g_rest);
        load_beta(heads_, at, gates_.beta);

        Prefetch ahead = next_work(at);
        if (is_steady(gates_.g, gates_.row, at.n, channel ? heads_.key_size : 1))
            return run_piece(at, keys_, gates_, out, ahead);
        for (Index i = 0; i < at.n; ++i)
            run_piece({at.head, at.begin + i, 1}, keys_.from(i), gates_.from(i, channel), out, ahead);
    }

    // What comes after these tokens of a value head: the next head, or the next chunk.
    Prefetch next_work(const Tokens& at) const {
        Tokens next{at.head + 1, at.begin, at.n};
        if (next.head == heads_.heads()) {
            const Index begin = at.begin + at.n;
            next = {0, begin, smaller(sizes_.rows, heads_.tokens - begin)};
        }
        Prefetch ahead;
        if (next.head % heads_.group == 0)
            for (const DeltaRows* t : {&heads_.q, &heads_.k, &heads_.p})
                ahead.add(*t, {next.head / heads_.group, next.begin, next.n}, heads_.key_size);
        ahead.add(heads_.v, next, heads_.value_size);
        if (heads_.has_channel_gate()) ahead.add(heads_.g, next, heads_.key_size);
        return ahead;
    }

    void run_piece(const Tokens& at, const KeyChunk<P>& keys, const GateChunk& gates, const DeltaOutput& out,
                   Prefetch& ahead) {
        const StatePanels<P> state = states_.head(at.head);
        const auto v = [&](Index i) { return row_at(heads_.v, at.head, at.begin + i, heads_.v.column); };
        const auto o = [&](Index i) { return row_at(out.o, at.head, at.begin + i, out.o.column); };
        folded_.n = at.n;
        if (heads_.has_channel_gate())
            ChannelFold<P>(heads_, keys, gates, pairs_, folded_).run();
        else
            fold_shared_gate(heads_, keys, gates, folded_);
        load_values(at.n, heads_.value_size, v, gates.beta, stage_, state);
        const Index columns = state.columns();
        const bool direct =
            out.o.data != nullptr && out.o.dtype == DType::f32 && out.o.column == 1 && columns == heads_.value_size;
        if (direct)
            return scan(heads_.erases(), folded_, heads_.key_size, {0, columns}, state,
                        static_cast<float*>(const_cast<void*>(o(0).data)), out.o.row, ahead);
        scan(heads_.erases(), folded_, heads_.key_size, {0, columns}, state, o_, columns, ahead);
        if (out.o.data == nullptr) return;
        for (Index i = 0; i < at.n; ++i)
            store_row(o_ + i * columns, heads_.value_size, const_cast<void*>(o(i).data), out.o.dtype, out.o.column);
    }

    const DeltaHeads& heads_;
    ChunkSizes<P> sizes_;
    KeyChunk<P> keys_;
    PairScratch<P> pairs_;
    GateChunk gates_;
    Folded<P> folded_;
    StatePanels<P> states_;
    float* o_;      // [n, V]
    float* stage_;  // [V]
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
    if constexpr (has_bf16_products)
        if (heads.bf16_products) return count_scratch<PairProduct>(heads);
    return count_scratch<FloatProduct>(heads);
}

void run_forward(const DeltaHeads& heads, std::byte* scratch, const DeltaOutput& out) {
    if constexpr (has_bf16_products)
        if (heads.bf16_products) return run_head<PairProduct>(heads, scratch, out);
    run_head<FloatProduct>(heads, scratch, out);
}

}  // namespace

const DeltaForward delta_forward = {forward_scratch, run_forward};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
