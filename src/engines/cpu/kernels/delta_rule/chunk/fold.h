// The fold (docs/math.md, "Fold"): gates, scale and β worked into keys and scores. Here what all rules have in common
// and gates that the channels share; channel_gate.h has the pairs of channel gates.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/chunk.h"
#include "engines/cpu/kernels/delta_rule/chunk/gate.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Gates and β of a chunk of a value head, and what is made of them for a moment.
struct GateChunk {
    float *g, *g_rest;  // [n], or [n, K] in rows of row; g_rest only of raw gates: their sum is meant
    Index row;
    float* beta;                                    // [n]
    float *sum, *rest;                              // [n] G = sum + rest; only gates that the channels share
    float *before, *before_rest;                    // [n] E, which is G or the exclusive sum
    float *read_decay, *erase_decay, *write_decay;  // [n] scale·e^G, −β e^E, e^(G_last − G)
    float* bias;                                    // [K]

    template <class P>
    GateChunk(const ChunkSizes<P>& sizes, bool channel, bool before_decay, Scratch& scratch, bool raw = false)
        : row(sizes.key_row()) {
        const Index size = channel ? sizes.rows * row : sizes.pair_row();
        g = scratch.take<float>(size);
        g_rest = raw ? scratch.take<float>(size) : nullptr;
        for (float** x : {&beta, &sum, &rest, &read_decay, &erase_decay, &write_decay})
            *x = scratch.take<float>(sizes.pair_row());
        before = sum, before_rest = rest;
        if (before_decay)
            before = scratch.take<float>(sizes.pair_row()), before_rest = scratch.take<float>(sizes.pair_row());
        bias = scratch.take<float>(row);
    }

    // Rows from i on.
    GateChunk from(Index i, bool channel) const {
        GateChunk part = *this;
        part.g += channel ? i * row : i;
        if (g_rest != nullptr) part.g_rest += channel ? i * row : i;
        part.beta += i;
        return part;
    }
};

// Sums in f64: one token at −750 would cost the later sums their digits.
inline void sum_gates(Index n, const GateChunk& x) {
    const bool exclusive = x.before != x.sum;
    double G = 0;
    for (Index i = 0; i < n; ++i) {
        if (exclusive) {
            x.before[i] = static_cast<float>(G);
            x.before_rest[i] = static_cast<float>(G - static_cast<double>(x.before[i]));
        }
        G += static_cast<double>(x.g[i]);
        if (x.g_rest != nullptr) G += static_cast<double>(x.g_rest[i]);
        x.sum[i] = static_cast<float>(G);
        x.rest[i] = static_cast<float>(G - static_cast<double>(x.sum[i]));
    }
}

// e^(a − b) of sums in two parts; |a| ≥ |b|, or nearly so.
SOFTDELTA_INLINE F exp_of_difference(F a, F a_rest, F b, F b_rest) {
    const F difference = a - b;
    return exp_of_sum(difference, ((a - difference) - b) + (a_rest - b_rest));
}

inline void make_row_decays(float scale, Index n, const GateChunk& x) {
    const F last = splat(x.sum[n - 1]), last_rest = splat(x.rest[n - 1]);
    for (Index i = 0; i < n; i += W) {
        const F sum = load(x.sum + i), rest = load(x.rest + i);
        store(x.read_decay + i, splat(scale) * exp_of_sum(sum, rest));
        store(x.write_decay + i, exp_of_difference(last, last_rest, sum, rest));
        store(x.erase_decay + i,
              (splat(0.0F) - load(x.beta + i)) * exp_of_sum(load(x.before + i), load(x.before_rest + i)));
    }
}

// A vector of each of two neighbours along the depth.
SOFTDELTA_INLINE void store_neighbours(float* p, F first, F /*second*/, FloatProduct /*of*/) {
    store(p, first);
}
SOFTDELTA_INLINE void store_neighbours(std::uint32_t* p, F first, F second, PairProduct /*of*/) {
    store(p, bf16_pairs(first, second));
}

// Scores of row i: out_j ← factor·e^(sum − G_j)·pairs_j for j < visible, 0 elsewhere.
template <class P>
SOFTDELTA_INLINE void fold_shared_row(const GateChunk& x, Index n, float sum, float rest, float factor, Index visible,
                                      const float* pairs, Element<P>* out, float* exact) {
    for (Index j = 0; j < round_up(n, W); j += W) {
        F score = splat(0.0F);
        if (j < visible) {
            const Mask seen = iota() < splat(static_cast<float>(visible - j));
            const F own = select(seen, splat(sum), load(x.sum + j));  // no exponent is positive
            const F decay = exp_of_difference(own, splat(rest), load(x.sum + j), load(x.rest + j));
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
            fold_shared_row<P>(x, n, x.sum[i], x.rest[i], head.scale, i + 1, keys.qk + i * keys.pair_row,
                               read + f.key_depth, nullptr);
        }
        if (!head.erases()) continue;
        Element<P>* erase = f.erase + i * f.row;
        const F erase_decay = splat(x.erase_decay[i]);
        for (Index m = 0; m < columns; m += W)
            store_a(erase + m / P::depth, load(keys.p + i * keys.row + m) * erase_decay, P{});
        fold_shared_row<P>(x, n, x.before[i], x.before_rest[i], -x.beta[i], i, keys.pk + i * keys.pair_row,
                           erase + f.key_depth, f.erase_score + i * f.erase_score_row);
    }
    const auto write_row = [&](Index i, Index m) {
        return i < n ? load(keys.k + i * keys.row + m) * splat(x.write_decay[i]) : splat(0.0F);
    };
    for (Index i = 0; i < n; i += P::depth)
        for (Index m = 0; m < columns; m += W)
            store_neighbours(f.write_key + i / P::depth * f.write_row + m, write_row(i, m), write_row(i + 1, m), P{});
    const F state_decay = exp_of_sum(splat(x.sum[n - 1]), splat(x.rest[n - 1]));
    for (Index m = 0; m < columns; m += W) store(f.state_decay + m, state_decay);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
