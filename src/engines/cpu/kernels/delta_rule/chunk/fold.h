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

// Scores of a row: out_j ← factor·pairs_j·e^(sum − G_j) for j < visible, 0 elsewhere. exact: the same in f32, or null.
template <class P>
struct SharedScores {
    float factor;
    Index visible;
    const float* pairs;
    Element<P>* out;
    float* exact;

    SOFTDELTA_INLINE void store_from(Index j, F decay) const {
        F score = splat(0.0F);
        if (j < visible) {
            const Mask seen = iota() < splat(static_cast<float>(visible - j));
            score = select(seen, splat(factor) * load(pairs + j) * decay, splat(0.0F));
        }
        store_a(out + j / P::depth, score, P{});
        if constexpr (P::depth == 2)
            if (exact != nullptr) store(exact + j, score);
    }
};

// The decays of a row whose gates sum up to `sum` + rest, to one or two rows of scores; no exponent is positive.
template <class P, class... Scores>
SOFTDELTA_INLINE void fold_shared_row(const float* G, const float* G_rest, Index n, float sum, float rest,
                                      Index visible, const Scores&... scores) {
    for (Index j = 0; j < round_up(n, W); j += W) {
        F decay = splat(0.0F);
        if (j < visible) {
            const Mask seen = iota() < splat(static_cast<float>(visible - j));
            const F own = select(seen, splat(sum), load(G + j));
            decay = exp_of_difference(own, splat(rest), load(G + j), load(G_rest + j));
        }
        (scores.store_from(j, decay), ...);
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
    const auto fold_keys = [columns](const float* from, F decay, Element<P>* out) {
        for (Index m = 0; m < columns; m += W) store_a(out + m / P::depth, load(from + m) * decay, P{});
    };
    const float *G = x.G, *G_rest = x.G_rest;
    for (Index i = 0; i < n; ++i) {
        Element<P>*read = f.read + i * f.row, *erase = f.erase + i * f.row;
        const SharedScores<P> reads{head.scale, i + 1, keys.qk + i * keys.pair_row, read + f.key_depth, nullptr};
        const SharedScores<P> erases{-x.beta[i], i, keys.pk + i * keys.pair_row, erase + f.key_depth,
                                     f.erase_score + i * f.erase_score_row};
        if (head.reads()) fold_keys(keys.q + i * keys.row, splat(x.read_decay[i]), read);
        if (head.erases()) fold_keys(keys.p + i * keys.row, splat(x.erase_decay[i]), erase);
        if (head.reads() && head.erases() && !x.exclusive) {  // what reads and what erases have decayed alike
            fold_shared_row<P>(G, G_rest, n, G[i], G_rest[i], i + 1, reads, erases);
            continue;
        }
        if (head.reads()) fold_shared_row<P>(G, G_rest, n, G[i], G_rest[i], i + 1, reads);
        if (head.erases()) fold_shared_row<P>(G, G_rest, n, x.E[i], x.E_rest[i], i, erases);
    }
    for (Index i = 0; i < n; i += P::depth) {
        const bool pair = i + 1 < n;
        const float *k = keys.k + i * keys.row, *next = pair ? k + keys.row : k;
        const F decay = splat(x.write_decay[i]), next_decay = splat(pair ? x.write_decay[i + 1] : 0.0F);
        Element<P>* out = f.write_key + i / P::depth * f.write_row;
        for (Index m = 0; m < columns; m += W)
            store_neighbours(out + m, load(k + m) * decay,
                             P::depth == 2 && pair ? load(next + m) * next_decay : splat(0.0F), P{});
    }
    const F state_decay = exp_of_sum(splat(x.G[n - 1]), splat(x.G_rest[n - 1]));
    for (Index m = 0; m < columns; m += W) store(f.state_decay + m, state_decay);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
