// The scan of a few tokens (docs/math.md, "Forward") on a state in the caller's memory, of the caller's type: rows of
// value columns or, transposed, rows of keys.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/operands.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Tokens of a step: as many as keep a few vectors of the state in registers.
inline constexpr int most_step_tokens = 4;

// State [rows, columns], `row` elements between rows.
template <class S>
struct StateView {
    const S* from;
    S* to;  // may be where it comes from; null: not wanted
    Index from_row, to_row;
};

// What a step needs besides the state: the folded chunk, β∘v and o, [tokens, V] in rows of value_row.
struct StepRows {
    const Folded<FloatProduct>& f;
    bool erases;
    const float* values;
    float* o;
    Index value_row;
};

// U from β∘v − erase_key S, and o from read_query S, W lanes of value columns or more.
template <int tokens, int vectors>
SOFTDELTA_INLINE void finish_step(const StepRows& x, F (&update)[tokens][vectors], F (&o)[tokens][vectors]) {
    const Folded<FloatProduct>& f = x.f;
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
        for (int j = 0; x.erases && j < t; ++j)
            for (int n = 0; n < vectors; ++n)
                update[t][n] = fma(splat(f.erase_score[t * f.erase_score_row + j]), update[j][n], update[t][n]);
        for (int j = 0; j <= t; ++j)
            for (int n = 0; n < vectors; ++n)
                o[t][n] = fma(splat(f.read[t * f.row + f.key_depth + j]), update[j][n], o[t][n]);
    }
}

// read_query S and, where the rule erases, β∘v − erase_key S: sums over the rows of the state.
template <bool erases, class S, int tokens, int vectors>
SOFTDELTA_INLINE void multiply_rows(const S* from, Index row, Index K, const Folded<FloatProduct>& f,
                                    F (&update)[tokens][vectors], F (&o)[tokens][vectors]) {
    const float *read = f.read, *erase = f.erase;
    const Index operand_row = f.row;
    for (Index m = 0; m < K; ++m, from += row) {
        F s[vectors];
#pragma GCC unroll 8
        for (int n = 0; n < vectors; ++n) s[n] = load(from + n * W);
#pragma GCC unroll 8
        for (int t = 0; t < tokens; ++t) {
            const F q = splat(read[t * operand_row + m]);
#pragma GCC unroll 8
            for (int n = 0; n < vectors; ++n) o[t][n] = fma(q, s[n], o[t][n]);
            if constexpr (erases) {
                const F p = splat(erase[t * operand_row + m]);
#pragma GCC unroll 8
                for (int n = 0; n < vectors; ++n) update[t][n] = fma(p, s[n], update[t][n]);
            }
        }
    }
}

// Rows decayed, and written to with what was made of them; from the last on, which is still near.
template <class S, int tokens, int vectors>
SOFTDELTA_INLINE void write_rows(const StateView<S>& state, Index c, Index K, const Folded<FloatProduct>& f,
                                 const F (&update)[tokens][vectors]) {
    const Index from_row = state.from_row, to_row = state.to_row, key_row = f.write_row;
    const S* from = state.from + (K - 1) * from_row + c;
    S* to = state.to + (K - 1) * to_row + c;
    const float *decay = f.state_decay, *keys = f.write_key;
    for (Index m = K; m-- > 0; from -= from_row, to -= to_row) {
        F s[vectors], key[tokens];
        const F factor = splat(decay[m]);
#pragma GCC unroll 8
        for (int t = 0; t < tokens; ++t) key[t] = splat(keys[t * key_row + m]);
#pragma GCC unroll 8
        for (int n = 0; n < vectors; ++n) s[n] = factor * load(from + n * W);
#pragma GCC unroll 8
        for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 8
            for (int n = 0; n < vectors; ++n) s[n] = fma(key[t], update[t][n], s[n]);
#pragma GCC unroll 8
        for (int n = 0; n < vectors; ++n) store(to + n * W, s[n]);
    }
}

// Value columns [c, c + vectors·W) of a state [K, V].
template <class S, int tokens, int vectors>
void step_columns(const StateView<S>& state, Index K, Index c, const StepRows& x) {
    F update[tokens][vectors], o[tokens][vectors];
    for (int t = 0; t < tokens; ++t)
        for (int n = 0; n < vectors; ++n) {
            update[t][n] = load(x.values + t * x.value_row + c + n * W);
            o[t][n] = splat(0.0F);
        }
    if (x.erases)
        multiply_rows<true>(state.from + c, state.from_row, K, x.f, update, o);
    else
        multiply_rows<false>(state.from + c, state.from_row, K, x.f, update, o);
    finish_step(x, update, o);
    for (int t = 0; t < tokens; ++t)
        for (int n = 0; n < vectors; ++n) store(x.o + t * x.value_row + c + n * W, o[t][n]);
    if (state.to != nullptr) write_rows(state, c, K, x.f, update);
}

// The sums of W vectors, one a lane.
SOFTDELTA_INLINE F sums_of(const F* x) {
    U columns[W];
    for (Index i = 0; i < W; ++i) columns[i] = as_words(x[i]);
    transpose(columns);
    F sum = as_floats(columns[0]);
    for (Index i = 1; i < W; ++i) sum = sum + as_floats(columns[i]);
    return sum;
}

// Value rows [v, v + count) of a state [V, K], count ≤ W; K is whole vectors.
template <class S, int tokens>
void step_rows(const StateView<S>& state, Index K, Index v, Index count, const StepRows& x) {
    const Folded<FloatProduct>& f = x.f;
    F update[tokens][1], o[tokens][1];
    F parts[2 * tokens][W];
    for (Index r = 0; r < W; ++r) {
        F sums[2 * tokens];
        for (F& sum : sums) sum = splat(0.0F);
        for (Index m = 0; r < count && m < K; m += W) {
            const F s = load(state.from + (v + r) * state.from_row + m);
#pragma GCC unroll 8
            for (int t = 0; t < tokens; ++t) {
                sums[2 * t] = fma(load(f.read + t * f.row + m), s, sums[2 * t]);
                if (x.erases) sums[2 * t + 1] = fma(load(f.erase + t * f.row + m), s, sums[2 * t + 1]);
            }
        }
        for (int t = 0; t < 2 * tokens; ++t) parts[t][r] = sums[t];
    }
    for (int t = 0; t < tokens; ++t) {
        o[t][0] = sums_of(parts[2 * t]);
        update[t][0] = load(x.values + t * x.value_row + v) + sums_of(parts[2 * t + 1]);
    }
    finish_step(x, update, o);
    alignas(64) float u[tokens][W];
    for (int t = 0; t < tokens; ++t) {
        store(x.o + t * x.value_row + v, o[t][0]);
        store(u[t], update[t][0]);
    }
    for (Index r = 0; state.to != nullptr && r < count; ++r) {
        F factor[tokens];
        for (int t = 0; t < tokens; ++t) factor[t] = splat(u[t][r]);
        for (Index m = 0; m < K; m += W) {
            F s = load(f.state_decay + m) * load(state.from + (v + r) * state.from_row + m);
#pragma GCC unroll 8
            for (int t = 0; t < tokens; ++t) s = fma(load(f.write_key + t * f.write_row + m), factor[t], s);
            store(state.to + (v + r) * state.to_row + m, s);
        }
    }
}

// As many columns at once as registers hold, and the rest one vector at a time.
template <class S, int tokens>
void step_state(const StateView<S>& state, Index K, Index V, const StepRows& x) {
    constexpr int registers = vector_registers * 13 / 16;  // the others hold factors
    constexpr int fit = registers / (2 * tokens + 1);
    constexpr int vectors = fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
    Index c = 0;
    for (; c + vectors * W <= V; c += vectors * W) step_columns<S, tokens, vectors>(state, K, c, x);
    for (; c < V; c += W) step_columns<S, tokens, 1>(state, K, c, x);
}

template <class S, int tokens>
void step_transposed_state(const StateView<S>& state, Index K, Index V, const StepRows& x) {
    for (Index v = 0; v < V; v += W) step_rows<S, tokens>(state, K, v, V - v < W ? V - v : W, x);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
