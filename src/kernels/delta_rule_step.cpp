#include "kernels/delta_rule_step.h"

#include "kernels/delta_rule_channel_gate.h"
#include "kernels/delta_rule_keys.h"
#include "kernels/delta_rule_step_state.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

// Beyond, the chunk form is faster.
constexpr Index most_tokens = 8;

// Rows of whole vectors, elements of a row side by side.
bool has_value_rows(const DeltaStates& t, const DeltaHeads& heads) {
    return t.value == 1 && heads.value_size % W == 0;
}
bool has_key_rows(const DeltaStates& t, const DeltaHeads& heads) {
    return t.key == 1 && heads.key_size % W == 0;
}

// A few tokens of a few key heads with their value heads.
class StepPass {
  public:
    StepPass(const DeltaHeads& heads, Scratch& scratch)
        : heads_(heads),
          sizes_{heads.key_size, heads.value_size, heads.tokens},
          keys_(sizes_, heads.rule.own_p, scratch),
          pairs_(sizes_, scratch),
          gates_(sizes_, heads.has_channel_gate(), heads.rule.erase == core::Erase::from_previous_state, scratch,
                 heads.raw_gate != core::RawGate::none),
          folded_(sizes_, scratch),
          values_(scratch.take<float>(sizes_.rows * sizes_.value_columns())),
          o_(scratch.take<float>(sizes_.rows * sizes_.value_columns())) {}

    void run(const DeltaOutput& out) {
        for (Index h = 0; h < heads_.heads(); ++h) {
            if (h % heads_.group == 0)
                load_keys<FloatProduct>(heads_, {h / heads_.group, 0, heads_.tokens}, keys_, pairs_);
            run_value_head(h, out);
        }
    }

  private:
    void run_value_head(Index h, const DeltaOutput& out) {
        const bool channel = heads_.has_channel_gate();
        const Tokens all{h, 0, heads_.tokens};
        load_gates(heads_, all, gates_.row, gates_.bias, gates_.g, gates_.g_rest);
        load_beta(heads_, all, gates_.beta);
        const DeltaStates& from = heads_.initial_state;
        const bool steady = is_steady(gates_.g, gates_.row, all.n, channel ? heads_.key_size : 1);
        const Index most = steady ? most_step_tokens : 1;
        for (Index i = 0; i < all.n; i += most) {
            const Index n = all.n - i < most ? all.n - i : most;
            step({h, i, n}, keys_.from(i), gates_.from(i, channel), i == 0 ? from : out.final_state, out);
        }
    }

    void step(const Tokens& at, const KeyChunk<FloatProduct>& keys, const GateChunk& gates, const DeltaStates& from,
              const DeltaOutput& out) {
        const Index row = sizes_.value_columns();
        folded_.n = at.n;
        if (heads_.has_channel_gate())
            ChannelFold<FloatProduct>(heads_, keys, gates, pairs_, folded_).run();
        else
            fold_shared_gate(heads_, keys, gates, folded_);
        for (Index i = 0; i < at.n; ++i) {
            float* values = values_ + i * row;
            load_row(row_at(heads_.v, at.head, at.begin + i, heads_.v.column), heads_.value_size, values);
            for (Index c = 0; c < row; c += W) store(values + c, splat(gates.beta[i]) * load(values + c));
        }
        if (from.dtype == DType::f32) pick_tokens<float>(at, from, out.final_state);
        if (from.dtype == DType::bf16) pick_tokens<core::bf16>(at, from, out.final_state);
        if (from.dtype == DType::f16) pick_tokens<core::f16>(at, from, out.final_state);
        for (Index i = 0; out.o.data != nullptr && i < at.n; ++i) {
            const Row o = row_at(out.o, at.head, at.begin + i, out.o.column);
            store_row(o_ + i * row, heads_.value_size, const_cast<void*>(o.data), o.dtype, o.step);
        }
    }

    template <class S>
    void pick_tokens(const Tokens& at, const DeltaStates& from, const DeltaStates& to) {
        constexpr auto steps = steps_of<S>(std::make_integer_sequence<int, most_step_tokens>{});
        const bool transposed = !has_value_rows(from, heads_);
        const StateView<S> state{static_cast<const S*>(from.data) + at.head * from.head,
                                 to.data == nullptr ? nullptr : static_cast<S*>(to.data) + at.head * to.head,
                                 transposed ? from.value : from.key, transposed ? to.value : to.key};
        steps[static_cast<std::size_t>(2 * (at.n - 1) + (transposed ? 1 : 0))](
            state, heads_.key_size, heads_.value_size, {folded_, heads_.erases(), values_, o_, sizes_.value_columns()});
    }

    template <class S>
    using Step = void (*)(const StateView<S>&, Index, Index, const StepRows&);

    template <class S, int... i>
    static constexpr std::array<Step<S>, 2 * most_step_tokens> steps_of(std::integer_sequence<int, i...> /*tokens*/) {
        std::array<Step<S>, 2 * most_step_tokens> steps{};
        ((steps[2 * i] = step_state<S, i + 1>, steps[2 * i + 1] = step_transposed_state<S, i + 1>), ...);
        return steps;
    }

    const DeltaHeads& heads_;
    ChunkSizes<FloatProduct> sizes_;
    KeyChunk<FloatProduct> keys_;
    PairScratch<FloatProduct> pairs_;
    GateChunk gates_;
    Folded<FloatProduct> folded_;
    float *values_, *o_;  // [n, V]
};

bool can_step(const DeltaHeads& heads, const DeltaOutput& out) {
    const DeltaStates &from = heads.initial_state, &to = out.final_state;
    if (from.data == nullptr || out.states.data != nullptr) return false;
    if (heads.tokens < 1 || heads.tokens > most_tokens) return false;
    // Between steps the state is in memory.
    if (heads.tokens > 1 && (to.data == nullptr || to.dtype != DType::f32)) return false;
    const bool alike = to.data == nullptr || (to.dtype == from.dtype && to.value == from.value && to.key == from.key);
    return alike && (has_value_rows(from, heads) || has_key_rows(from, heads));
}

std::size_t step_scratch(const DeltaHeads& heads) {
    Scratch scratch(nullptr);
    const StepPass pass(heads, scratch);
    return scratch.used();
}

void run_step(const DeltaHeads& heads, std::byte* memory, const DeltaOutput& out) {
    Scratch scratch(memory);
    StepPass(heads, scratch).run(out);
}

}  // namespace

const DeltaStep delta_step = {can_step, step_scratch, run_step};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
