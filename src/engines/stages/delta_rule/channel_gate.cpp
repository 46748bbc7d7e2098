// Pairs of rows in a chunk with a gate per channel. Between sub-blocks I > J, with r the row before I:
// (x_i e^(X_i − G_r))·(k_j e^(G_r − G_j)), both exponents ≤ 0 for gates ≤ 0. Within a sub-block: e^(X_i − G_j) for each
// pair. X is G for reading, E for erasing.
#include <algorithm>

#include "engines/stages/delta_rule/fold.h"
#include "engines/stages/products.h"

namespace softdelta::stages::delta {

namespace {

constexpr Index block_rows = 16;

// Rows [begin, begin + count) of a chunk.
struct Block {
    Index begin, count;
};

template <class Visit>
void for_each_block(Index rows, Visit&& visit) {
    for (Index begin = 0; begin < rows; begin += block_rows) visit(Block{begin, std::min(block_rows, rows - begin)});
}

// decay ← e^(X_i − G_r), i in the block
template <class T>
void decay_from_anchor(const Rows<double>& X, const Rows<double>& G, const Block& b, Tile<T>& decay) {
    decay.resize(b.count, G.cols());
    for (Index i = 0; i < b.count; ++i)
        subtract(X.row(b.begin + i).data(), G.row(b.begin - 1).data(), G.cols(), decay.row(i).data());
    exponentiate(decay.data(), decay.size());
}

// decay ← e^(G_r − G_j), j before the block
template <class T>
void decay_to_anchor(const Rows<double>& G, const Block& b, Tile<T>& decay) {
    decay.resize(b.begin, G.cols());
    for (Index j = 0; j < b.begin; ++j)
        subtract(G.row(b.begin - 1).data(), G.row(j).data(), G.cols(), decay.row(j).data());
    exponentiate(decay.data(), decay.size());
}

// decay ← e^(X_i − G_j), j in [begin, i)
template <class T>
void decay_pairs(const Rows<double>& X, const Rows<double>& G, Index i, Index begin, Tile<T>& decay) {
    decay.resize(i - begin, G.cols());
    for (Index j = begin; j < i; ++j) subtract(X.row(i).data(), G.row(j).data(), G.cols(), decay.row(j - begin).data());
    exponentiate(decay.data(), decay.size());
}

template <class T>
void fold_earlier_blocks(const FoldRule<T>& rule, const Chunk<T>& c, const Block& b, Rounding& rounding,
                         FoldScratch<T>& s, Folded<T>& f) {
    decay_to_anchor(c.G, b, s.right);
    s.right.array() *= c.k.topRows(b.begin).array();
    rounding.operand(s.right.data(), s.right.size());
    decay_from_anchor(c.G, c.G, b, s.left);
    s.left.array() *= c.q.middleRows(b.begin, b.count).array();
    rounding.operand(s.left.data(), s.left.size());
    add_product_bt(rule.scale, s.left, s.right, f.score.block(b.begin, 0, b.count, b.begin));
    if (!rule.erases) return;
    decay_from_anchor(c.E, c.G, b, s.left);
    s.left.array() *= c.p.middleRows(b.begin, b.count).array();
    rounding.operand(s.left.data(), s.left.size());
    add_product_bt(1, s.left, s.right, f.erase_score.block(b.begin, 0, b.count, b.begin));
}

// Rows of the block as a product of it would have them: x e^(±(X − G_r)) rounded, without that factor.
template <class T, class X>
void round_near(const X& x, const Rows<double>& G, const Block& b, double sign, Rounding& rounding, Tile<T>& near) {
    const auto sums = G.middleRows(b.begin, b.count).rowwise() - G.row(b.begin + b.count / 2);
    const Tile<T> decay = (sign * sums).array().exp().matrix().template cast<T>();
    near = x.middleRows(b.begin, b.count).cwiseProduct(decay);
    rounding.operand(near.data(), near.size());
    near = near.cwiseQuotient(decay);
}

// q, k and p of pairs within the block. A kernel may have them as they are, or as operands of products.
template <class T, class P>
void load_near(const FoldRule<T>& rule, const Chunk<T>& c, const P& p, const Block& b, Rounding& rounding,
               FoldScratch<T>& s) {
    constexpr double mild = 60;
    const Index last = b.begin + b.count - 1;
    const double fall = (c.E.row(b.begin).cwiseMax(c.G.row(b.begin)) - c.G.row(last)).maxCoeff();
    s.near_q = c.q.middleRows(b.begin, b.count);
    s.near_k = c.k.middleRows(b.begin, b.count);
    s.near_p = p.middleRows(b.begin, b.count);
    if (!rule.shortcuts || !rounding.active() || !rounding.has_exponents_of_f32() || !(fall < mild)) return;
    round_near(c.q, c.G, b, 1, rounding, s.near_q);
    round_near(c.k, c.G, b, -1, rounding, s.near_k);
    if (rule.erases) round_near(p, c.E, b, 1, rounding, s.near_p);
}

template <class T>
void fold_own_block(const FoldRule<T>& rule, const Chunk<T>& c, const Block& b, Rounding& rounding, FoldScratch<T>& s,
                    Folded<T>& f) {
    load_near(rule, c, c.p, b, rounding, s);
    for (Index n = 0; n < b.count; ++n) {
        const Index i = b.begin + n;
        decay_pairs(c.G, c.G, i, b.begin, s.decay);
        s.decay.array() *= s.near_k.topRows(n).array();
        add_product_bt(rule.scale, s.near_q.row(n), s.decay, f.score.block(i, b.begin, 1, n));
        f.score(i, i) = rule.scale * s.near_q.row(n).dot(s.near_k.row(n));
        if (!rule.erases) continue;
        if (!c.erases_like_reading()) {
            decay_pairs(c.E, c.G, i, b.begin, s.decay);
            s.decay.array() *= s.near_k.topRows(n).array();
        }
        add_product_bt(1, s.near_p.row(n), s.decay, f.erase_score.block(i, b.begin, 1, n));
    }
}

// The block with all earlier ones. Their pairs span the gates after j in the earlier blocks, and up to i in this one.
template <class T>
void unfold_earlier_blocks(const FoldRule<T>& rule, const Chunk<T>& c, const FoldedGradients<T>& d, const Block& b,
                           Rounding& rounding, FoldScratch<T>& s, Unfolded<T>& u) {
    const auto dscore = d.score.block(b.begin, 0, b.count, b.begin);
    decay_to_anchor(c.G, b, s.decay);
    s.right = s.decay.cwiseProduct(c.k.topRows(b.begin));
    rounding.operand(s.right.data(), s.right.size());

    decay_from_anchor(c.G, c.G, b, s.left);
    multiply(rule.scale, dscore, s.right, s.product);
    s.product.array() *= s.left.array();
    u.dq_intra.middleRows(b.begin, b.count) += s.product;
    s.terms = s.product.cwiseProduct(c.q.middleRows(b.begin, b.count));
    add_spans_up_to(s.terms, false, u.dg.middleRows(b.begin, b.count));
    s.left.array() *= c.q.middleRows(b.begin, b.count).array();
    rounding.operand(s.left.data(), s.left.size());
    multiply_at(rule.scale, dscore, s.left, s.pair);  // dk before its decay

    if (rule.erases) {
        const auto derase_score = d.erase_score.block(b.begin, 0, b.count, b.begin);
        decay_from_anchor(c.E, c.G, b, s.left);
        multiply(1, derase_score, s.right, s.product);
        s.product.array() *= s.left.array();
        u.e_intra.middleRows(b.begin, b.count) += s.product;
        s.terms = s.product.cwiseProduct(s.beta_p.middleRows(b.begin, b.count));
        add_spans_up_to(s.terms, rule.before_decay, u.dg.middleRows(b.begin, b.count));
        s.left.array() *= s.beta_p.middleRows(b.begin, b.count).array();
        rounding.operand(s.left.data(), s.left.size());
        add_product_at(1, derase_score, s.left, s.pair);
    }
    s.pair.array() *= s.decay.array();
    u.dk_intra.topRows(b.begin) += s.pair;
    s.terms = s.pair.cwiseProduct(c.k.topRows(b.begin));
    add_spans_after(s.terms, u.dg.topRows(b.begin));
}

// Pairs within a sub-block, row i of it. A pair's term spans the gates of rows (j, i], or (j, i).
template <class T>
void unfold_own_row(const FoldRule<T>& rule, const Chunk<T>& c, const FoldedGradients<T>& d, Index begin, Index i,
                    FoldScratch<T>& s, Unfolded<T>& u) {
    decay_pairs(c.G, c.G, i, begin, s.decay);
    if (rule.erases && !c.erases_like_reading()) decay_pairs(c.E, c.G, i, begin, s.erase_decay);
    const Tile<T>& erase_decay = c.erases_like_reading() ? s.decay : s.erase_decay;
    s.sum.setZero(c.k.cols());
    s.erase_sum.setZero(c.k.cols());
    const Index n = i - begin;
    for (Index j = begin; j < i; ++j) {
        const T dscore = rule.scale * d.score(i, j);
        s.pair = s.decay.row(j - begin) * dscore;
        u.dq_intra.row(i) += s.pair.cwiseProduct(s.near_k.row(j - begin));
        s.pair.array() *= s.near_q.row(n).array();
        u.dk_intra.row(j) += s.pair;
        s.sum += s.pair.cwiseProduct(c.k.row(j));
        u.dg.row(j + 1) += s.sum;
        if (!rule.erases) continue;
        s.pair = erase_decay.row(j - begin) * d.erase_score(i, j);
        u.e_intra.row(i) += s.pair.cwiseProduct(s.near_k.row(j - begin));
        s.pair.array() *= s.near_p.row(n).array();
        u.dk_intra.row(j) += s.pair;
        s.erase_sum += s.pair.cwiseProduct(c.k.row(j));
        if (!rule.before_decay || j + 1 < i) u.dg.row(j + 1) += s.erase_sum;
    }
    u.dq_intra.row(i) += rule.scale * d.score(i, i) * s.near_k.row(n);
    u.dk_intra.row(i) += rule.scale * d.score(i, i) * s.near_q.row(n);
}

}  // namespace

template <class T>
void fold_channel_pairs(const FoldRule<T>& rule, const Chunk<T>& c, Rounding& rounding, FoldScratch<T>& scratch,
                        Folded<T>& f) {
    f.score.setZero(c.rows(), c.rows());
    if (rule.erases) f.erase_score.setZero(c.rows(), c.rows());
    for_each_block(c.rows(), [&](const Block& b) {
        if (b.begin > 0) fold_earlier_blocks(rule, c, b, rounding, scratch, f);
        fold_own_block(rule, c, b, rounding, scratch, f);
    });
    if (rule.erases) f.erase_score.array().colwise() *= c.beta.array();
}

template <class T>
void unfold_channel_pairs(const FoldRule<T>& rule, const Chunk<T>& c, FoldedGradients<T>& d, Rounding& rounding,
                          FoldScratch<T>& scratch, Unfolded<T>& u) {
    rounding.operand(d.score.data(), d.score.size());
    u.dq_intra.setZero(c.rows(), c.k.cols());
    u.dk_intra.setZero(c.rows(), c.k.cols());
    if (rule.erases) {
        rounding.operand(d.erase_score.data(), d.erase_score.size());
        u.e_intra.setZero(c.rows(), c.k.cols());
    }
    for_each_block(c.rows(), [&](const Block& b) {
        if (b.begin > 0) unfold_earlier_blocks(rule, c, d, b, rounding, scratch, u);
        if (rule.erases)
            load_near(rule, c, scratch.beta_p, b, rounding, scratch);
        else
            load_near(rule, c, c.p, b, rounding, scratch);
        for (Index i = b.begin; i < b.begin + b.count; ++i) unfold_own_row(rule, c, d, b.begin, i, scratch, u);
    });
}

template void fold_channel_pairs(const FoldRule<double>&, const Chunk<double>&, Rounding&, FoldScratch<double>&,
                                 Folded<double>&);
template void fold_channel_pairs(const FoldRule<float>&, const Chunk<float>&, Rounding&, FoldScratch<float>&,
                                 Folded<float>&);
template void unfold_channel_pairs(const FoldRule<double>&, const Chunk<double>&, FoldedGradients<double>&, Rounding&,
                                   FoldScratch<double>&, Unfolded<double>&);
template void unfold_channel_pairs(const FoldRule<float>&, const Chunk<float>&, FoldedGradients<float>&, Rounding&,
                                   FoldScratch<float>&, Unfolded<float>&);

}  // namespace softdelta::stages::delta
