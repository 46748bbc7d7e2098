// The unfold, adjoint of the fold (docs/math.md, "Unfold"): from the gradients of what the scan was given to those of
// q, k, p and the gates. Here gates that the channels share. The gradient of a gate is the sum of the terms that span
// it, without subtraction.
//
//     dscore [n, n] · k [n, K] + dread_query → dq [n, K];  dscoreᵀ [n, n] · q [n, K] + derase_scoreᵀ · βp + dwrite_key
//     → dk derase_score [n, n] · k [n, K] + derase_key → e [n, K];  rows and columns of the pairs' terms summed → dg
//     [n]
#pragma once

#include "engines/cpu/kernels/delta_rule/backward/scan.h"
#include "engines/cpu/kernels/delta_rule/chunk/fold.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Memory of the unfold: rows of q, k and p as B, pairs of tokens as A.
template <class P>
struct UnfoldScratch {
    Element<P>*q, *k, *p;                 // [n, K] as B
    float* with_beta;                     // [n, n]
    Element<P>*pairs[2], *transposed[2];  // [n, n] as A: of dscore, derase_score
    float* decay;                         // [n]
    Index pair_row;

    UnfoldScratch(const ChunkSizes<P>& sizes, bool has_p, Scratch& scratch) : pair_row(sizes.pair_row()) {
        const Index size = depth_of<P>(sizes.rows) * round_up(sizes.keys, W);
        q = scratch.take<Element<P>>(size);
        k = scratch.take<Element<P>>(size);
        p = has_p ? scratch.take<Element<P>>(size) : k;
        decay = scratch.take<float>(pair_row);
        with_beta = scratch.take<float>(sizes.rows * pair_row);
        for (int i = 0; i < 2; ++i) {
            pairs[i] = P::depth == 1 ? nullptr : scratch.take<Element<P>>(sizes.rows * pair_row / P::depth);
            transposed[i] = P::depth == 1 ? nullptr : scratch.take<Element<P>>(depth_of<P>(sizes.rows) * pair_row);
        }
    }
};

SOFTDELTA_INLINE float dot(const float* a, const float* b, Index columns) {
    F total = splat(0.0F);
    for (Index m = 0; m < columns; m += W) total = fma(load(a + m), load(b + m), total);
    return sum(total);
}

// The terms of dg, one number for each row (docs/math.md, "Span form"):
//     read_i  = rowsum(q_i∘dq_i), dq from S      = scale e^(G_i)·rowsum(q_i∘dread_query_i)
//     erase_i = rowsum(βp_i∘e_i), e from S       = β_i e^(E_i)·rowsum(p_i∘derase_key_i)
//     write_j = rowsum(k_j∘kw_j)                 = e^(G_last − G_j)·rowsum(k_j∘dwrite_key_j)
//     pairs_s = Σ_(j < s ≤ i) dscore_ij∘score_ij + derase_score_ij∘erase_score_ij
//     dg_s    = rowsum(state_decay∘dstate_decay) + Σ_(i ≥ s) (read_i + erase_i) + Σ_(j < s) write_j + pairs_s
// Where erasing comes before the decay, erase_i and its pairs count for i > s alone.
struct SpanTerms {
    alignas(64) float read[largest_chunk], erase[largest_chunk], write[largest_chunk], pairs[largest_chunk];
};

// Rows of pairs from the last to the first: dscore and derase_score become the gradients of pairs before their decay,
// times it, and derase_score without β in `d`, with β in `with_beta`.
template <class P>
class SharedUnfold {
  public:
    SharedUnfold(const DeltaHeads& heads, const KeyChunk<P>& keys, const GateChunk& gates, Index n,
                 const float* state_decay, const ChunkGradients<P>& d, UnfoldScratch<P>& s)
        : heads_(heads),
          keys_(keys),
          gates_(gates),
          n_(n),
          state_decay_(state_decay),
          d_(d),
          s_(s),
          columns_(round_up(heads.key_size, W)) {}

    // dq, dk, de, dg
    void run() {
        pack_rows_as_b<P>(n_, columns_, keys_.q, keys_.row, s_.q);
        pack_rows_as_b<P>(n_, columns_, keys_.k, keys_.row, s_.k);
        if (keys_.has_p()) pack_rows_as_b<P>(n_, columns_, keys_.p, keys_.row, s_.p);
        for (Index i = 0; i < n_; i += W)
            store(s_.decay + i, splat(0.0F) - exp_of_sum(load(gates_.E + i), load(gates_.E_rest + i)));
        row_terms();
        pair_terms();
        add_up();
        multiply();
    }

  private:
    void row_terms() {
        for (Index i = 0; i < n_; ++i) {
            const Index key = i * keys_.row, row = i * d_.key_row;
            terms_.read[i] = gates_.read_decay[i] * dot(keys_.q + key, d_.dq + row, columns_);
            terms_.write[i] = gates_.write_decay[i] * dot(keys_.k + key, d_.dk + row, columns_);
            terms_.erase[i] =
                heads_.erases() ? gates_.beta[i] * s_.decay[i] * dot(keys_.p + key, d_.de + row, columns_) : 0;
        }
    }

    // e^(sum − G_j) for j < visible, from column j on; anything elsewhere.
    SOFTDELTA_INLINE F decay(float sum, float rest, Index j, Index visible) const {
        const F G = load(gates_.G + j);
        const F own = select(iota() < splat(static_cast<float>(visible - j)), splat(sum), G);
        return exp_of_difference(own, splat(rest), G, load(gates_.G_rest + j));
    }
    SOFTDELTA_INLINE static F visible_part(F x, Index j, Index visible) {
        return select(iota() < splat(static_cast<float>(visible - j)), x, splat(0.0F));
    }

    // A pair's term belongs to the gates of rows (j, i]; what erases from the state before its decay, to rows (j, i).
    void pair_terms() {
        const bool before_decay = gates_.exclusive;
        const Index width = round_up(n_, W);
        F spanned[largest_chunk / W];
        for (Index j = 0; j < width; j += W) spanned[j / W] = splat(0.0F);
        for (Index i = n_; i-- > 0;) {
            const float* qk = keys_.qk + i * keys_.pair_row;
            const float* pk = keys_.pk + i * keys_.pair_row;
            float* dscore = d_.dscore + i * d_.pair_row;
            float* derase = d_.derase_score + i * d_.pair_row;
            F terms = splat(0.0F);
            for (Index j = 0; j < width; j += W) {
                F read = splat(0.0F), erase = splat(0.0F), erase_term = splat(0.0F);
                if (j <= i) {
                    const F factor = decay(gates_.G[i], gates_.G_rest[i], j, i + 1);
                    read = visible_part(splat(heads_.scale) * factor * load(dscore + j), j, i + 1);
                    F all = spanned[j / W] + visible_part(read * load(qk + j), j, i + 1);
                    if (heads_.erases()) {
                        const F erase_factor = before_decay ? decay(gates_.E[i], gates_.E_rest[i], j, i) : factor;
                        erase = visible_part(splat(0.0F) - erase_factor * load(derase + j), j, i);
                        erase_term = visible_part(splat(gates_.beta[i]) * erase * load(pk + j), j, i);
                        if (!before_decay) all = all + erase_term;
                    }
                    terms = terms + visible_part(all, j, i);
                    spanned[j / W] = before_decay ? all + erase_term : all;
                }
                store(dscore + j, read);
                if (!heads_.erases()) continue;
                store(derase + j, erase);
                store(s_.with_beta + i * d_.pair_row + j, splat(gates_.beta[i]) * erase);
            }
            terms_.pairs[i] = sum(terms);
        }
    }

    void add_up() {
        const bool before_decay = gates_.exclusive;
        F through = splat(0.0F);  // the state, from before the chunk to after it
        for (Index m = 0; m < columns_; m += W)
            through = fma(load(state_decay_ + m), load(d_.dstate_decay + m), through);
        float later = 0, earlier = sum_of(through);
        for (Index i = 0; i < n_; ++i) {
            d_.dg[i] = earlier + terms_.pairs[i];
            earlier += terms_.write[i];
        }
        for (Index i = n_; i-- > 0;) {
            later += terms_.read[i] + (before_decay ? 0 : terms_.erase[i]);
            d_.dg[i] += later;
            if (before_decay) later += terms_.erase[i];
        }
    }
    static float sum_of(F x) { return sum(x); }

    void multiply() {
        const Triangles<P> triangle(n_);
        const Index depth = depth_of<P>(n_), row = d_.pair_row;
        const PackedB<P> q{s_.q, depth}, k{s_.k, depth}, p{s_.p, depth};
        product<P>(n_, columns_, pairs_as_a(n_, d_.dscore, row, s_.pairs[0]), k,
                   {d_.dq, d_.key_row, Start::scale, gates_.read_decay}, nullptr, triangle.earlier);
        product<P>(n_, columns_, transposed_pairs_as_a(n_, d_.dscore, row, s_.transposed[0]), q,
                   {d_.dk, d_.key_row, Start::scale, gates_.write_decay}, nullptr, triangle.later);
        if (!heads_.erases()) return;
        product<P>(n_, columns_, pairs_as_a(n_, d_.derase_score, row, s_.pairs[1]), k,
                   {d_.de, d_.key_row, Start::scale, s_.decay}, nullptr, triangle.earlier);
        product<P>(n_, columns_, transposed_pairs_as_a(n_, s_.with_beta, row, s_.transposed[1]), p,
                   {d_.dk, d_.key_row, Start::add}, nullptr, triangle.later);
    }

    const DeltaHeads& heads_;
    const KeyChunk<P>& keys_;
    const GateChunk& gates_;
    Index n_;
    const float* state_decay_;
    const ChunkGradients<P>& d_;
    UnfoldScratch<P>& s_;
    Index columns_;
    SpanTerms terms_;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
