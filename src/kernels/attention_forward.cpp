// Blocked online softmax. A unit's query rows meet one block of packed keys after the other; for every block the
// scores, their exponentials under the running maximum, and the product with the values, on top of what earlier blocks
// gave.
#include "kernels/attention_forward.h"

#include <cmath>

#include "kernels/attention_selection.h"
#include "kernels/attention_visibility.h"
#include "kernels/pack.h"
#include "kernels/scratch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

constexpr Index query_block = 192;  // rows whose scores are kept at once
constexpr Index key_block = 256;
constexpr float lowest = std::numeric_limits<float>::lowest();

template <class P>
struct Memory {
    Element<P>* q;              // [rows, left_row(D)]
    float* o;                   // [rows, round_up(Dv, W)] sums that are not divided yet
    float* maximum;             // [rows] of the scores seen so far, times log2 e
    float* sum;                 // [rows] of 2^(score·log2 e − maximum)
    Range* seen;                // [rows] keys that position lets a row see
    Range* tiles;               // [row tiles of the unit] keys of the block that the tile's rows see
    Element<P>* keys;           // [D, key_block] panels
    Element<P>* values;         // [key_block, Dv] panels
    float* scores;              // [query_block, score_row]
    Element<P>* probabilities;  // [query_block, probability_row]; the scores' memory when they are floats
    float *high, *factor;       // [query_block] of this block: largest score times log2 e; 2^(maximum before − after)
    float *slope, *block_sum;   // [query_block] what makes a kept score a power of two; sum of the block's exponentials
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
    const Index longest = larger(head.size, head.value_size);
    q = memory.take<Element<P>>(rows * left_row<P>(head.size));
    o = memory.take<float>(rows * round_up(head.value_size, W));
    maximum = memory.take<float>(rows + W);
    sum = memory.take<float>(rows + W);
    seen = memory.take<Range>(rows);
    tiles = memory.take<Range>(rows / tile_rows + 1);
    keys = memory.take<Element<P>>(key_block * left_row<P>(head.size));
    values = memory.take<Element<P>>(key_block / P::depth * round_up(head.value_size, W));
    scores = memory.take<float>(query_block * score_row);
    probabilities = reinterpret_cast<Element<P>*>(scores);
    if constexpr (P::depth != 1) probabilities = memory.take<Element<P>>(query_block * probability_row<P>);
    high = memory.take<float>(query_block + W);
    factor = memory.take<float>(query_block + W);
    slope = memory.take<float>(query_block + W);
    block_sum = memory.take<float>(query_block + W);
    depths = memory.take<Range>(query_block / tile_rows + 1);
    addends = memory.take<float>(key_block + W);
    stage = memory.take<Element<P>>((W + 2) * round_up(longest, 2 * W));
    if (head.top_w >= 0) {
        bound = memory.take<float>(rows);
        last_tie = memory.take<Index>(rows);
        row = memory.take<float>(round_up(head.keys, W));
    }
}

constexpr double log2_e_f64 = 1.4426950408889634;

// ln (sum·2^maximum)
float natural(float maximum, float sum) {
    return static_cast<float>(static_cast<double>(maximum) / log2_e_f64 + std::log(static_cast<double>(sum)));
}

// e^(sink of row r) as a multiple of 2^maximum
float sink_share(const AttentionHead& head, Index r, float maximum) {
    const double sink = static_cast<double>(head_value(head, head.sink, r));
    return static_cast<float>(std::exp2(sink * log2_e_f64 - static_cast<double>(maximum)));
}

// The last step of row r: o is divided and rounded once. Overwrites o.
void finish_row(const AttentionHead& head, Index r, float* o, float maximum, float sum, const AttentionOutput& out) {
    const bool empty = sum == 0.0F;
    const F factor = splat(empty ? 0.0F : 1.0F / sum);
    for (Index i = 0; i < head.value_size; i += W) store(o + i, load(o + i) * factor);
    const Index h = r / head.queries;
    const Index i = r % head.queries;
    if (out.o.data != nullptr)
        store_row(o, head.value_size, element(out.o.data, out.o.dtype, h * out.o.head + i * out.o.row), out.o.dtype,
                  out.o.column);
    if (out.lse.data != nullptr) {
        const float lse[W] = {empty ? head.empty_lse : natural(maximum, sum)};
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
          plain_(visibility_.by_position_only() && head.softcap == 0 && head.scale >= 0),
          biased_(visibility_.by_bias_only() && head.softcap == 0) {}

    void start(bool with_sink) {
        pack_left<P>(
            rows_, head_.size, [&](Index r) { return query_row(head_, head_.q, begin_ + r); }, at_.q);
        const Index length = rows_ * round_up(head_.value_size, W);
        for (Index i = 0; i < length; i += W) store(at_.o + i, splat(0.0F));
        for (Index r = 0; r < rows_; ++r) {
            at_.seen[r] = visibility_.range(begin_ + r);
            const bool sink = with_sink && head_.sink.data != nullptr;
            at_.maximum[r] = sink ? log2_e * head_value(head_, head_.sink, begin_ + r) : lowest;
            at_.sum[r] = sink ? sink_share(head_, begin_ + r, at_.maximum[r]) : 0.0F;
        }
        if (head_.top_w >= 0)
            for (Index r = 0; r < rows_; ++r) select_row(head_, begin_ + r, at_.row, at_.bound + r, at_.last_tie + r);
    }

    void keys(Index first, Index last) {
        Range seen{last, first};
        all_see_ = {first, last};
        for (Index r = 0; r < rows_; ++r) {
            const Range row = at_.seen[r];
            all_see_ = {larger(all_see_.begin, row.begin), smaller(all_see_.end, row.end)};
            if (row.empty()) continue;
            seen = {smaller(seen.begin, row.begin), larger(seen.end, row.end)};
        }
        first = larger(first, seen.begin);
        last = smaller(last, seen.end);
        for (Index j = first; j < last; j += key_block) block(j, smaller(key_block, last - j));
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
        pack_transposed<P>(count, head_.size, key(head_.k), at_.stage, at_.keys);
        pack_upright(count, head_.value_size, key(head_.v), reinterpret_cast<Stored<P>*>(at_.stage), at_.values, P{});
        if (!whole_) clear_unseen(first, count);
        for (Index r = 0; r < rows_; r += query_block) rows(r, smaller(query_block, rows_ - r), first, count);
    }

    // Which keys of the block each row tile sees, in whole vectors; false when none sees any.
    bool find_tiles(Index first, Index count) {
        whole_ = visibility_.by_position_only() && all_see_.begin <= first && first + count <= all_see_.end;
        if (whole_) {
            for (Index r = 0, t = 0; r < rows_; r += tile_rows, ++t) at_.tiles[t] = {0, round_up(count, W)};
            return true;
        }
        bool found = false;
        for (Index r = 0, t = 0; r < rows_; r += tile_rows, ++t) {
            visibility_.ahead(begin_ + r, 1, first + key_block, W)();  // for the next block's any()
            Range seen{count, 0};
            bool any = false;
            for (Index i = r; i < smaller(r + tile_rows, rows_); ++i) {
                const Range row = at_.seen[i];
                const Range here{larger(row.begin - first, 0), smaller(row.end - first, count)};
                if (here.empty()) continue;
                seen = {smaller(seen.begin, here.begin), larger(seen.end, here.end)};
                any = any || visibility_.any(begin_ + i, row, first, first + count);
            }
            at_.tiles[t] = any ? Range{seen.begin / W * W, round_up(seen.end, W)} : Range{0, 0};
            found = found || any;
        }
        return found;
    }

    // What is not finite in values that no row of this unit sees must not meet a probability of 0.
    void clear_unseen(Index first, Index count) {
        for (Index j = 0; j < count; ++j) {
            if (is_finite(key_row(head_.v, first + j), head_.value_size)) continue;
            bool seen = false;
            for (Index r = 0; r < rows_ && !seen; ++r)
                seen = visibility_.any(begin_ + r, at_.seen[r], first + j, first + j + 1);
            if (!seen) clear_upright<P>(j, count, head_.value_size, at_.values);
        }
    }

    // Query rows [r, r + count) of the unit and keys [first, first + keys).
    void rows(Index r, Index count, Index first, Index keys) {
        const Range* tiles = at_.tiles + r / tile_rows;
        const Index depth = (head_.size + P::depth - 1) / P::depth, row = left_row<P>(head_.size);
        const Index value_depth = (keys + P::depth - 1) / P::depth;
        for (Index m = 0, t = 0; m < count; m += tile_rows, ++t) {
            const Index height = smaller(tile_rows, count - m);
            product<P>(height, round_up(keys, W), {at_.q + (r + m) * row, row, 1}, {at_.keys, depth},
                       {at_.scores + m * score_row, score_row}, tiles + t, nullptr,
                       visibility_.ahead(begin_ + r + m, height, first, keys));
            at_.depths[t] = {tiles[t].begin / P::depth, smaller(tiles[t].end / P::depth, value_depth)};
            softmax_tile(r + m, m, height, first, keys, tiles[t]);
        }
        const Index length = round_up(head_.value_size, W);
        product<P>(count, length, {at_.probabilities, probability_row<P>, 1}, {at_.values, value_depth},
                   {at_.o + r * length, length, Start::scale, at_.factor}, nullptr, at_.depths);
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
            store(at_.high + m + i, maxima(highs));
        }
        for (Index i = 0; i < count; i += W) {
            const F before = load(at_.maximum + r + i);
            const F after = xsimd::max(before, load(at_.high + m + i) * load(at_.slope + m + i));
            store_first(at_.maximum + r + i, after, smaller(count - i, W));
            store(at_.factor + m + i, exp2(before - after));
        }
        for (Index i = 0; i < count; i += W) {
            F totals[W];
            for (Index l = 0; l < W; ++l)
                totals[l] = i + l < count ? exponentials(r + i + l, m + i + l, tile) : splat(0.0F);
            const F sum = fma(load(at_.sum + r + i), load(at_.factor + m + i), sums(totals));
            store_first(at_.sum + r + i, sum, smaller(count - i, W));
        }
    }

    // The largest kept scores of a row, lane by lane. Scores become what times slope is the exponent of two: as they
    // are where position hides nothing, or scaled, capped, biased and masked.
    SOFTDELTA_INLINE F row_maximum(Index r, Index m, Index first, Index keys, Range tile) {
        float* scores = at_.scores + m * score_row;
        // The block may end before the row's keys do, where it is a part's last: its rest is no key.
        const Range seen{at_.seen[r].begin, smaller(at_.seen[r].end, first + keys)};
        const bool whole = seen.begin <= first + tile.begin && first + tile.end <= seen.end;
        F high[2] = {splat(lowest), splat(lowest)};
        if (whole && plain_) {
            at_.slope[m] = head_.scale * log2_e;
            Index j = tile.begin;
            for (; j + W < tile.end; j += 2 * W) {
                high[0] = xsimd::max(high[0], load(scores + j));
                high[1] = xsimd::max(high[1], load(scores + j + W));
            }
            if (j < tile.end) high[0] = xsimd::max(high[0], load(scores + j));
        } else if (whole && biased_) {
            at_.slope[m] = log2_e;
            high[0] = biased(visibility_.bias_row(begin_ + r, first), scores, tile);
        } else {
            at_.slope[m] = log2_e;
            visibility_.addends(begin_ + r, seen, first + tile.begin, tile.end - tile.begin, at_.addends);
            if (head_.softcap != 0) cap(scores, tile);
            const F scale = splat(head_.softcap == 0 ? head_.scale : 1.0F);
            for (Index j = tile.begin; j < tile.end; j += W) {
                const F addend = load(at_.addends + j - tile.begin);
                const F score = fma(load(scores + j), scale, addend);
                const F kept = xsimd::select(addend == F(-infinity), addend, score);
                high[0] = xsimd::max(high[0], kept);
                store(scores + j, kept);
            }
        }
        return xsimd::max(high[0], high[1]);
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
            const F kept = xsimd::select(addend == F(-infinity), addend, fma(load(scores + j), scale, addend));
            high = xsimd::max(high, kept);
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
        const F slope = splat(at_.slope[m]);
        const F offset = splat(at_.maximum[r] == lowest ? 0.0F : -at_.maximum[r]);  // nothing seen: all are −∞
        F total[2] = {splat(0.0F), splat(0.0F)};
        Index j = tile.begin;
        for (; j + W < tile.end; j += 2 * W)
#pragma GCC unroll 2
            for (Index l = 0; l < 2; ++l) {
                const F p = exp2(fma(load(scores + j + l * W), slope, offset));
                total[l] = total[l] + p;
                store_left(out + (j + l * W) / P::depth, p, P{});
            }
        if (j < tile.end) {
            const F p = exp2(fma(load(scores + j), slope, offset));
            total[0] = total[0] + p;
            store_left(out + j / P::depth, p, P{});
        }
        return total[0] + total[1];
    }

    const AttentionHead& head_;
    Index begin_, rows_;
    Memory<P> at_;
    Visibility visibility_;
    Range all_see_{};     // keys that position lets every row see
    bool plain_;          // without cap, mask and bias: position alone hides keys
    bool biased_;         // without cap and mask: bias alone, as it lies, and position hide keys
    bool whole_ = false;  // every row sees every key of the block
};

template <class P>
void run_head(const AttentionHead& head, Index begin, Index end, std::byte* scratch, const AttentionOutput& out) {
    [[maybe_unused]] const typename P::Tiles tiles;
    Forward<P> forward(head, begin, end, scratch);
    forward.start(true);
    forward.keys(0, head.keys);
    forward.finish(out);
}

template <class P>
void run_head_partial(const AttentionHead& head, Index begin, Index end, Index first, Index last, bool with_sink,
                      std::byte* scratch, const PartialSoftmax& out) {
    [[maybe_unused]] const typename P::Tiles tiles;
    Forward<P> forward(head, begin, end, scratch);
    forward.start(with_sink);
    forward.keys(first, last);
    forward.finish_partial(out);
}

// Calls f with the product that the head wants.
template <class Call>
auto with_product(const AttentionHead& head, const Call& call) {
    if constexpr (has_bf16_products) {
        if (head.bf16_products) return call(PairProduct{});
    }
    return call(FloatProduct{});
}

std::size_t scratch(const AttentionHead& head, Index rows) {
    return with_product(head, [&](auto p) { return Memory<decltype(p)>::size(head, rows); });
}

void run(const AttentionHead& head, Index begin, Index end, std::byte* memory, const AttentionOutput& out) {
    with_product(head, [&](auto p) { run_head<decltype(p)>(head, begin, end, memory, out); });
}

void run_partial(const AttentionHead& head, Index begin, Index end, Index first, Index last, bool with_sink,
                 std::byte* memory, const PartialSoftmax& out) {
    with_product(head,
                 [&](auto p) { run_head_partial<decltype(p)>(head, begin, end, first, last, with_sink, memory, out); });
}

Index partial_row(const AttentionHead& head) {
    return round_up(head.value_size, W);
}

// Row r of part 0 is overwritten with the sum of all parts.
void combine(const AttentionHead& head, Index begin, Index end, const PartialSoftmax& first, Index parts, Index stride,
             const AttentionOutput& out) {
    const Index length = round_up(head.value_size, W);
    for (Index r = begin; r < end; ++r) {
        const bool sink = head.sink.data != nullptr;
        float maximum = sink ? log2_e * head_value(head, head.sink, r) : lowest;
        for (Index p = 0; p < parts; ++p) maximum = std::fmax(maximum, first.maximum[p * stride + r]);
        float sum = sink ? sink_share(head, r, maximum) : 0.0F;
        float* o = first.o + r * length;
        for (Index p = 0; p < parts; ++p) {
            const float factor = std::exp2(first.maximum[p * stride + r] - maximum);
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
    .tile_rows = tile_rows,
    .partial_row = partial_row,
    .scratch = scratch,
    .run = run,
    .run_partial = run_partial,
    .combine = combine,
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
