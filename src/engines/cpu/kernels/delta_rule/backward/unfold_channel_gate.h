// The unfold of a gate per channel. A block of rows is halved again and again; a pair of rows belongs to the block that
// parts them. Where the block is halved,
//     the later half's gates are spanned by   pairs with the earlier half, Σ over its own rows from the gate on,
//                                             and all that the earlier half's keys send beyond the block,
//     the earlier half's gates accordingly.
// So the gradient of a gate is a sum without subtraction, and row sums of what is there at the time make it. Where the
// block is mild, rows are factored at an anchor, and so are their gradients: q∘dq = (q e^(G − G_r))∘(dq e^(G_r − G)).
#pragma once

#include "engines/cpu/kernels/delta_rule/backward/unfold.h"
#include "engines/cpu/kernels/delta_rule/chunk/channel_gate.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// A block of largest_chunk rows is halved so often until paired_rows are left.
inline constexpr Index halvings = 3;
static_assert(paired_rows << halvings == largest_chunk);

// Rows [n, K] in panels of channels.
template <class P>
struct ChannelUnfoldScratch {
    float *left, *right;                        // e^(G_i − G_r), e^(G_r − G_j)
    float *q, *k, *p;                           // decayed rows of q and k, and of p with β
    Element<P>*q_right, *k_right, *p_right;     // the same as right operands
    float *dq, *dk, *de;                        // [n, K] for a moment
    float* through;                             // [1 + 2·halvings, K] terms that span all of a block
    Element<P>*along_row[2], *along_column[2];  // dscore, derase_score rounded

    ChannelUnfoldScratch(const ChunkSizes<P>& sizes, bool channel, Scratch& scratch) {
        if (!channel) return;
        const Index keys = round_up(sizes.keys, W);
        for (float** x : {&left, &right, &q, &k, &p}) *x = scratch.take<float>(sizes.rows * keys);
        for (float** x : {&dq, &dk, &de}) *x = scratch.take<float>(sizes.rows * sizes.key_row());
        through = scratch.take<float>((1 + 2 * halvings) * keys);
        if constexpr (P::depth == 1) {
            q_right = q, k_right = k, p_right = p;
        } else {
            for (Element<P>** x : {&q_right, &k_right, &p_right})
                *x = scratch.take<Element<P>>(depth_of<P>(sizes.rows) * keys);
            for (int i = 0; i < 2; ++i) {
                along_row[i] = scratch.take<Element<P>>(sizes.rows * sizes.pair_row() / P::depth);
                along_column[i] = scratch.take<Element<P>>(depth_of<P>(sizes.rows) * sizes.pair_row());
            }
        }
    }
};

template <class P>
class ChannelUnfold : ChannelGates {
  public:
    ChannelUnfold(const DeltaHeads& heads, const KeyChunk<P>& keys, const GateChunk& gates, Index n,
                  const float* state_decay, const ChunkGradients<P>& d, ChannelUnfoldScratch<P>& s)
        : ChannelGates(gates, round_up(heads.key_size, W)),
          heads_(heads),
          keys_(keys),
          n_(n),
          d_(d),
          s_(s),
          state_decay_(state_decay),
          before_decay_(heads.rule.erase == core::Erase::from_previous_state) {}

    // dq, dk, de, dg
    void run() {
        take_coefficients();
        for (Index m = 0; m < columns_; m += W)
            store(s_.through + m, load(state_decay_ + m) * load(d_.dstate_decay + m));
        if (is_mild(0, n_)) {
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
    // Channel m of row 0 of rows in panels; rows lie step(m) apart.
    Index step(Index m) const { return columns_ - m / NR * NR < NR ? W : NR; }
    template <class T>
    T* at(T* rows, Index m) const {
        return rows + m / NR * NR * n_ + m % NR;
    }
    F left(Index i, Index m) const { return load(at(s_.left, m) + i * step(m)); }
    F right(Index i, Index m) const { return load(at(s_.right, m) + i * step(m)); }
    // What row i erases with, when rows from `begin` on are decayed.
    F erase_decay(Index i, Index m, Index begin) const {
        if (!before_decay_) return left(i, m);
        return i == begin ? splat(1.0F) : left(i - 1, m);
    }

    bool is_mild(Index begin, Index end) const { return end - begin > few_rows && range(begin, end) <= mildest_range; }

    // change(row, dq, dk, de) of channels m … of rows [begin, end)
    template <class Change>
    SOFTDELTA_INLINE void scale_rows(Index m, Index begin, Index end, const Change& change) {
        for (Index i = begin; i < end; ++i) {
            const Index to = i * d_.key_row + m;
            F dq = load(d_.dq + to), dk = load(d_.dk + to), de = heads_.erases() ? load(d_.de + to) : splat(0.0F);
            change(i, dq, dk, de);
            store(d_.dq + to, dq);
            store(d_.dk + to, dk);
            if (heads_.erases()) store(d_.de + to, de);
        }
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
        read_row_ = pairs_along_row(n_, d_.dscore, row, s_.along_row[0]);
        read_column_ = pairs_along_column(n_, d_.dscore, row, s_.along_column[0]);
        if (!heads_.erases()) return;
        erase_row_ = pairs_along_row(n_, d_.derase_score, row, s_.along_row[1]);
        erase_column_ = pairs_along_column(n_, d_.derase_score, row, s_.along_column[1]);
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
                    unfold_factored_rows(std::make_integer_sequence<Index, paired_rows>{}, end - begin, m, begin,
                                         load(through + m));
                else
                    unfold_rows(m, begin, end, load(through + m));
            return;
        }
        Index half = paired_rows;
        while (2 * half < end - begin) half *= 2;
        const Index middle = begin + half;
        float* earlier = s_.through + (1 + 2 * depth) * columns_;
        float* later = earlier + columns_;
        for (Index m = 0; m < columns_; m += W) {
            F of_later = load(through + m), of_earlier = of_later;
            for (Index i = middle; i < end; ++i) of_later = of_later + row_terms<factored>(m, i);
            for (Index j = begin; j < middle; ++j)
                of_earlier = fma(key<factored>(m, j), load(d_.dk + j * d_.key_row + m), of_earlier);
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

    // q∘dq and βp∘de of row i, and k of row j.
    template <bool factored>
    SOFTDELTA_INLINE F read_term(Index m, Index i) const {
        const F q = factored ? load(at(s_.q, m) + i * step(m)) : load(keys_.q + i * keys_.row + m);
        return q * load(d_.dq + i * d_.key_row + m);
    }
    template <bool factored>
    SOFTDELTA_INLINE F erase_term(Index m, Index i) const {
        if (!heads_.erases()) return splat(0.0F);
        const F p =
            factored ? load(at(s_.p, m) + i * step(m)) : splat(gates_.beta[i]) * load(keys_.p + i * keys_.row + m);
        return p * load(d_.de + i * d_.key_row + m);
    }
    template <bool factored>
    SOFTDELTA_INLINE F row_terms(Index m, Index i) const {
        return read_term<factored>(m, i) + erase_term<factored>(m, i);
    }
    template <bool factored>
    SOFTDELTA_INLINE F key(Index m, Index j) const {
        return factored ? load(at(s_.k, m) + j * step(m)) : load(keys_.k + j * keys_.row + m);
    }

    // The pairs of rows in [middle, end) with those in [begin, middle), from factors.
    void multiply(Index begin, Index middle, Index end, MatrixC dq, MatrixC dk, MatrixC de) const {
        Range earlier[largest_chunk / MR + 1], later[largest_chunk / MR + 1];
        for (Range& x : earlier) x = {begin / P::depth, depth_of<P>(middle)};
        for (Range& x : later) x = {middle / P::depth, depth_of<P>(end)};
        const Index depth = depth_of<P>(n_);
        const auto times = [&](MatrixA<P> a, Index first, Index last, const Element<P>* right, MatrixC c,
                               const Range* depths) {
            a.data += first * a.row;
            c.data += first * c.row;
            product<P>(last - first, columns_, a, {right, depth}, c, nullptr, depths);
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

    // dg of channels m … from what comes from beyond rows [begin, begin + count).
    template <bool factored>
    SOFTDELTA_INLINE void begin_gates(Index m, Index begin, Index count, F through, F* dg) const {
        F later = splat(0.0F);
#pragma GCC unroll 8
        for (Index i = count - 1; i >= 0; --i) {
            const F erase = erase_term<factored>(m, begin + i);
            later = later + read_term<factored>(m, begin + i);
            if (!before_decay_) later = later + erase;
            dg[i] = later;
            if (before_decay_) later = later + erase;
        }
#pragma GCC unroll 8
        for (Index j = 0; j < count; ++j) {
            dg[j] = dg[j] + through;
            through = fma(key<factored>(m, begin + j), load(d_.dk + (begin + j) * d_.key_row + m), through);
        }
    }

    // A few rows from factors, pairs among them too. Their number is known when compiled: all sums stay in registers.
    template <Index... counts>
    SOFTDELTA_INLINE void unfold_factored_rows(std::integer_sequence<Index, counts...> /*possible*/, Index count,
                                               Index m, Index begin, F through) {
        ((count == counts + 1 ? unfold_factored_rows<counts + 1>(m, begin, through) : void()), ...);
    }
    template <Index count>
    [[gnu::noinline]] void unfold_factored_rows(Index m, Index begin, F through) {
        F dg[count], dk[count];
        begin_gates<true>(m, begin, count, through, dg);
#pragma GCC unroll 8
        for (F& x : dk) x = splat(0.0F);
        add_pairs<count>(m, begin, s_.q, d_.dscore, false, d_.dq, dk, dg);
        if (heads_.erases()) add_pairs<count>(m, begin, s_.p, d_.derase_score, before_decay_, d_.de, dk, dg);
#pragma GCC unroll 8
        for (Index j = 0; j < count; ++j) {
            float* to = d_.dk + (begin + j) * d_.key_row + m;
            store(to, load(to) + dk[j]);
        }
#pragma GCC unroll 8
        for (Index i = 0; i < count; ++i) store(d_.dg + (begin + i) * d_.key_row + m, dg[i]);
    }

    // Pairs i ≥ j of `count` rows x with k: dx_i += Σ_j c_ij k_j, dk_j += Σ_i c_ij x_i, and to the gates between them
    // x_i c_ij k_j. exclusive: the gate of row i is none of them.
    template <Index count>
    SOFTDELTA_INLINE void add_pairs(Index m, Index begin, const float* rows, const float* pairs, bool exclusive,
                                    float* dx, F (&dk)[count], F (&dg)[count]) const {
        const Index row = d_.pair_row, next = step(m);
        const float* c = pairs + begin * row + begin;
        const float* x = at(rows, m) + begin * next;
        const float* k = at(s_.k, m) + begin * next;
        F sums[count];
#pragma GCC unroll 8
        for (Index i = 0; i < count; ++i) sums[i] = splat(0.0F);
#pragma GCC unroll 8
        for (Index j = 0; j < count; ++j) {
            const F own = load(k + j * next);
            F spanning = splat(0.0F), of_key = splat(c[j * row + j]) * load(x + j * next);
#pragma GCC unroll 8
            for (Index i = j + 1; i < count; ++i) {
                const F factor = splat(c[i * row + j]), other = load(x + i * next);
                sums[i] = fma(factor, own, sums[i]);
                of_key = fma(factor, other, of_key);
                if (!exclusive || i > j + 1) spanning = fma(other, sums[i], spanning);
            }
            if (j + 1 < count) dg[j + 1] = dg[j + 1] + spanning;
            dk[j] = dk[j] + of_key;
        }
#pragma GCC unroll 8
        for (Index i = 0; i < count; ++i) {
            float* to = dx + (begin + i) * d_.key_row + m;
            store(to, load(to) + fma(splat(c[i * row + i]), load(k + i * next), sums[i]));
        }
    }

    // A few rows, steep: a decay for each pair.
    void unfold_rows(Index m, Index begin, Index end, F through) {
        F dg[paired_rows], decay[paired_rows], decay_before[paired_rows];
        begin_gates<false>(m, begin, end - begin, through, dg);
        for (Index i = begin; i < end; ++i) {
            const F q = load(keys_.q + i * keys_.row + m);
            const F p = splat(gates_.beta[i]) * load(keys_.p + i * keys_.row + m);
            const float* read = d_.dscore + i * d_.pair_row;
            const float* erase = d_.derase_score + i * d_.pair_row;
            GateSum sum, sum_before;  // over rows (j, i], (j, i)
            for (Index j = i; j-- > begin;) {
                sum.add(gate(j + 1, m), rest(j + 1, m));
                if (j + 1 < i) sum_before.add(gate(j + 1, m), rest(j + 1, m));
                decay[j - begin] = sum.decay();
                decay_before[j - begin] = before_decay_ ? sum_before.decay() : decay[j - begin];
            }
            F dq = splat(0.0F), de = splat(0.0F), spanning = splat(0.0F), erase_spanning = splat(0.0F);
            for (Index j = begin; j <= i; ++j) {
                const F k = load(keys_.k + j * keys_.row + m);
                float* to = d_.dk + j * d_.key_row + m;
                const F c = splat(read[j]) * (j < i ? decay[j - begin] : splat(1.0F));
                F dk = c * q;
                dq = fma(c, k, dq);
                if (j < i) {
                    spanning = fma(dk, k, spanning);
                    dg[j + 1 - begin] = dg[j + 1 - begin] + spanning;
                }
                if (heads_.erases() && j < i) {
                    const F e = splat(erase[j]) * decay_before[j - begin];
                    de = fma(e, k, de);
                    erase_spanning = fma(e * p, k, erase_spanning);
                    dk = fma(e, p, dk);
                    if (!before_decay_ || j + 1 < i) dg[j + 1 - begin] = dg[j + 1 - begin] + erase_spanning;
                }
                store(to, load(to) + dk);
            }
            scale_rows(m, i, i + 1, [&](Index /*i*/, F& all_dq, F& /*dk*/, F& all_de) {
                all_dq = all_dq + dq;
                all_de = all_de + de;
            });
        }
        for (Index i = begin; i < end; ++i) store(d_.dg + i * d_.key_row + m, dg[i - begin]);
    }

    const DeltaHeads& heads_;
    const KeyChunk<P>& keys_;
    Index n_;
    const ChunkGradients<P>& d_;
    ChannelUnfoldScratch<P>& s_;
    const float* state_decay_;
    bool before_decay_;
    MatrixA<P> read_row_{}, read_column_{}, erase_row_{}, erase_column_{};
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
