// The fold of a gate per channel (docs/math.md, "Safe exponentials"). Where all channels are mild, rows are factored at
// the chunk's start: (q_i e^G_i)·(k_j e^−G_j), and the left factors are what reads and erases. Steeper chunks are
// factored at a row r: (q_i e^(G_i − G_r))·(k_j e^(G_r − G_j)), if what they fall by behind their first row is mild;
// else halved: the later half against the earlier one with the anchor between them, where no exponent is positive, and
// each half by itself; the smallest ones pair by pair.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/fold.h"
#include "engines/cpu/kernels/delta_rule/chunk/keys.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Factors e^±x about an anchor stay normal, and so do their products with rows that are not short. Gradients are kept
// in these factors, too: below 2^-126 e^60 = 1e-12 they may lose digits.
inline constexpr float mildest_range = 60;
inline constexpr float short_row = 0x1p-15F;  // 2^-126 e^60 with all digits
inline constexpr Index paired_rows = 8;

// Whether a row of q [columns] is so small, and not 0, that it is not multiplied by such factors. l2norm leaves few as
// small: those whose factor is near the largest one. row(m): a vector of it.
template <class Rows>
bool is_short(bool l2norm, float factor, Index columns, const Rows& row) {
    if (l2norm && factor < 500) return false;
    F most = splat(0.0F);
    for (Index m = 0; m < columns; m += W) {
        const F size = abs(row(m));
        if (any(size >= splat(short_row))) return false;  // most rows, at their first numbers
        most = max(size, most);
    }
    return maximum(most) > 0;
}
template <class P>
bool is_short(const DeltaHeads& head, const KeyChunk<P>& keys, Index i) {
    return head.reads() && is_short(head.l2norm, keys.q_factor[i], round_up(head.key_size, W),
                                    [&](Index m) { return load(keys.q + i * keys.row + m); });
}

// A compensated sum of gates of one sign.
struct GateSum {
    F sum = splat(0.0F), lost = splat(0.0F);

    SOFTDELTA_INLINE void add(F g, F rest) {
        const F part = g + (rest - lost);
        const F next = sum + part;
        lost = (next - sum) - part;
        sum = next;
    }
    SOFTDELTA_INLINE F decay() const { return exp_of_sum(sum, splat(0.0F) - lost); }
    SOFTDELTA_INLINE F growth() const { return exp_of_sum(splat(0.0F) - sum, lost); }
    SOFTDELTA_INLINE Exponentials both() const { return exponentials_of_sum(sum, splat(0.0F) - lost); }
};

// Decays of W channels, rows by index in the chunk.
struct ChannelDecays {
    alignas(64) float left[largest_chunk * W];   // e^(G_i − G_r)
    alignas(64) float right[largest_chunk * W];  // e^(G_r − G_j)
};

// Channel gates of a chunk, and sums of them.
class ChannelGates {
  public:
    ChannelGates(const GateChunk& gates, Index columns) : gates_(gates), columns_(columns) {}

    // Channel m of the first of n rows [n, columns] in panels; rows lie panel_step(m) apart.
    template <class T>
    static T* in_panels(T* rows, Index n, Index m) {
        return rows + m / NR * NR * n + m % NR;
    }
    Index panel_step(Index m) const { return micropanel_width(m / NR * NR, columns_); }

    F gate(Index i, Index m) const { return load(gates_.g + i * gates_.row + m); }
    F rest(Index i, Index m) const {
        return gates_.g_rest == nullptr ? splat(0.0F) : load(gates_.g_rest + i * gates_.row + m);
    }

    // The largest |G_i − G_j| within rows [begin, end), or more where gates differ in sign.
    float range(Index begin, Index end) const {
        F most = splat(0.0F);
        for (Index m = 0; m < columns_; m += W) {
            F sum = splat(0.0F);
            for (Index i = begin + 1; i < end; ++i) sum = sum + abs(gate(i, m));
            most = max(most, sum);
        }
        return maximum(most);
    }

    // out_i ← e^Σg over rows [begin, i], of i in [begin, end); vectors lie `step` apart …
    void walk_up(Index m, Index begin, Index end, float* out, float* inverse = nullptr, Index step = W) const {
        GateSum sum;
        for (Index i = begin; i < end; ++i) {
            sum.add(gate(i, m), rest(i, m));
            store(out + i * step, sum.decay());
            if (inverse != nullptr) store(inverse + i * step, sum.growth());
        }
    }

    // … and over rows (i, end). Gives e^Σg over all of them.
    F walk_down(Index m, Index begin, Index end, float* out, float* inverse = nullptr, Index step = W) const {
        GateSum sum;
        for (Index i = end; i-- > begin;) {
            store(out + i * step, sum.decay());
            if (inverse != nullptr) store(inverse + i * step, sum.growth());
            sum.add(gate(i, m), rest(i, m));
        }
        return sum.decay();
    }

    // out_j ← factor·Σ_m q_m k_jm e^(G_im − G_jm) for j ≤ i, a decay for each pair. q(m), k(j, m): vectors of rows.
    template <class Query, class Keys>
    [[gnu::noinline]] void multiply_short_row(Index i, const Query& q, const Keys& k, float factor, float* out) const {
        F sums[largest_chunk];
        for (Index j = 0; j <= i; ++j) sums[j] = splat(0.0F);
        for (Index m = 0; m < columns_; m += W) {
            GateSum gates;  // over rows (j, i]
            for (Index j = i; j >= 0; --j) {
                sums[j] = fma(q(m) * k(j, m), gates.decay(), sums[j]);
                gates.add(gate(j, m), rest(j, m));
            }
        }
        for (Index j = 0; j <= i; ++j) out[j] = factor * sum(sums[j]);
    }

  protected:
    const GateChunk& gates_;
    Index columns_;
};

// Channel gates of one value head, and the chunk's memory.
template <class P>
class ChannelFold : ChannelGates {
  public:
    ChannelFold(const DeltaHeads& head, const KeyChunk<P>& keys, const GateChunk& gates, PairScratch<P>& scratch,
                Folded<P>& folded)
        : ChannelGates(gates, round_up(head.key_size, W)),
          head_(head),
          keys_(keys),
          s_(scratch),
          f_(folded),
          left_row_(keys.row / P::depth),
          before_decay_(head.rule.erase == core::Erase::from_previous_state) {}

    void run() {
        const float fall = range(-1, f_.n);
        const bool mild = f_.n > few_rows && fall <= mildest_range;
        f_.fall = mild ? fall : __builtin_inff();
        for (Index m = 0; m < columns_; m += W) {
            if (mild) {
                fold_mild_rows(m);
            } else {
                walk_up(m, 0, f_.n, d_.left);
                walk_down(m, 0, f_.n, d_.right);
                fold_rows(m);
            }
        }
        if (mild)
            multiply(0, f_.n, 0, f_.n, {f_.read, f_.row, 1}, {f_.erase, f_.row, 1});
        else
            fold_block(0, f_.n);
        for (Index i = 0; i < f_.n; ++i) {
            if (f_.n > few_rows && is_short(head_, keys_, i)) multiply_short(i, mild ? head_.scale : 1.0F);
            if (head_.reads())
                store_scores<P>(f_.n, mild ? 1.0F : head_.scale, i + 1, keys_.qk + i * keys_.pair_row,
                                f_.read + i * f_.row + f_.key_depth, nullptr);
            if (head_.erases())
                store_scores<P>(f_.n, mild ? 1.0F : -gates_.beta[i], i, keys_.pk + i * keys_.pair_row,
                                f_.erase + i * f_.row + f_.key_depth, f_.erase_score + i * f_.erase_score_row);
        }
    }

  private:
    // Both factors of rows [begin, end), about a row of them but the last. Gives the decay to that row.
    F factor(Index m, Index begin, Index end, Index anchor) {
        walk_up(m, anchor + 1, end, d_.left, d_.right);
        return walk_down(m, begin, anchor + 1, d_.right, d_.left);
    }

    // What row i erases with, when rows from `begin` on are decayed: the decay of the row before where that is the
    // rule.
    F erase_decay(Index i, Index begin) const {
        if (!before_decay_) return load(d_.left + i * W);
        return i == begin ? splat(1.0F) : load(d_.left + (i - 1) * W);
    }

    // Channels m … of A, rows [begin, end), and of B, rows [right_begin, right_end).
    void store_factors(Index m, Index begin, Index end, Index right_begin, Index right_end) {
        for (Index i = begin; i < end; ++i) {
            if (head_.reads())
                store_a(s_.q + i * left_row_ + m / P::depth, load(keys_.q + i * keys_.row + m) * load(d_.left + i * W),
                        P{});
            if (head_.erases())
                store_a(s_.p + i * left_row_ + m / P::depth, load(keys_.p + i * keys_.row + m) * erase_decay(i, begin),
                        P{});
        }
        for (Index j = right_begin; j < right_end; ++j)
            store_a(s_.k + j * left_row_ + m / P::depth, load(keys_.k + j * keys_.row + m) * load(d_.right + j * W),
                    P{});
    }

    // Channels m … of read_query, erase_key, write_key and state_decay.
    void fold_rows(Index m) {
        const F scale = splat(head_.scale);
        for (Index i = 0; i < f_.n; ++i) {
            if (head_.reads()) store_read(i, m, load(d_.left + i * W) * scale);
            if (head_.erases()) store_erase(i, m, erase_decay(i, 0));
        }
        store_writes(m, splat(1.0F), load(d_.left + (f_.n - 1) * W));
    }

    // The same, and B of pairs of rows: e^−G_j k_j. What lies behind `this` is in locals: a vector that is stored may
    // change everything else.
    void fold_mild_rows(Index m) {
        const bool reads = head_.reads(), erases = head_.erases(), raw = gates_.g_rest != nullptr;
        const bool before_decay = before_decay_;
        const Index n = f_.n, row = keys_.row, gate_row = gates_.row, operand_row = f_.row, left_row = left_row_;
        const float *g = gates_.g + m, *g_rest = raw ? gates_.g_rest + m : nullptr, *beta = gates_.beta;
        const float *q = keys_.q + m, *k = keys_.k + m, *p = keys_.p + m;
        Element<P>*read = f_.read + m / P::depth, *erase = f_.erase + m / P::depth, *pair = s_.k + m / P::depth;
        const Index panel_row = panel_step(m);
        float *left = f_.left == nullptr ? nullptr : in_panels(f_.left, n, m),
              *right = left == nullptr ? nullptr : in_panels(f_.right, n, m), *growth = d_.right;
        const F scale = splat(head_.scale);
        GateSum sum;
        F decay = splat(1.0F);
        for (Index i = 0; i < n; ++i) {
            sum.add(load(g + i * gate_row), raw ? load(g_rest + i * gate_row) : splat(0.0F));
            const Exponentials e = sum.both();
            if (reads) store_a(read + i * operand_row, load(q + i * row) * (e.of_sum * scale), P{});
            if (erases)
                store_a(erase + i * operand_row,
                        load(p + i * row) * (splat(-beta[i]) * (before_decay ? decay : e.of_sum)), P{});
            store(growth + i * W, e.of_negative);
            if (left != nullptr) {
                store(left + i * panel_row, e.of_sum);
                store(right + i * panel_row, e.of_negative);
            }
            store_a(pair + i * left_row, load(k + i * row) * e.of_negative, P{});
            decay = e.of_sum;
        }
        store_writes(m, decay, decay);
    }

    void store_read(Index i, Index m, F factor) {
        store_a(f_.read + i * f_.row + m / P::depth, load(keys_.q + i * keys_.row + m) * factor, P{});
    }
    void store_erase(Index i, Index m, F decay) {
        store_a(f_.erase + i * f_.row + m / P::depth,
                load(keys_.p + i * keys_.row + m) * (splat(-gates_.beta[i]) * decay), P{});
    }
    // Decays of the keys from d_.right to the chunk's end, and of the state.
    void store_writes(Index m, F to_end, F state_decay) {
        const Index n = f_.n, row = keys_.row, write_row = f_.write_row;
        const float *k = keys_.k + m, *right = d_.right;
        Element<P>* out = f_.write_key + m;
        const auto write = [&](Index j) { return load(k + j * row) * (load(right + j * W) * to_end); };
        Index j = 0;
        for (; j + P::depth <= n; j += P::depth)
            store_neighbours(out + j / P::depth * write_row, write(j), write(j + P::depth - 1), P{});
        if (j < n) store_neighbours(out + j / P::depth * write_row, write(j), splat(0.0F), P{});
        store(f_.state_decay + m, state_decay);
    }

    // Pairs of rows [begin, end) with columns [right_begin, right_end) from the factors.
    void multiply(Index begin, Index end, Index right_begin, Index right_end) {
        multiply(begin, end, right_begin, right_end, {s_.q, left_row_, 1}, {s_.p, left_row_, 1});
    }
    void multiply(Index begin, Index end, Index right_begin, Index right_end, MatrixA<P> read, MatrixA<P> erase) {
        const auto row = [&](Index j) {
            return Row{s_.k + (right_begin + j) * left_row_, P::depth == 1 ? DType::f32 : DType::bf16, 1};
        };
        const Index count = right_end - right_begin;
        pack_b_transposed<P>(count, head_.key_size, row, s_.buffer, s_.right);
        const auto pairs = [&](MatrixA<P> left, float* out) {
            Range columns[largest_chunk / row_tile<P> + 1];
            for (Index i = begin, t = 0; i < end; i += row_tile<P>, ++t)
                columns[t] = {0, i + row_tile<P> - right_begin};
            product<P>(end - begin, round_up(count, W), {left.data + begin * left.row, left.row, 1},
                       {s_.right, depth_of<P>(head_.key_size)},
                       {out + begin * keys_.pair_row + right_begin, keys_.pair_row}, columns);
        };
        if (head_.reads()) pairs(read, keys_.qk);
        if (head_.erases()) pairs(erase, keys_.pk);
    }

    void fold_block(Index begin, Index end) {
        if (end - begin > few_rows && range(begin, end) <= mildest_range) {
            for (Index m = 0; m < columns_; m += W) {
                factor(m, begin, end, (begin + end) / 2);
                store_factors(m, begin, end, begin, end);
            }
            return multiply(begin, end, begin, end);
        }
        if (end - begin <= paired_rows) return fold_pairs(begin, end);
        Index half = paired_rows;
        while (2 * half < end - begin) half *= 2;
        const Index middle = begin + half;
        for (Index m = 0; m < columns_; m += W) {
            walk_up(m, middle, end, d_.left);
            walk_down(m, begin, middle, d_.right);
            store_factors(m, middle, end, begin, middle);
        }
        multiply(middle, end, begin, middle);
        fold_block(begin, middle);
        fold_block(middle, end);
    }

    void multiply_short(Index i, float factor) {
        multiply_short_row(
            i, [&](Index m) { return load(keys_.q + i * keys_.row + m); },
            [&](Index j, Index m) { return load(keys_.k + j * keys_.row + m); }, factor, keys_.qk + i * keys_.pair_row);
    }

    void fold_pairs(Index begin, Index end) {
        for (Index i = begin; i < end; ++i) {
            F read[paired_rows], erase[paired_rows];
            for (Index j = 0; j < paired_rows; ++j) read[j] = erase[j] = splat(0.0F);
            for (Index m = 0; m < columns_; m += W) {
                const F q = load(keys_.q + i * keys_.row + m), p = load(keys_.p + i * keys_.row + m);
                GateSum sum, sum_before;  // over rows (j, i], (j, i)
                for (Index j = i; j >= begin; --j) {
                    const F k = load(keys_.k + j * keys_.row + m);
                    const F decay = sum.decay();
                    read[j - begin] = fma(q * k, decay, read[j - begin]);
                    erase[j - begin] = fma(p * k, before_decay_ ? sum_before.decay() : decay, erase[j - begin]);
                    sum.add(gate(j, m), rest(j, m));
                    if (j < i) sum_before.add(gate(j, m), rest(j, m));
                }
            }
            for (Index j = begin; j <= i; ++j) {
                keys_.qk[i * keys_.pair_row + j] = sum_of(read[j - begin]);
                keys_.pk[i * keys_.pair_row + j] = sum_of(erase[j - begin]);
            }
        }
    }
    static float sum_of(F x) { return sum(x); }

    const DeltaHeads& head_;
    const KeyChunk<P>& keys_;
    PairScratch<P>& s_;
    Folded<P>& f_;
    Index left_row_;
    bool before_decay_;
    ChannelDecays d_;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
