// Blocked online softmax. A unit's query rows meet one block of packed keys after the other; for every block the
// scores, their exponentials under the running maximum, and the product with the values, on top of what earlier blocks
// gave.
#include "engines/cpu/kernels/attention/forward.h"

#include <cmath>

#include "engines/cpu/kernels/attention/scores.h"
#include "engines/cpu/kernels/attention/selection.h"
#include "engines/cpu/kernels/gemm/pack.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

constexpr Index query_block = 192;  // rows whose scores are kept at once
constexpr Index key_block = 256;
constexpr float lowest = std::numeric_limits<float>::lowest();

template <class P>
struct Memory {
    Element<P>* q;              // [rows, a_row_length(D)]
    float* o;                   // [rows, round_up(Dv, W)] sums that are not divided yet
    float* maximum;             // [rows] of the scores seen so far
    float* sum;                 // [rows] of 2^((score − maximum)·slope)
    Range* seen;                // [rows] keys that position lets a row see
    Range* tiles;               // [row tiles of the unit] keys of the block that the tile's rows see
    Element<P>* keys;           // [D, key_block] panels
    Element<P>* values;         // [key_block, Dv] panels
    float* scores;              // [query_block, score_row]
    Element<P>* probabilities;  // [query_block, probability_row]; the scores' memory when they are floats
    float *high, *factor;       // [query_block] of this block: largest score; what sums under the old maximum become by
    Range* depths;              // [row tiles of a query block]
    float* addends;             // [key_block]
    Element<P>* stage;
    float* bound = nullptr;  // [rows] of the dynamic mask
    Index* last_tie = nullptr;
    float* row = nullptr;  // [keys]

    Memory(const AttentionHead& head, Index rows, Scratch memory) { take(head, rows, memory); }
    static std::size_t size(const AttentionHead& head, Index rows) {
        Scratch count(nullptr);
        Memory<P> unused;
        unused.take(head, rows, count);
        return count.used();
    }

  private:
    Memory() = default;
    void take(const AttentionHead& head, Index rows, Scratch& memory);
};

// Rows a vector longer than the block: tile rows do not compete for the same cache lines.
constexpr Index score_row = key_block + W;
template <class P>
constexpr Index probability_row = P::depth == 1 ? score_row : key_block / 2 + W;

template <class P>
void Memory<P>::take(const AttentionHead& head, Index rows, Scratch& memory) {
    const Index longest = max(head.size, head.value_size);
    q = memory.take<Element<P>>(rows * a_row_length<P>(head.size));
    o = memory.take<float>(rows * round_up(head.value_size, W));
    maximum = memory.take<float>(rows + W);
    sum = memory.take<float>(rows + W);
    seen = memory.take<Range>(rows);
    tiles = memory.take<Range>(rows / MR + 1);
    keys = memory.take<Element<P>>(key_block * a_row_length<P>(head.size));
    values = memory.take<Element<P>>(key_block / P::depth * round_up(head.value_size, W));
    scores = memory.take<float>(query_block * score_row);
    probabilities = reinterpret_cast<Element<P>*>(scores);
    if constexpr (P::depth != 1) probabilities = memory.take<Element<P>>(query_block * probability_row<P>);
    high = memory.take<float>(query_block + W);
    factor = memory.take<float>(query_block + W);
    depths = memory.take<Range>(query_block / MR + 1);
    addends = memory.take<float>(key_block + W);
    stage = memory.take<Element<P>>((W + 2) * round_up(longest, 2 * W));
    if (head.top_w >= 0) {
        bound = memory.take<float>(rows);
        last_tie = memory.take<Index>(rows);
        row = memory.take<float>(round_up(head.keys, W));
    }
}

// The last step of row r: o is divided and rounded once. Overwrites o.
void finish_row(const AttentionHead& head, Index r, float* o, float maximum, float sum, const AttentionOutput& out) {
    const RowSoftmax softmax = end_softmax(head, r, maximum, sum);
    const bool empty = sum == 0.0F && softmax.sink == 0 && !sees_any_key(head, r);
    const F factor = splat(empty || softmax.keys == 0 ? 0.0F : static_cast<float>(softmax.keys) / sum);
    for (Index i = 0; i < head.value_size; i += W) store(o + i, load(o + i) * factor);
    const Index h = r / head.queries;
    const Index i = r % head.queries;
    if (out.o.data != nullptr)
        store_row(o, head.value_size, element(out.o.data, out.o.dtype, h * out.o.head + i * out.o.row), out.o.dtype,
                  out.o.column);
    if (out.lse.data != nullptr) {
        const float lse[W] = {empty ? head.empty_lse : static_cast<float>(softmax.lse)};
        store_row(lse, 1, element(out.lse.data, out.lse.dtype, h * out.lse.head + i * out.lse.row), out.lse.dtype, 1);
    }
}

template <class P>
class Forward {
  public:
    Forward(const AttentionHead& head, Index begin, Index end, std::byte* scratch)
        : head_(head),
          begin_(begin),
          rows_(end - begin),
          at_(head, end - begin, Scratch(scratch)),
          visibility_(head, {at_.bound, at_.last_tie, begin}),
          plain_(keeps_products(head)),
          biased_(visibility_.by_bias_only() && head.softcap == 0),
          slope_(score_unit(head) * log2_e) {}

    void start() {
        pack_a<P>(
            rows_, head_.size, [&](Index r) { return query_row(head_, head_.q, begin_ + r); }, at_.q);
        const Index length = rows_ * round_up(head_.value_size, W);
        for (Index i = 0; i < length; i += W) store(at_.o + i, splat(0.0F));
        for (Index r = 0; r < rows_; ++r) {
            at_.seen[r] = visibility_.range(begin_ + r);
            at_.maximum[r] = lowest;
            at_.sum[r] = 0;
        }
        if (head_.top_w >= 0)
            for (Index r = 0; r < rows_; ++r) select_row(head_, begin_ + r, at_.row, at_.bound + r, at_.last_tie + r);
    }

    void keys(Index first, Index last) {
        Range seen{last, first};
        all_see_ = {first, last};
        for (Index r = 0; r < rows_; ++r) {
            const Range row = at_.seen[r];
            all_see_ = {max(all_see_.begin, row.begin), min(all_see_.end, row.end)};
            if (row.empty()) continue;
            seen = {min(seen.begin, row.begin), max(seen.end, row.end)};
        }
        first = max(first, seen.begin);
        last = min(last, seen.end);
        for (Index j = first; j < last; j += key_block) block(j, min(key_block, last - j));
    }

    void finish(const AttentionOutput& out) {
        const Index length = round_up(head_.value_size, W);
        for (Index r = 0; r < rows_; ++r) {
            finish_row(head_, begin_ + r, at_.o + r * length, at_.maximum[r], at_.sum[r], out);
        }
    }

    void finish_partial(const PartialSoftmax& out) {
        const Index length = round_up(head_.value_size, W);
        for (Index i = 0; i < rows_ * length; i += W) store(out.o + i, load(at_.o + i));
        for (Index r = 0; r < rows_; ++r) {
            out.maximum[r] = at_.maximum[r];
            out.sum[r] = at_.sum[r];
        }
    }

  private:
    void block(Index first, Index count) {
        if (!find_tiles(first, count)) return;
        const auto key = [&](const KeyRows& t) { return [&, first](Index j) { return key_row(t, first + j); }; };
        pack_b_transposed<P>(count, head_.size, key(head_.k), at_.stage, at_.keys);
        pack_b(count, head_.value_size, key(head_.v), reinterpret_cast<Stored<P>*>(at_.stage), at_.values, P{});
        apart_count_ = 0;
        if (!whole_) set_apart(first, count);
        for (Index r = 0; r < rows_; r += query_block) rows(r, min(query_block, rows_ - r), first, count);
    }

    // Which keys of the block each row tile sees, in whole vectors; false when none sees any.
    bool find_tiles(Index first, Index count) {
        whole_ = visibility_.by_position_only() && all_see_.begin <= first && first + count <= all_see_.end;
        if (whole_) {
            for (Index r = 0, t = 0; r < rows_; r += MR, ++t) at_.tiles[t] = {0, round_up(count, W)};
            return true;
        }
        bool found = false;
        for (Index r = 0, t = 0; r < rows_; r += MR, ++t) {
            visibility_.ahead(begin_ + r, 1, first + key_block, W)();  // for the next block's any()
            Range seen{count, 0};
            bool any = false;
            for (Index i = r; i < min(r + MR, rows_); ++i) {
                const Range row = at_.seen[i];
                const Range here{max(row.begin - first, 0), min(row.end - first, count)};
                if (here.empty()) continue;
                seen = {min(seen.begin, here.begin), max(seen.end, here.end)};
                any = any || visibility_.any(begin_ + i, row, first, first + count);
            }
            at_.tiles[t] = any ? Range{seen.begin / W * W, round_up(seen.end, W)} : Range{0, 0};
            found = found || any;
        }
        return found;
    }

    // A value that is not finite must not meet a probability of 0 of a row that does not see it: it leaves the block,
    // and is added to the rows that see it one by one.
    void set_apart(Index first, Index count) {
        if (all_finite(at_.values, round_up(count, P::depth) / P::depth * round_up(head_.value_size, W))) return;
        for (Index j = 0; j < count; ++j) {
            if (is_finite(key_row(head_.v, first + j), head_.value_size)) continue;
            clear_b_row<P>(j, count, head_.value_size, at_.values);
            apart_[apart_count_++] = j;
        }
    }

    void add_apart(Index r, Index count, Index first) {
        const Index length = round_up(head_.value_size, W);
        auto* value = reinterpret_cast<float*>(at_.stage);
        for (Index a = 0; a < apart_count_; ++a) {
            const Index j = apart_[a];
            load_row(key_row(head_.v, first + j), head_.value_size, value);
            for (Index m = 0; m < count; ++m) {
                if (!visibility_.any(begin_ + r + m, at_.seen[r + m], first + j, first + j + 1)) continue;
                const F p = splat(a_element(at_.probabilities + m * probability_row<P>, j, P{}));
                float* o = at_.o + (r + m) * length;
                for (Index i = 0; i < length; i += W) store(o + i, fma(p, load(value + i), load(o + i)));
            }
        }
    }

    // Query rows [r, r + count) of the unit and keys [first, first + keys).
    void rows(Index r, Index count, Index first, Index keys) {
        const Range* tiles = at_.tiles + r / MR;
        const Index depth = (head_.size + P::depth - 1) / P::depth, row = a_row_length<P>(head_.size);
        const Index value_depth = (keys + P::depth - 1) / P::depth;
        for (Index m = 0, t = 0; m < count; m += MR, ++t) {
            const Index height = min(MR, count - m);
            product<P>(height, round_up(keys, W), {at_.q + (r + m) * row, row, 1}, {at_.keys, depth},
                       {at_.scores + m * score_row, score_row}, tiles + t, nullptr,
                       visibility_.ahead(begin_ + r + m, height, first, keys));
            at_.depths[t] = {tiles[t].begin / P::depth, min(tiles[t].end / P::depth, value_depth)};
            softmax_tile(r + m, m, height, first, keys, tiles[t]);
        }
        const Index length = round_up(head_.value_size, W);
        product<P>(count, length, {at_.probabilities, probability_row<P>, 1}, {at_.values, value_depth},
                   {at_.o + r * length, length, Start::scale, at_.factor}, nullptr, at_.depths);
        if (apart_count_ > 0) add_apart(r, count, first);
    }

    // A row tile: rows [r, r + count) of the unit, [m, m + count) of the block. Scores become exponentials under the
    // new maximum; sums and the factor of what was summed before follow. Maxima and sums of all rows are taken at once.
    void softmax_tile(Index r, Index m, Index count, Index first, Index keys, Range tile) {
        if (tile.empty()) {
            for (Index i = 0; i < count; ++i) at_.factor[m + i] = 1;
            return;
        }
        for (Index i = 0; i < count; i += W) {
            F highs[W];
            for (Index l = 0; l < W; ++l)
                highs[l] = i + l < count ? row_maximum(r + i + l, m + i + l, first, keys, tile) : splat(lowest);
            store(at_.high + m + i, row_maxima(highs));
        }
        for (Index i = 0; i < count; i += W) {
            const F before = load(at_.maximum + r + i);
            const F after = max(before, load(at_.high + m + i));
            store_partial(at_.maximum + r + i, after, min(count - i, W));
            store(at_.factor + m + i, exp2((before - after) * splat(slope_)));
        }
        for (Index i = 0; i < count; i += W) {
            F totals[W];
            for (Index l = 0; l < W; ++l)
                totals[l] = i + l < count ? exponentials(r + i + l, m + i + l, tile) : splat(0.0F);
            const F sum = fma(load(at_.sum + r + i), load(at_.factor + m + i), row_sums(totals));
            store_partial(at_.sum + r + i, sum, min(count - i, W));
        }
    }

    // The largest kept scores of a row, lane by lane. Products become kept scores, −∞ where the row sees nothing.
    SOFTDELTA_INLINE F row_maximum(Index r, Index m, Index first, Index keys, Range tile) {
        float* scores = at_.scores + m * score_row;
        // The block may end before the row's keys do, where it is a part's last: its rest is no key.
        const Range seen{at_.seen[r].begin, min(at_.seen[r].end, first + keys)};
        const bool whole = seen.begin <= first + tile.begin && first + tile.end <= seen.end;
        F high[2] = {splat(lowest), splat(lowest)};
        if (whole && plain_) {
            Index j = tile.begin;
            for (; j + W < tile.end; j += 2 * W) {
                high[0] = max(high[0], load(scores + j));
                high[1] = max(high[1], load(scores + j + W));
            }
            if (j < tile.end) high[0] = max(high[0], load(scores + j));
        } else if (whole && biased_) {
            high[0] = biased(visibility_.bias_row(begin_ + r, first), scores, tile);
        } else {
            visibility_.addends(begin_ + r, seen, first + tile.begin, tile.end - tile.begin, at_.addends);
            if (head_.softcap != 0) cap(scores, tile);
            const F scale = splat(plain_ || head_.softcap != 0 ? 1.0F : head_.scale);
            for (Index j = tile.begin; j < tile.end; j += W) {
                const F addend = load(at_.addends + j - tile.begin);
                const F score = fma(load(scores + j), scale, addend);
                const F kept = select(addend == F(-infinity), addend, score);
                high[0] = max(high[0], kept);
                store(scores + j, kept);
            }
        }
        return max(high[0], high[1]);
    }

    F biased(Row bias, float* scores, Range tile) const {
        if (bias.dtype == DType::f32) return biased(static_cast<const float*>(bias.data), scores, tile);
        if (bias.dtype == DType::bf16) return biased(static_cast<const core::bf16*>(bias.data), scores, tile);
        return biased(static_cast<const core::f16*>(bias.data), scores, tile);
    }
    template <class T>
    F biased(const T* bias, float* scores, Range tile) const {
        const F scale = splat(head_.scale);
        F high = splat(lowest);
        for (Index j = tile.begin; j < tile.end; j += W) {
            const F addend = load(bias + j);
            const F kept = select(addend == F(-infinity), addend, fma(load(scores + j), scale, addend));
            high = max(high, kept);
            store(scores + j, kept);
        }
        return high;
    }

    void cap(float* scores, Range tile) const {
        const F slope = splat(head_.scale / head_.softcap);
        for (Index j = tile.begin; j < tile.end; j += W)
            store(scores + j, splat(head_.softcap) * tanh(load(scores + j) * slope));
    }

    // Writes the exponentials of a row and returns their sums lane by lane.
    SOFTDELTA_INLINE F exponentials(Index r, Index m, Range tile) {
        const float* scores = at_.scores + m * score_row;
        Element<P>* out = at_.probabilities + m * probability_row<P>;
        const F fall = splat(-slope_), maximum = splat(at_.maximum[r]);  // scores are read where they are subtracted
        F total[2] = {splat(0.0F), splat(0.0F)};
        Index j = tile.begin;
        for (; j + W < tile.end; j += 2 * W)
#pragma GCC unroll 2
            for (Index l = 0; l < 2; ++l) {
                const F p = exp2((maximum - load(scores + j + l * W)) * fall);
                total[l] = total[l] + p;
                store_a(out + (j + l * W) / P::depth, p, P{});
            }
        if (j < tile.end) {
            const F p = exp2((maximum - load(scores + j)) * fall);
            total[0] = total[0] + p;
            store_a(out + j / P::depth, p, P{});
        }
        return total[0] + total[1];
    }

    const AttentionHead& head_;
    Index begin_, rows_;
    Memory<P> at_;
    Visibility visibility_;
    Range all_see_{};     // keys that position lets every row see
    bool plain_;          // scores are kept as products: position alone hides keys
    bool biased_;         // without cap and mask: bias alone, as it lies, and position hide keys
    float slope_;         // a kept score times that is an exponent of two
    bool whole_ = false;  // every row sees every key of the block
    Index apart_count_ = 0, apart_[key_block];
};

template <class P>
void run_head(const AttentionHead& head, Index begin, Index end, std::byte* scratch, const AttentionOutput& out) {
    [[maybe_unused]] const typename P::Tiles tiles;
    Forward<P> forward(head, begin, end, scratch);
    forward.start();
    forward.keys(0, head.keys);
    forward.finish(out);
}

template <class P>
void run_head_partial(const AttentionHead& head, Index begin, Index end, Index first, Index last, std::byte* scratch,
                      const PartialSoftmax& out) {
    [[maybe_unused]] const typename P::Tiles tiles;
    Forward<P> forward(head, begin, end, scratch);
    forward.start();
    forward.keys(first, last);
    forward.finish_partial(out);
}

std::size_t scratch(const AttentionHead& head, Index rows) {
    return with_product(head.bf16_products, [&](auto p) { return Memory<decltype(p)>::size(head, rows); });
}

void run(const AttentionHead& head, Index begin, Index end, std::byte* memory, const AttentionOutput& out) {
    with_product(head.bf16_products, [&](auto p) { run_head<decltype(p)>(head, begin, end, memory, out); });
}

void run_partial(const AttentionHead& head, Index begin, Index end, Index first, Index last, std::byte* memory,
                 const PartialSoftmax& out) {
    with_product(head.bf16_products,
                 [&](auto p) { run_head_partial<decltype(p)>(head, begin, end, first, last, memory, out); });
}

Index partial_row(const AttentionHead& head) {
    return round_up(head.value_size, W);
}

// Row r of part 0 is overwritten with the sum of all parts.
void combine(const AttentionHead& head, Index begin, Index end, const PartialSoftmax& first, Index parts, Index stride,
             const AttentionOutput& out) {
    const Index length = round_up(head.value_size, W);
    const float slope = score_unit(head) * log2_e;
    for (Index r = begin; r < end; ++r) {
        float maximum = lowest, sum = 0;
        for (Index p = 0; p < parts; ++p) maximum = std::fmax(maximum, first.maximum[p * stride + r]);
        float* o = first.o + r * length;
        for (Index p = 0; p < parts; ++p) {
            const float factor = std::exp2((first.maximum[p * stride + r] - maximum) * slope);
            sum += factor * first.sum[p * stride + r];
            for (Index i = 0; i < length; i += W) {
                const F x = load(o + p * stride + i) * splat(factor);
                store(o + i, p == 0 ? x : load(o + i) + x);
            }
        }
        finish_row(head, r, o, maximum, sum, out);
    }
}

}  // namespace

extern const AttentionForward attention_forward = {
    .block_rows = 4 * query_block,
    .row_step = query_block,
    .tile_rows = MR,
    .partial_row = partial_row,
    .scratch = scratch,
    .run = run,
    .run_partial = run_partial,
    .combine = combine,
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
