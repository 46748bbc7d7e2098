// The unfold of a gate per channel within a few rows, pair by pair. What comes from beyond these rows is there already.
// A gate of row s has
//     dg_s = through + Σ_(i ≥ s) (q_i∘dq_i + βp_i∘e_i) + Σ_(j < s) k_j∘dk_j + Σ_(j < s ≤ i) of their pairs (i, j)
// where `through` spans all these rows, and dq, e and dk are those from beyond.
#pragma once

#include "engines/cpu/kernels/delta_rule/backward/unfold.h"
#include "engines/cpu/kernels/delta_rule/chunk/channel_gate.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// A block of largest_chunk rows is halved so often that paired_rows are left.
inline constexpr Index halvings = 3;
static_assert(paired_rows << halvings == largest_chunk);

// Rows [n, K] in panels of channels.
template <class P>
struct ChannelUnfoldScratch {
    float *left = nullptr, *right = nullptr;    // e^(G_i − G_r), e^(G_r − G_j); of the folded chunk
    float *q, *k, *p;                           // decayed rows of q and k, and of p with β
    Element<P>*q_right, *k_right, *p_right;     // the same as B
    float *dq, *dk, *de;                        // [n, K] temporary
    float* through;                             // [1 + 2·halvings, K] terms that span all of a block
    Element<P>*along_row[2], *along_column[2];  // dscore, derase_score rounded

    ChannelUnfoldScratch(const ChunkSizes<P>& sizes, bool channel, Scratch& scratch) {
        if (!channel) return;
        const Index keys = round_up(sizes.keys, W);
        for (float** x : {&q, &k, &p}) *x = scratch.take<float>(sizes.rows * keys);
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
class ChannelUnfoldRows : protected ChannelGates {
  protected:
    ChannelUnfoldRows(const DeltaHeads& heads, const KeyChunk<P>& keys, const GateChunk& gates, Index n,
                      const ChunkGradients<P>& d, ChannelUnfoldScratch<P>& s)
        : ChannelGates(gates, round_up(heads.key_size, W)),
          heads_(heads),
          keys_(keys),
          n_(n),
          d_(d),
          s_(s),
          before_decay_(heads.rule.erase == core::Erase::from_previous_state) {}

    // Channel m of row 0 of rows in panels; rows lie step(m) apart.
    Index step(Index m) const { return panel_step(m); }
    template <class T>
    T* at(T* rows, Index m) const {
        return in_panels(rows, n_, m);
    }
    F left(Index i, Index m) const { return load(at(s_.left, m) + i * step(m)); }
    F right(Index i, Index m) const { return load(at(s_.right, m) + i * step(m)); }
    // What row i erases with, when rows from `begin` on are decayed.
    F erase_decay(Index i, Index m, Index begin) const {
        if (!before_decay_) return left(i, m);
        return i == begin ? splat(1.0F) : left(i - 1, m);
    }

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
    bool before_decay_;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
