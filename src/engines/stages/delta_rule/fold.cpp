#include "engines/stages/delta_rule/fold.h"

namespace softdelta::stages::delta {

namespace {

template <class T, class U>
Rows<T> rows_of(const Tile<U>& x, const Piece& piece) {
    return {x.data() + piece.begin * x.cols(), piece.count, x.cols()};
}

// out ← e^x, x [n, K|1]
template <class T>
void exponentiate_rows(const Rows<double>& x, Tile<T>& out) {
    out = x.template cast<T>();
    exponentiate(out.data(), out.size());
}

// The difference is taken in f64 before it is rounded.
template <class T>
void exponentiate_to_last(const Rows<double>& G, Tile<T>& out) {
    out.resize(G.rows(), G.cols());
    const double* last = G.row(G.rows() - 1).data();
    for (Index i = 0; i < G.rows(); ++i) subtract(last, G.row(i).data(), G.cols(), out.row(i).data());
    exponentiate(out.data(), out.size());
}

}  // namespace

template <class T>
Chunk<T>::Chunk(const KeyHead<T>& key, const ValueHead<T>& value, const Piece& piece)
    : q(rows_of<T>(key.q, piece)),
      k(rows_of<T>(key.k, piece)),
      p(rows_of<T>(key.p.size() > 0 ? key.p : key.k, piece)),
      v(rows_of<T>(value.v, piece)),
      beta(value.beta.data() + piece.begin, piece.count),
      G(rows_of<double>(value.G, piece)),
      E(rows_of<double>(value.E.size() > 0 ? value.E : value.G, piece)) {}

template <class T>
void fold(const FoldRule<T>& rule, const Chunk<T>& c, Rounding& rounding, FoldScratch<T>& scratch, Folded<T>& f) {
    exponentiate_rows(c.G, f.read_decay);
    decay_rows(c.q, f.read_decay, f.read_query);
    f.read_query *= rule.scale;
    exponentiate_to_last(c.G, f.write_decay);
    decay_rows(c.k, f.write_decay, f.write_key);
    f.state_decay.resize(c.k.cols());
    for (Index m = 0; m < c.k.cols(); ++m) f.state_decay[m] = f.read_decay(c.rows() - 1, c.G.cols() == 1 ? 0 : m);
    if (rule.erases) {
        exponentiate_rows(c.E, f.erase_decay);
        decay_rows(c.p, f.erase_decay, f.erase_key);
        f.erase_key.array().colwise() *= c.beta.array();
    }
    if (c.G.cols() == 1)
        fold_shared_pairs(rule, c, scratch, f);
    else
        fold_channel_pairs(rule, c, rounding, scratch, f);
    for (Tile<T>* x : {&f.read_query, &f.write_key, &f.erase_key, &f.score}) rounding.operand(x->data(), x->size());
}

template <class T>
void unfold(const FoldRule<T>& rule, const Chunk<T>& c, const Folded<T>& f, FoldedGradients<T>& d, Rounding& rounding,
            FoldScratch<T>& scratch, Unfolded<T>& u) {
    const Index channels = c.G.cols();
    Tile<T>& terms = scratch.terms;
    decay_rows(d.read_query, f.read_decay, u.dq_state);
    u.dq_state *= rule.scale;
    decay_rows(d.write_key, f.write_decay, u.dk_state);
    multiply_for_gate(f.state_decay.transpose(), d.state_decay.transpose(), channels, terms);
    u.dg = terms.replicate(c.rows(), 1);
    multiply_for_gate(c.q, u.dq_state, channels, terms);
    add_spans_up_to(terms, false, u.dg);
    multiply_for_gate(c.k, u.dk_state, channels, terms);
    add_spans_after(terms, u.dg);
    if (rule.erases) {
        decay_rows(d.erase_key, f.erase_decay, u.e_state);
        scratch.beta_p = c.p.array().colwise() * c.beta.array();
        multiply_for_gate(scratch.beta_p, u.e_state, channels, terms);
        add_spans_up_to(terms, rule.before_decay, u.dg);
    }
    if (channels == 1)
        unfold_shared_pairs(rule, c, f, d, rounding, scratch, u);
    else
        unfold_channel_pairs(rule, c, d, rounding, scratch, u);
}

template struct Chunk<double>;
template struct Chunk<float>;
template void fold(const FoldRule<double>&, const Chunk<double>&, Rounding&, FoldScratch<double>&, Folded<double>&);
template void fold(const FoldRule<float>&, const Chunk<float>&, Rounding&, FoldScratch<float>&, Folded<float>&);
template void unfold(const FoldRule<double>&, const Chunk<double>&, const Folded<double>&, FoldedGradients<double>&,
                     Rounding&, FoldScratch<double>&, Unfolded<double>&);
template void unfold(const FoldRule<float>&, const Chunk<float>&, const Folded<float>&, FoldedGradients<float>&,
                     Rounding&, FoldScratch<float>&, Unfolded<float>&);

}  // namespace softdelta::stages::delta
