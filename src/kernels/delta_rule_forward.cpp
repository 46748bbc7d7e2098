#include "kernels/delta_rule_forward.h"

#include "kernels/delta_rule_fold.h"
#include "kernels/delta_rule_keys.h"
#include "kernels/delta_rule_scan.h"
#include "kernels/delta_rule_states.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

constexpr Index smaller(Index a, Index b) {
    return a < b ? a : b;
}

Index chunk_rows(const DeltaHead& head) {
    return head.tokens < largest_chunk ? head.tokens : largest_chunk;
}

// One key head of one sequence with its value heads.
template <class P>
class ForwardPass {
  public:
    ForwardPass(const DeltaHead& head, Scratch& scratch)
        : head_(head),
          sizes_{head.key_size, head.value_size, chunk_rows(head)},
          keys_(sizes_, head.rule.own_p, scratch),
          pairs_(sizes_, scratch),
          gates_(sizes_, head.has_channel_gate(), head.rule.erase == core::Erase::from_previous_state, scratch),
          folded_(sizes_, scratch),
          states_(sizes_, head.group, scratch),
          o_(scratch.take<float>(sizes_.rows * sizes_.value_columns())),
          stage_(scratch.take<float>(sizes_.value_columns())) {}

    void run(const DeltaOutput& out) {
        for (Index hv = 0; hv < head_.group; ++hv)
            load_state(head_.initial_state, hv, head_.key_size, head_.value_size, stage_, states_.head(hv));
        for (Index begin = 0, n = 0; begin < head_.tokens; begin += n) {
            n = smaller(sizes_.rows, head_.tokens - begin);
            if (out.states.data != nullptr) {
                const Index within = begin % out.state_interval;
                n = smaller(n, out.state_interval - within);
                if (within == 0) store_states(interval_states(out, begin));
            }
            load_keys<P>(head_, {0, begin, n}, keys_, pairs_);
            for (Index hv = 0; hv < head_.group; ++hv) run_value_head({hv, begin, n}, out);
        }
        if (out.final_state.data != nullptr) store_states(out.final_state);
    }

  private:
    void store_states(const DeltaStates& t) {
        for (Index hv = 0; hv < head_.group; ++hv)
            store_state(t, hv, head_.key_size, head_.value_size, stage_, states_.head(hv));
    }

    static DeltaStates interval_states(const DeltaOutput& out, Index begin) {
        DeltaStates t = out.states;
        const Index at = begin / out.state_interval * t.interval * static_cast<Index>(core::size_of(t.dtype));
        t.data = static_cast<std::byte*>(t.data) + at;
        return t;
    }

    void run_value_head(const Tokens& at, const DeltaOutput& out) {
        const bool channel = head_.has_channel_gate();
        load_gates(head_, at, gates_.row, gates_.bias, gates_.g);
        load_beta(head_, at, gates_.beta);
        if (is_steady(gates_.g, gates_.row, at.n, channel ? head_.key_size : 1))
            return run_piece(at, keys_, gates_, out);
        for (Index i = 0; i < at.n; ++i)
            run_piece({at.hv, at.begin + i, 1}, keys_.from(i), gates_.from(i, channel), out);
    }

    void run_piece(const Tokens& at, const KeyChunk<P>& keys, const GateChunk& gates, const DeltaOutput& out) {
        const StatePanels<P> state = states_.head(at.hv);
        const auto v = [&](Index i) { return row_at(head_.v, at.hv, at.begin + i, head_.v.column); };
        const auto o = [&](Index i) { return row_at(out.o, at.hv, at.begin + i, out.o.column); };
        folded_.n = at.n;
        fold_shared_gate(head_, keys, gates, folded_);
        load_values(at.n, head_.value_size, v, gates.beta, stage_, state);
        const Index columns = state.columns();
        const bool direct =
            out.o.data != nullptr && out.o.dtype == DType::f32 && out.o.column == 1 && columns == head_.value_size;
        if (direct)
            return scan(head_.erases(), folded_, head_.key_size, {0, columns}, state,
                        static_cast<float*>(const_cast<void*>(o(0).data)), out.o.row);
        scan(head_.erases(), folded_, head_.key_size, {0, columns}, state, o_, columns);
        if (out.o.data == nullptr) return;
        for (Index i = 0; i < at.n; ++i)
            store_row(o_ + i * columns, head_.value_size, const_cast<void*>(o(i).data), out.o.dtype, out.o.column);
    }

    const DeltaHead& head_;
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
std::size_t count_scratch(const DeltaHead& head) {
    Scratch scratch(nullptr);
    const ForwardPass<P> pass(head, scratch);
    return scratch.used();
}

template <class P>
void run_head(const DeltaHead& head, std::byte* memory, const DeltaOutput& out) {
    Scratch scratch(memory);
    ForwardPass<P>(head, scratch).run(out);
}

std::size_t forward_scratch(const DeltaHead& head) {
    if constexpr (has_bf16_products)
        if (head.bf16_products) return count_scratch<PairProduct>(head);
    return count_scratch<FloatProduct>(head);
}

void run_forward(const DeltaHead& head, std::byte* scratch, const DeltaOutput& out) {
    if constexpr (has_bf16_products)
        if (head.bf16_products) return run_head<PairProduct>(head, scratch, out);
    run_head<FloatProduct>(head, scratch, out);
}

}  // namespace

const DeltaForward delta_forward = {forward_scratch, run_forward};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
