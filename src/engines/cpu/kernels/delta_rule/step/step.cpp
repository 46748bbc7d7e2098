// A few tokens at once on a state that stays where the caller has it: decode. The state is read twice and written once.
#include "engines/cpu/kernels/isa_unit.h"

#include "engines/cpu/kernels/delta_rule/chunk/prepare.h"
#include "engines/cpu/kernels/delta_rule/chunk/states.h"
#include "engines/cpu/kernels/delta_rule/forward/tokens.h"
#include "engines/cpu/kernels/delta_rule/step/state.h"

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
          prepared_(heads, sizes_, scratch),
          folded_(sizes_, scratch),
          values_(scratch.take<float>(sizes_.rows * sizes_.value_columns())),
          o_(scratch.take<float>(sizes_.rows * sizes_.value_columns())),
          tokens_(heads, sizes_, scratch) {}

    void run(const DeltaOutput& out) {
        for (Index h = 0; h < heads_.heads(); ++h) {
            if (h % heads_.group == 0) prepared_.load_key_head({h / heads_.group, 0, heads_.tokens});
            run_value_head(h, out);
        }
    }

  private:
    void run_value_head(Index h, const DeltaOutput& out) {
        const Index tokens = heads_.tokens;
        prepared_.load_value_head({h, 0, tokens});
        for (Index i = 0; i < tokens; i += most_step_tokens) {
            const Index n = tokens - i < most_step_tokens ? tokens - i : most_step_tokens;
            const DeltaStates& from = i == 0 ? heads_.initial_state : out.final_state;
            const Index steady = prepared_.count_steady(i, n);
            if (steady > 0) step({h, i, steady}, from, steady == n ? out.final_state : DeltaStates{}, out.o);
            if (steady < n) run_tokens({h, i, n}, steady, from, out);
        }
    }

    // From token `first` on results are stored.
    void run_tokens(const Tokens& at, Index first, const DeltaStates& from, const DeltaOutput& out) {
        const Index K = heads_.key_size, V = heads_.value_size;
        const KeyChunk<FloatProduct> keys = prepared_.keys().from(at.begin);
        double* S = tokens_.state();
        alignas(64) float row[W];
        tokens_.load_gates(at.n, prepared_.gates().from(at.begin, heads_.has_channel_gate()));
        for (Index c = 0; c < V; c += W) {
            const Index width = V - c < W ? V - c : W;
            for (Index m = 0; m < K; ++m) {
                load_row(state_row(from, at.head, m, c), width, row);
                for (Index j = 0; j < W; ++j) S[m * W + j] = static_cast<double>(row[j]);
            }
            tokens_.advance(at, c, keys, prepared_.beta(at.begin), o_, nullptr, sizes_.value_columns());
            for (Index m = 0; out.final_state.data != nullptr && m < K; ++m) {
                for (Index j = 0; j < W; ++j) row[j] = static_cast<float>(S[m * W + j]);
                const Row to = state_row(out.final_state, at.head, m, c);
                store_row(row, width, const_cast<void*>(to.data), to.dtype, to.step);
            }
        }
        store_o(at, first, out.o);
    }

    void store_o(const Tokens& at, Index first, const DeltaRows& o) const {
        for (Index i = first; o.data != nullptr && i < at.n; ++i)
            store_token(o_ + i * sizes_.value_columns(), o, at, i, heads_.value_size);
    }

    void step(const Tokens& at, const DeltaStates& from, const DeltaStates& to, const DeltaRows& o) {
        const Index row = sizes_.value_columns();
        prepared_.fold(at.begin, at.n, folded_);
        for (Index i = 0; i < at.n; ++i) {
            float* values = values_ + i * row;
            load_token(heads_.v, at, i, heads_.value_size, values);
            const F beta = splat(*prepared_.beta(at.begin + i));
            for (Index c = 0; c < row; c += W) store(values + c, beta * load(values + c));
        }
        if (from.dtype == DType::f32) pick_tokens<float>(at, from, to);
        if (from.dtype == DType::bf16) pick_tokens<core::bf16>(at, from, to);
        if (from.dtype == DType::f16) pick_tokens<core::f16>(at, from, to);
        store_o(at, 0, o);
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
    Preparation<FloatProduct> prepared_;
    Folded<FloatProduct> folded_;
    float *values_, *o_;  // [n, V]
    TokenForm<FloatProduct> tokens_;
};

bool can_step(const DeltaHeads& heads, const DeltaOutput& out) {
    const DeltaStates &from = heads.initial_state, &to = out.final_state;
    if (from.data == nullptr || out.states.data != nullptr || out.u.data != nullptr) return false;
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
    const Computing<FloatProduct> computing;
    Scratch scratch(memory);
    StepPass(heads, scratch).run(out);
}

}  // namespace

const DeltaStep delta_step = {can_step, step_scratch, run_step, most_tokens};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
