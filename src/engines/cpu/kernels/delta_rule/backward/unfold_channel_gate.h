// The unfold of a gate per channel. A block of rows is halved again and again; a pair of rows (i, j) is served
// where a middle lies between them. Sixteen steep rows:
//
//      j  0 1 2 3 4 5 6 7 8 9 . . . . . 15
//     i 0 a                                  a, b: a decay e^(G_i − G_j) for each pair (unfold_channel_rows.h)
//       1 a a
//       2 a a a                              M: one matrix product with row 7, the last before the middle, as anchor:
//       3 a a a a                               (q_i e^(G_i − G_7)) · (k_j e^(G_7 − G_j)), no exponent is positive
//       4 a a a a a
//       5 a a a a a a
//       6 a a a a a a a
//       7 a a a a a a a a
//       8 M M M M M M M M b
//       9 M M M M M M M M b b                thirty-two rows: two such triangles, and under the first a square of
//      10 M M M M M M M M b b b              16 × 16 pairs with row 15 as anchor
//      11 M M M M M M M M b b b b
//      12 M M M M M M M M b b b b b          a mild block, whose gates sum to at most mildest_range: all its pairs
//      13 M M M M M M M M b b b b b b        have the row in its middle as anchor. Before it exponents of q are
//      14 M M M M M M M M b b b b b b b      positive, after it those of k
//      15 M M M M M M M M b b b b b b b b
//
// Where the gates of a whole chunk sum up to half of that, the anchor is its start: the fold has these factors already.
//
// The gate of row s is spanned by the pairs j < s ≤ i: for s = 10 the rows 10 to 15 of M, and of b those with j = 8, 9.
// A block passes to its halves what spans all of their gates:
//     to the earlier half   through + Σ over rows i of the later half of q_i∘dq_i + βp_i∘e_i
//     to the later half     through + Σ over rows j of the earlier half of k_j∘dk_j
// with dq, e and dk as they are before the pairs M are added: what comes from beyond the block. So a gate's gradient is
// a sum without subtraction. Factors cancel in these sums: q∘dq = (q e^(G − G_r))∘(dq e^(G_r − G)).
#pragma once

#include "engines/cpu/kernels/delta_rule/backward/unfold_channel_rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// dq, dk, e [n, K] of the folded rows and dscore, derase_score [n, n] → dq, dk, e, dg [n, K].
template <class P>
class ChannelUnfold : ChannelUnfoldRows<P> {
  public:
    ChannelUnfold(const DeltaHeads& heads, const KeyChunk<P>& keys, const GateChunk& gates, const Folded<P>& folded,
                  const ChunkGradients<P>& d, ChannelUnfoldScratch<P>& s)
        : Rows(heads, keys, gates, folded.n, d, s), folded_(folded) {
        for (Index i = 0; i < n_; ++i) has_short_ = has_short_ || is_short(heads, keys, i);
    }

    // dq, dk, de, dg
    void run() {
        take_coefficients();
        for (Index m = 0; m < columns_; m += W)
            store(s_.through + m, load(folded_.state_decay + m) * load(d_.dstate_decay + m));
        if (!has_short_ && folded_.fall <= mildest_range / 2) {
            for (Index m = 0; m < columns_; m += W) {
                decay_rows(m, 0, n_, 0, n_);
                const F from_anchor = left(n_ - 1, m);
                scale_rows(m, 0, n_, [&](Index /*i*/, F& dq, F& dk, F& de) {
                    dq = dq * splat(heads_.scale);
                    dk = dk * from_anchor;
                    de = splat(0.0F) - de;
                });
            }
            unfold_block<true>(0, n_, s_.through, 0);
            leave_factors(0, n_);
        } else if (is_mild(0, n_)) {
            for (Index m = 0; m < columns_; m += W) {
                const F to_anchor = factor(m, 0, n_), from_anchor = left(n_ - 1, m);
                scale_rows(m, 0, n_, [&](Index i, F& dq, F& dk, F& de) {
                    dq = dq * (splat(heads_.scale) * to_anchor);
                    dk = dk * from_anchor;
                    de = splat(0.0F) - (before_decay_ && i == 0 ? de : de * to_anchor);
                });
            }
            unfold_block<true>(0, n_, s_.through, 0);
            leave_factors(0, n_);
        } else {
            for (Index m = 0; m < columns_; m += W) {
                walk_up(m, 0, n_, at(s_.left, m), nullptr, step(m));
                walk_down(m, 0, n_, at(s_.right, m), nullptr, step(m));
                scale_rows(m, 0, n_, [&](Index i, F& dq, F& dk, F& de) {
                    dq = dq * (splat(heads_.scale) * left(i, m));
                    dk = dk * right(i, m);
                    de = splat(0.0F) - de * erase_decay(i, m, 0);
                });
            }
            unfold_block<false>(0, n_, s_.through, 0);
        }
    }

  private:
    using Rows = ChannelUnfoldRows<P>;
    using Rows::at, Rows::step, Rows::left, Rows::right, Rows::erase_decay, Rows::scale_rows;
    using Rows::columns_, Rows::gates_, Rows::range, Rows::walk_up, Rows::walk_down;
    using Rows::heads_, Rows::keys_, Rows::n_, Rows::d_, Rows::s_, Rows::before_decay_;

    bool is_mild(Index begin, Index end) const {
        return !has_short_ && end - begin > few_rows && range(begin, end) <= mildest_range;
    }

    // dscore ← scale·dscore for i ≥ j, derase_score ← −derase_score for i > j, 0 elsewhere.
    void take_coefficients() {
        const Index row = d_.pair_row;
        for (Index i = 0; i < n_; ++i)
            for (Index j = 0; j < round_up(n_, W); j += W) {
                const F index = iota() + splat(static_cast<float>(j)), own = splat(static_cast<float>(i));
                float* dscore = d_.dscore + i * row + j;
                float* derase = d_.derase_score + i * row + j;
                store(dscore, select(index <= own, splat(heads_.scale) * load(dscore), splat(0.0F)));
                if (heads_.erases()) store(derase, select(index < own, splat(0.0F) - load(derase), splat(0.0F)));
            }
        read_row_ = pairs_as_a(n_, d_.dscore, row, s_.along_row[0]);
        read_column_ = transposed_pairs_as_a(n_, d_.dscore, row, s_.along_column[0]);
        if (!heads_.erases()) return;
        erase_row_ = pairs_as_a(n_, d_.derase_score, row, s_.along_row[1]);
        erase_column_ = transposed_pairs_as_a(n_, d_.derase_score, row, s_.along_column[1]);
    }

    // Decayed rows of q and p in [begin, end), of k in [right_begin, right_end), in floats and as operands.
    void decay_rows(Index m, Index begin, Index end, Index right_begin, Index right_end) {
        for (Index i = begin; i < end; ++i) {
            store(at(s_.q, m) + i * step(m), load(keys_.q + i * keys_.row + m) * left(i, m));
            if (heads_.erases())
                store(at(s_.p, m) + i * step(m),
                      splat(gates_.beta[i]) * load(keys_.p + i * keys_.row + m) * erase_decay(i, m, begin));
        }
        for (Index j = right_begin; j < right_end; ++j)
            store(at(s_.k, m) + j * step(m), load(keys_.k + j * keys_.row + m) * right(j, m));
        if constexpr (P::depth == 2) {
            round_rows(m, begin, end, s_.q, s_.q_right);
            round_rows(m, begin, end, s_.p, s_.p_right);
            round_rows(m, right_begin, right_end, s_.k, s_.k_right);
        }
    }
    void round_rows(Index m, Index begin, Index end, const float* rows, std::uint32_t* out) const {
        std::uint32_t* to = out + m / NR * NR * depth_of<P>(n_) + m % NR;
        for (Index i = begin; i < end; i += 2) {
            const float* from = at(rows, m) + i * step(m);
            store(to + i / 2 * step(m), bf16_pairs(load(from), i + 1 < end ? load(from + step(m)) : splat(0.0F)));
        }
    }

    // Channels m … of rows [begin, end) factored about the row in their middle. Gives the decay to that row.
    F factor(Index m, Index begin, Index end) {
        const Index anchor = (begin + end) / 2;
        walk_up(m, anchor + 1, end, at(s_.left, m), at(s_.right, m), step(m));
        const F to_anchor = walk_down(m, begin, anchor + 1, at(s_.right, m), at(s_.left, m), step(m));
        decay_rows(m, begin, end, begin, end);
        return to_anchor;
    }

    // Gradients in factors become gradients.
    void leave_factors(Index begin, Index end) {
        for (Index m = 0; m < columns_; m += W)
            scale_rows(m, begin, end, [&](Index i, F& dq, F& dk, F& de) {
                dq = dq * left(i, m);
                dk = dk * right(i, m);
                de = de * erase_decay(i, m, begin);
            });
    }

    // Rows [begin, end), all that comes from beyond them is there; `through` spans all their gates. factored: rows and
    // their gradients are, about an anchor.
    template <bool factored>
    void unfold_block(Index begin, Index end, const float* through, Index depth) {
        if (!factored && is_mild(begin, end)) {
            for (Index m = 0; m < columns_; m += W) {
                factor(m, begin, end);
                scale_rows(m, begin, end, [&](Index i, F& dq, F& dk, F& de) {
                    dq = dq * right(i, m);
                    dk = dk * left(i, m);
                    if (!before_decay_)
                        de = de * right(i, m);
                    else if (i > begin)
                        de = de * right(i - 1, m);
                });
            }
            unfold_block<true>(begin, end, through, depth);
            return leave_factors(begin, end);
        }
        if (end - begin <= paired_rows) {
            for (Index m = 0; m < columns_; m += W)
                if constexpr (factored)
                    this->unfold_factored_rows(std::make_integer_sequence<Index, paired_rows>{}, end - begin, m, begin,
                                               load(through + m));
                else
                    this->unfold_rows(m, begin, end, load(through + m));
            return;
        }
        Index half = paired_rows;
        while (2 * half < end - begin) half *= 2;
        const Index middle = begin + half;
        float* earlier = s_.through + (1 + 2 * depth) * columns_;
        float* later = earlier + columns_;
        for (Index m = 0; m < columns_; m += W) {
            F of_later = load(through + m), of_earlier = of_later;
            for (Index i = middle; i < end; ++i) of_later = of_later + this->template row_terms<factored>(m, i);
            for (Index j = begin; j < middle; ++j)
                of_earlier = fma(this->template key<factored>(m, j), load(d_.dk + j * d_.key_row + m), of_earlier);
            store(earlier + m, of_later);
            store(later + m, of_earlier);
        }
        if constexpr (factored)
            multiply(begin, middle, end, {d_.dq, d_.key_row, Start::add}, {d_.dk, d_.key_row, Start::add},
                     {d_.de, d_.key_row, Start::add});
        else
            unfold_halves(begin, middle, end);
        unfold_block<factored>(begin, middle, earlier, depth + 1);
        unfold_block<factored>(middle, end, later, depth + 1);
    }

    // The pairs of rows in [middle, end) with those in [begin, middle), from factors.
    void multiply(Index begin, Index middle, Index end, MatrixC dq, MatrixC dk, MatrixC de) const {
        Range earlier[largest_chunk / row_tile<P> + 1], later[largest_chunk / row_tile<P> + 1];
        for (Range& x : earlier) x = {begin / P::depth, depth_of<P>(middle)};
        for (Range& x : later) x = {middle / P::depth, depth_of<P>(end)};
        const Index depth = depth_of<P>(n_);
        const auto times = [&](MatrixA<P> a, Index first, Index last, const Element<P>* b, MatrixC c,
                               const Range* depths) {
            a.data += first * a.row;
            c.data += first * c.row;
            product<P>(last - first, columns_, a, {b, depth}, c, nullptr, depths);
        };
        times(read_row_, middle, end, s_.k_right, dq, earlier);
        times(read_column_, begin, middle, s_.q_right, dk, later);
        if (!heads_.erases()) return;
        times(erase_row_, middle, end, s_.k_right, de, earlier);
        dk.start = Start::add;
        times(erase_column_, begin, middle, s_.p_right, dk, later);
    }

    // The same, with the row before the middle as anchor: no exponent is positive.
    void unfold_halves(Index begin, Index middle, Index end) {
        for (Index m = 0; m < columns_; m += W) {
            walk_up(m, middle, end, at(s_.left, m), nullptr, step(m));
            walk_down(m, begin, middle, at(s_.right, m), nullptr, step(m));
            decay_rows(m, middle, end, begin, middle);
        }
        multiply(begin, middle, end, {s_.dq, d_.key_row}, {s_.dk, d_.key_row}, {s_.de, d_.key_row});
        for (Index m = 0; m < columns_; m += W) {
            const auto part = [&](const float* x, Index i) { return load(x + i * d_.key_row + m); };
            scale_rows(m, middle, end, [&](Index i, F& dq, F& /*dk*/, F& de) {
                dq = fma(part(s_.dq, i), left(i, m), dq);
                if (heads_.erases()) de = fma(part(s_.de, i), erase_decay(i, m, middle), de);
            });
            scale_rows(m, begin, middle,
                       [&](Index j, F& /*dq*/, F& dk, F& /*de*/) { dk = fma(part(s_.dk, j), right(j, m), dk); });
        }
    }

    const Folded<P>& folded_;
    bool has_short_ = false;  // rows of q, which are not factored
    MatrixA<P> read_row_{}, read_column_{}, erase_row_{}, erase_column_{};
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
