// Pairs of rows in a chunk whose channels share a gate: a product of rows, times e^(G_i − G_j).
#include "engines/stages/delta_rule/fold.h"
#include "engines/stages/products.h"

namespace softdelta::stages::delta {

namespace {

// out_ij ← out_ij·e^(X_i − G_j) for i ≥ j, or i > j; 0 elsewhere.
template <class T>
void decay_pairs(const Rows<double>& X, const Rows<double>& G, bool strict, Tile<T>& decay, Tile<T>& out) {
    const Index n = G.rows();
    decay.resize(1, n);
    for (Index i = 0; i < n; ++i) {
        const Index visible = strict ? i : i + 1;
        for (Index j = 0; j < visible; ++j) decay(0, j) = static_cast<T>(X(i, 0) - G(j, 0));
        exponentiate(decay.data(), visible);
        out.row(i).head(visible).array() *= decay.row(0).head(visible).array();
        out.row(i).tail(n - visible).setZero();
    }
}

// terms_ij is what pair (i, j) adds to the gate of every row s in (j, i], or (j, i) when it reads before the decay.
template <class T>
void add_pair_spans(const Tile<T>& terms, bool before_decay, Tile<T>& dg) {
    for (Index i = 1; i < terms.rows(); ++i) {
        T sum = 0;
        for (Index s = 1; s < (before_decay ? i : i + 1); ++s) dg(s, 0) += sum += terms(i, s - 1);
    }
}

}  // namespace

template <class T>
void fold_shared_pairs(const FoldRule<T>& rule, const Chunk<T>& c, FoldScratch<T>& scratch, Folded<T>& f) {
    multiply_bt(rule.scale, c.q, c.k, f.score);
    decay_pairs(c.G, c.G, false, scratch.decay, f.score);
    if (!rule.erases) return;
    multiply_bt(1, c.p, c.k, f.erase_score);
    decay_pairs(c.E, c.G, true, scratch.decay, f.erase_score);
    f.erase_score.array().colwise() *= c.beta.array();
}

template <class T>
void unfold_shared_pairs(const FoldRule<T>& rule, const Chunk<T>& c, const Folded<T>& f, FoldedGradients<T>& d,
                         Rounding& rounding, FoldScratch<T>& scratch, Unfolded<T>& u) {
    Tile<T>& terms = scratch.product;
    terms = d.score.cwiseProduct(f.score);
    add_pair_spans(terms, false, u.dg);
    decay_pairs(c.G, c.G, false, scratch.decay, d.score);
    d.score *= rule.scale;
    rounding.operand(d.score.data(), d.score.size());
    multiply(1, d.score, c.k, u.dq_intra);
    multiply_at(1, d.score, c.q, u.dk_intra);
    if (!rule.erases) return;
    terms = d.erase_score.cwiseProduct(f.erase_score);
    add_pair_spans(terms, rule.before_decay, u.dg);
    decay_pairs(c.E, c.G, true, scratch.decay, d.erase_score);
    rounding.operand(d.erase_score.data(), d.erase_score.size());
    rounding.operand(scratch.beta_p.data(), scratch.beta_p.size());
    multiply(1, d.erase_score, c.k, u.e_intra);
    add_product_at(1, d.erase_score, scratch.beta_p, u.dk_intra);
}

template void fold_shared_pairs(const FoldRule<double>&, const Chunk<double>&, FoldScratch<double>&, Folded<double>&);
template void fold_shared_pairs(const FoldRule<float>&, const Chunk<float>&, FoldScratch<float>&, Folded<float>&);
template void unfold_shared_pairs(const FoldRule<double>&, const Chunk<double>&, const Folded<double>&,
                                  FoldedGradients<double>&, Rounding&, FoldScratch<double>&, Unfolded<double>&);
template void unfold_shared_pairs(const FoldRule<float>&, const Chunk<float>&, const Folded<float>&,
                                  FoldedGradients<float>&, Rounding&, FoldScratch<float>&, Unfolded<float>&);

}  // namespace softdelta::stages::delta
