// The softmax of rows whose scores lie in matrix tiles: their bases, sums and exponentials.
//
// An exponential is 2^((score − base)·slope). The base is the largest of the first scores that the row meets, and
// follows when a score lies 2^8 above: what was summed is then multiplied.
//
// Probabilities are computed in 16 bits (simd/sixteen_bits.h), and o is divided by the sum of the rounded ones. The
// sum's logarithm needs more: where it is wanted, and in rows of larger bases, exponentials have 32 bits.
#pragma once

#include <cmath>

#include "engines/cpu/kernels/attention/forward/memory.h"
#include "engines/cpu/kernels/attention/forward/row_scores.h"
#include "engines/cpu/kernels/simd/sixteen_bits.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

template <class P>
class TileRows {
    using Memory = ForwardMemory<P>;
    using Exponentials = typename P::Tiles::Exponentials;
    using Word = std::uint32_t;

  public:
    // exact: whether logarithms of sums are wanted.
    TileRows(const Memory& memory, Index columns, float slope, bool exact)
        : at_(memory), columns_(columns), slope_(slope), unit_(slope * sixteen_bits::one), exact_(exact) {}

    bool exact() const { return exact_; }

    static Index row_of_group(Index l) { return l * W; }  // the second tile follows the first
    float* sums(Index r) const { return at_.o + r / square * square * columns_ * W + row_of_group(r % square); }

    void start(Index rows) {
        for (Index i = 0; i < rows * columns_ * W; i += W) store(at_.o + i, splat(0.0F));
        for (Index i = 0; i < 2 * TileOperands::part_steps * 2 * tile_words; i += W) store(at_.probabilities + i, U(0));
        for (Index r = 0; r < rows; ++r) {
            at_.maximum[r] = -infinity;
            store(at_.lanes + r * W, splat(0.0F));
        }
    }

    // Whether no product of the group and keys of such norms exceeds 16 bits: |q·k|² ≤ |q|²·|k|². NaN is not less.
    bool bounds(Index r, float norm) const {
        const F factor = splat(norm * 1.01F * unit_ * unit_);
        return all(load(at_.norms + r) * factor < F(largest * largest)) &&
               all(load(at_.norms + r + W) * factor < F(largest * largest));
    }

    // Begins a part of the rows [r, r + count), whose probabilities will lie at p. Rows that have seen no key take the
    // largest of so many vectors of scores as their base. Bases that 16 bits do not hold have an offset of NaN.
    void begin(Index r, Index count, const float* scores, Index vectors, Word* p) {
        row_ = r;
        part_ = p;
        risen_ = false;
        for (Index l = 0; l < square; l += W) {
            store(at_.factor + l, splat(1.0F));
            F base = load(at_.maximum + r + l);
            if (any(base == F(-infinity))) {
                F highs[W];
                for (Index i = 0; i < W; ++i) {
                    highs[i] = splat(-infinity);
                    for (Index v = 0; v < vectors && l + i < count; ++v)
                        highs[i] = max(highs[i], load(scores + row_of_group(l + i) + v * 2 * tile_words));
                }
                base = select(base == F(-infinity), in_units(row_maxima(highs)), base);
                store(at_.maximum + r + l, base);
            }
            const F units = select(base == F(-infinity), splat(0.0F), base * splat(unit_));
            const F offset = splat(sixteen_bits::magic) - round_to_whole(units);
            store(at_.offset + l, select(abs(units) < F(largest), offset, F(not_a_number)));
        }
    }

    // What exponentials read and write of each row of the group: a copy of it stays in registers between products.
    struct Group {
        const float *base, *offset;
        float* lanes;
        F fall;
        Exponentials in_16_bits;

        // Both give the sum of x.
        template <Index steps, bool bounded, class Scores>
        SOFTDELTA_INLINE F compute_in_16_bits(Index l, const Scores& scores, U (&x)[steps]) const {
            const F offset_of_row = splat(offset[l]);
            F total = splat(0.0F);
#pragma GCC unroll 2
            for (Index s = 0; s < steps; ++s) {
                x[s] = in_16_bits.template of<bounded>(scores(2 * s), scores(2 * s + 1), offset_of_row);
                total = in_16_bits.add(x[s], total);
            }
            return total;
        }
        template <Index steps, class Scores>
        SOFTDELTA_INLINE F compute_in_32_bits(Index l, const Scores& scores, U (&x)[steps]) const {
            const F base_of_row = max(splat(base[l]), splat(lowest));
            F total = splat(0.0F);
#pragma GCC unroll 2
            for (Index s = 0; s < steps; ++s) {
                const F first = exp2_for_bf16((base_of_row - scores(2 * s)) * fall),
                        second = exp2_for_bf16((base_of_row - scores(2 * s + 1)) * fall);
                x[s] = Exponentials::round(first, second);
                total = total + (first + second);
            }
            return total;
        }
        template <Index steps>
        SOFTDELTA_INLINE void put(Index l, const U (&x)[steps], F total, Word* p) const {
            store(lanes + l * W, load(lanes + l * W) + total);
#pragma GCC unroll 2
            for (Index s = 0; s < steps; ++s) store(p + row_of_group(l) + s * 2 * tile_words, x[s]);
        }
    };
    Group group() const {
        return {at_.maximum + row_, at_.offset, at_.lanes + row_ * W, splat(-slope_), Exponentials{splat(unit_)}};
    }

    // Probabilities of `steps` times 32 keys, one or two, of row l of the group. What a row needs whose base is wrong
    // stands apart: a pipeline has a copy of the rest for each of its rows.
    template <Index steps, bool exact, class Scores>
    SOFTDELTA_INLINE void exponentials(const Group& at, Index l, const Scores& scores, Word* p) {
        U x[steps];
        F total;
        if constexpr (exact)
            total = at.template compute_in_32_bits<steps>(l, scores, x);
        else
            total = at.template compute_in_16_bits<steps, Scores::bounded>(l, scores, x);
        if (__builtin_expect(!all(total <= F(forward_blocks::most_total)), 0))  // NaN is not
            return repeat<steps>(l, scores, p);
        at.put(l, x, total, p);
    }

    // Once o has the sums of the parts before this one.
    void settle(Index count) {
        for (Index l = 0; risen_ && l < count; ++l) {
            if (at_.factor[l] == 1.0F) continue;
            const F factor = splat(at_.factor[l]);
            float* o = sums(row_ + l);
            for (Index n = 0; n < columns_; ++n) store(o + n * 2 * tile_words, factor * load(o + n * 2 * tile_words));
        }
    }

    // Row l of the group, key k of the part.
    float probability(Index l, Index k) const {
        const Index at = sixteen_bits::place(static_cast<int>(k % square));
        return half_of(part_[k / square * 2 * tile_words + row_of_group(l) + at / 2], at % 2);
    }

    struct Sum {
        float base, sum;
    };
    Sum sum_of_row(Index r) const {
        return {at_.maximum[r] < lowest ? lowest : at_.maximum[r], sum(load(at_.lanes + r * W))};
    }

  private:
    static constexpr float largest = sixteen_bits::largest, not_a_number = std::numeric_limits<float>::quiet_NaN();

    static F round_to_whole(F x) {
        const F magic(sixteen_bits::magic);
        return (x + magic) - magic;
    }
    // A base that is a whole number of the units of 16 bits, as near as it can be.
    F in_units(F base) const {
        const F units = base * splat(unit_);
        return select(abs(units) < F(largest), round_to_whole(units) / splat(unit_), base);
    }

    // With another base, or in 32 bits. NaN stays.
    template <Index steps, class Scores>
    [[gnu::noinline]] void repeat(Index l, Scores scores, Word* p) {
        raise(l, highest<steps>(scores), p);
        const bool fits = !exact_ && std::abs(at_.maximum[row_ + l] * unit_) < largest;
        at_.offset[l] = fits ? sixteen_bits::magic - std::nearbyint(at_.maximum[row_ + l] * unit_) : not_a_number;
        const Group at = group();
        U x[steps];
        const F total = fits ? at.template compute_in_16_bits<steps, false>(l, scores, x)
                             : at.template compute_in_32_bits<steps>(l, scores, x);
        at.put(l, x, total, p);
    }

    template <Index steps, class Scores>
    static float highest(const Scores& scores) {
        F highs = splat(lowest);
        for (Index v = 0; v < 2 * steps; ++v) highs = max(highs, scores(v));
        return maximum(highs);
    }

    // Row l of the group may have a score `high` that is much larger than its base. Of its part the probabilities
    // before p are there.
    void raise(Index l, float high, const Word* p) {
        float& base = at_.maximum[row_ + l];
        if (!((high - base) * slope_ > forward_blocks::kept_rise)) return;
        const double before = base;
        base = maximum(in_units(splat(high)));
        const auto factor = static_cast<float>(std::exp2((before - base) * slope_));
        const F factors = splat(factor);
        float* lanes = at_.lanes + (row_ + l) * W;
        store(lanes, factors * load(lanes));
        for (Word* earlier = part_; earlier < p; earlier += 2 * tile_words) {
            Word* words = earlier + row_of_group(l);
            const U pairs = load(words);
            store(words, bf16_pairs(as_floats(pairs << 16) * factors, as_floats(pairs & U(0xffff0000U)) * factors));
        }
        at_.factor[l] *= factor;
        risen_ = true;
    }

    const Memory& at_;
    Index columns_;
    float slope_, unit_;          // unit: of exponents in 16 bits
    bool exact_, risen_ = false;  // risen: some factor of the part is not 1
    Index row_ = 0;               // the first of the group
    Word* part_ = nullptr;        // probabilities of the part
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
