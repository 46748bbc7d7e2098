// The fold (docs/math.md, "Fold"): gates, scale and β worked into keys and scores. Here what all rules have in common
// and gates that the channels share; channel_gate.h has the pairs of channel gates.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/gate.h"
#include "engines/cpu/kernels/delta_rule/chunk/pack.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Sums in f64: one token at −750 would cost the later sums their digits.
inline void sum_gates(Index n, const GateChunk& x) {
    double G = 0;
    for (Index i = 0; i < n; ++i) {
        if (x.exclusive) {
            x.E[i] = static_cast<float>(G);
            x.E_rest[i] = static_cast<float>(G - static_cast<double>(x.E[i]));
        }
        G += static_cast<double>(x.g[i]);
        if (x.g_rest != nullptr) G += static_cast<double>(x.g_rest[i]);
        x.G[i] = static_cast<float>(G);
        x.G_rest[i] = static_cast<float>(G - static_cast<double>(x.G[i]));
    }
}

// e^(a − b) of sums in two parts; |a| ≥ |b|, or nearly so.
SOFTDELTA_INLINE F exp_of_difference(F a, F a_rest, F b, F b_rest) {
    const F difference = a - b;
    return exp_of_sum(difference, ((a - difference) - b) + (a_rest - b_rest));
}

inline void make_row_decays(float scale, Index n, const GateChunk& x) {
    const F last = splat(x.G[n - 1]), last_rest = splat(x.G_rest[n - 1]);
    for (Index i = 0; i < n; i += W) {
        const F sum = load(x.G + i), rest = load(x.G_rest + i);
        store(x.read_decay + i, splat(scale) * exp_of_sum(sum, rest));
        store(x.write_decay + i, exp_of_difference(last, last_rest, sum, rest));
        store(x.erase_decay + i, (splat(0.0F) - load(x.beta + i)) * exp_of_sum(load(x.E + i), load(x.E_rest + i)));
    }
}

// Scores of row i: out_j ← factor·e^(sum − G_j)·pairs_j for j < visible, 0 elsewhere.
template <class P>
SOFTDELTA_INLINE void fold_shared_row(const GateChunk& x, Index n, float sum, float rest, float factor, Index visible,
                                      const float* pairs, Element<P>* out, float* exact) {
    for (Index j = 0; j < round_up(n, W); j += W) {
        F score = splat(0.0F);
        if (j < visible) {
            const Mask seen = iota() < splat(static_cast<float>(visible - j));
            const F own = select(seen, splat(sum), load(x.G + j));  // no exponent is positive
            const F decay = exp_of_difference(own, splat(rest), load(x.G + j), load(x.G_rest + j));
            score = select(seen, splat(factor) * load(pairs + j) * decay, splat(0.0F));
        }
        store_a(out + j / P::depth, score, P{});
        if constexpr (P::depth == 2)
            if (exact != nullptr) store(exact + j, score);
    }
}

// out_j ← factor·pairs_j for j < visible, 0 elsewhere.
template <class P>
SOFTDELTA_INLINE void store_scores(Index n, float factor, Index visible, const float* pairs, Element<P>* out,
                                   float* exact) {
    for (Index j = 0; j < round_up(n, W); j += W) {
        const Mask seen = iota() < splat(static_cast<float>(visible - j));
        const F score = select(seen, splat(factor) * load(pairs + j), splat(0.0F));
        store_a(out + j / P::depth, score, P{});
        if constexpr (P::depth == 2)
            if (exact != nullptr) store(exact + j, score);
    }
}

//     q [n, K]∘e^G              → read_query [n, K]     q kᵀ [n, n]∘e^(G_i − G_j)   → score [n, n], tril
//     p [n, K]∘β e^E            → erase_key [n, K]      p kᵀ [n, n]∘β e^(E_i − G_j) → erase_score [n, n], strict tril
//     k [n, K]∘e^(G_last − G)   → write_key [n, K]
template <class P>
void fold_shared_gate(const DeltaHeads& head, const KeyChunk<P>& keys, const GateChunk& x, Folded<P>& f) {
    const Index n = f.n, columns = round_up(head.key_size, W);
    sum_gates(n, x);
    make_row_decays(head.scale, n, x);
    for (Index i = 0; i < n; ++i) {
        if (head.reads()) {
            Element<P>* read = f.read + i * f.row;
            const F decay = splat(x.read_decay[i]);
            for (Index m = 0; m < columns; m += W)
                store_a(read + m / P::depth, load(keys.q + i * keys.row + m) * decay, P{});
            fold_shared_row<P>(x, n, x.G[i], x.G_rest[i], head.scale, i + 1, keys.qk + i * keys.pair_row,
                               read + f.key_depth, nullptr);
        }
        if (!head.erases()) continue;
        Element<P>* erase = f.erase + i * f.row;
        const F erase_decay = splat(x.erase_decay[i]);
        for (Index m = 0; m < columns; m += W)
            store_a(erase + m / P::depth, load(keys.p + i * keys.row + m) * erase_decay, P{});
        fold_shared_row<P>(x, n, x.E[i], x.E_rest[i], -x.beta[i], i, keys.pk + i * keys.pair_row, erase + f.key_depth,
                           f.erase_score + i * f.erase_score_row);
    }
    const auto write_row = [&](Index i, Index m) {
        return i < n ? load(keys.k + i * keys.row + m) * splat(x.write_decay[i]) : splat(0.0F);
    };
    for (Index i = 0; i < n; i += P::depth)
        for (Index m = 0; m < columns; m += W)
            store_neighbours(f.write_key + i / P::depth * f.write_row + m, write_row(i, m), write_row(i + 1, m), P{});
    const F state_decay = exp_of_sum(splat(x.G[n - 1]), splat(x.G_rest[n - 1]));
    for (Index m = 0; m < columns; m += W) store(f.state_decay + m, state_decay);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
