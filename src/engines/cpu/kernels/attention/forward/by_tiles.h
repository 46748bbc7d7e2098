// The forward pass of a unit by matrix tiles: 32 query rows and a panel of 32 keys at a time, whose scores stay in the
// first-level cache. Eight panels are a part, multiplied with the values together.
//
// An exponential is 2^((score − base)·slope − rise). The base is the largest score of the row's first panel. The rise,
// a whole number, follows only when a score lies 2^8 above: sums are then multiplied by a power of two, which is exact.
//
// Panels whose keys all rows see go through a pipeline (tile_pipeline.h), where the sizes of rows allow it. The others,
// at the ends of what causal masks and windows leave, with masks and biases, are computed stage by stage.
#pragma once

#include <cmath>

#include "engines/cpu/kernels/attention/forward/combine.h"
#include "engines/cpu/kernels/attention/forward/tile_pipeline.h"
#include "engines/cpu/kernels/attention/forward/unit.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

template <class P>
class ForwardByTiles : ForwardUnit<P> {
    using Unit = ForwardUnit<P>;
    using Unit::at_, Unit::begin_, Unit::group_rows, Unit::head_, Unit::mask_, Unit::nonfinite_, Unit::rows_,
        Unit::slope_;
    using Tiles = typename P::Tiles;

  public:
    ForwardByTiles(const AttentionHead& head, Index begin, Index end, std::byte* scratch)
        : Unit(head, begin, end, scratch),
          depth_(depth_of<P>(head.size)),
          length_(round_up(head.value_size, W)),
          query_row_(a_row_length<P>(head.size)) {}

    void start() {
        Unit::start();
        for (Index r = 0; r < rows_; ++r) {
            at_.maximum[r] = lowest;
            at_.rise[r] = 0;
            store(at_.lanes + r * W, splat(0.0F));
        }
    }

    void keys(Index first, Index last) {
        Unit::each_block(first, last, [&](Index begin, Index count) { block(begin, count); });
    }

    void finish(const AttentionOutput& out) {
        add_lanes();
        for (Index r = 0; r < rows_; ++r) {
            if (out.o.data != nullptr && r + 8 < rows_)
                prefetch_row(query_row(head_, out.o, begin_ + r + 8), head_.value_size);
            const Sum s = sum_of_row(r);
            finish_row(head_, begin_ + r, at_.o + r * length_, s.maximum, s.sum, at_.sum[r], out);
        }
    }

    void finish_partial(const PartialSoftmax& out) {
        add_lanes();
        for (Index r = 0; r < rows_; ++r) {
            const Sum s = sum_of_row(r);
            float* o = at_.o + r * length_;
            for (Index n = 0; n < length_; n += W) store(o + n, load(o + n) * splat(s.factor));
            Unit::store_partial_row(r, s.maximum, s.sum, out);
        }
    }

  private:
    static constexpr Index part_keys = forward_blocks::part_keys;

    // A group of rows and a part of the block's keys.
    struct Part {
        Index r, count;   // rows of the unit
        Index key, keys;  // of the block
        Range all_see;    // keys that all rows see by position
    };

    void block(Index first, Index count) {
        if (!Unit::find_groups(first, count)) return;
        Unit::pack(first, count);
        first_ = first;
        count_ = count;
        value_depth_ = depth_of<P>(count);
        for (Index r = 0, t = 0; r < rows_; r += group_rows, ++t) {
            Part part{r, min(group_rows, rows_ - r), 0, 0, {first, first + count}};
            for (Index i = r; i < r + part.count; ++i)
                part.all_see = {max(part.all_see.begin, at_.seen[i].begin), min(part.all_see.end, at_.seen[i].end)};
            const Index end = min(at_.tiles[t].end, count);
            part.key = at_.tiles[t].begin / NR * NR;
            const Range whole = whole_panels(part, count);
            if (whole.end - whole.begin >= 2 * NR) {
                parts(part, min(end, whole.begin));
                (this->*pipeline_)(part, whole);
                part.key = whole.end;
            }
            parts(part, end);
        }
    }

    void parts(Part& part, Index end) {
        for (; part.key < end; part.key += part_keys) {
            part.keys = min(part_keys, end - part.key);
            add(part);
        }
    }

    // The panels of the block that a pipeline may take, as keys.
    Range whole_panels(const Part& part, Index count) const {
        if (!pipeline_ || part.count < group_rows || sees_nonfinite(part)) return {0, 0};
        return {round_up(max(part.all_see.begin - first_, 0), NR), min(part.all_see.end - first_, count) / NR * NR};
    }

    // Values that are not finite and that no row of the group sees do not matter: a shorter unit may not have them.
    bool sees_nonfinite(const Part& part) const {
        for (Index a = 0; a < nonfinite_.count; ++a)
            for (Index l = 0; l < part.count; ++l)
                if (at_.seen[part.r + l].contains(first_ + nonfinite_.rows[a])) return true;
        return false;
    }

    // Null where there is none: with 256 numbers a row too many products stand between two steps.
    using RunPipeline = void (ForwardByTiles::*)(const Part& group, Range keys);
    RunPipeline choose_pipeline() const {
        if (!Unit::keeps_products_ || head_.size != head_.value_size) return nullptr;
        if (head_.size == 64) return &ForwardByTiles::run_pipeline<2, 2>;
        if (head_.size == 96) return &ForwardByTiles::run_pipeline<3, 3>;
        if (head_.size == 128) return &ForwardByTiles::run_pipeline<4, 4>;
        return nullptr;
    }

    // The first part may be shorter: the sums of a part fit beside a whole part.
    template <int K, int U>
    void run_pipeline(const Part& group, Range keys) {
        using Pipeline = TilePipeline<Tiles, K, U>;
        Part part = group;
        const Element<P>* q = at_.q + part.r * query_row_;
        Pipeline pipe(q, query_row_, at_.o + part.r * length_, length_);
        float *scores = at_.scores, *next = at_.scores + group_rows * NR;
        Element<P>* p = at_.probabilities;
        square_of_tiles<Tiles>(q, query_row_, tile_size, at_.keys + keys.begin * depth_, depth_, scores, NR, false);
        score_row_ = NR;
        begin_rows(part, scores);
        const Rows rows = rows_of(part);
        part.keys = (keys.end - keys.begin - 1) % part_keys + 1;
        for (part.key = keys.begin; part.key < keys.end; part.key += part.keys, part.keys = part_keys) {
            begin_part(p);
            for (Index j = 0; j < part.keys; j += NR) {
                const Index ahead = min(part.key + j + NR, keys.end - NR);
                Element<P>* to = p + j * (group_rows / 2);
                pipe.panel(
                    at_.keys + ahead * depth_, next, [&](Index i) __attribute__((always_inline)) {
                        exponentials<2>(part, rows, 2 * i, scores, NR, to);
                    });
                std::swap(scores, next);
            }
            if (risen_) {
                pipe.write_sums();
                rescale(part);
            }
            pipe.sum(p, at_.values + part.key / 2 * NR, NR * value_depth_, part.keys / NR);
            p = p == at_.probabilities ? p + probability_size<P> / 2 : at_.probabilities;
        }
        pipe.finish();
    }

    // Where position alone hides keys a panel becomes probabilities at once; else scores of all panels are made, and
    // masks and biases read along the rows.
    void add(const Part& part) {
        begin_part(at_.probabilities);
        if (Unit::keeps_products_) {
            score_row_ = NR;
            for (Index j = 0; j < part.keys; j += NR) {
                score(part, j, at_.scores);
                const Index first = first_ + part.key + j;
                if (part.keys - j < NR || first < part.all_see.begin || first + NR > part.all_see.end)
                    finish_scores(part, j, min(NR, part.keys - j));
                if (j == 0) begin_rows(part, at_.scores);
                exponentials(part, j, at_.scores);
            }
        } else {
            score_row_ = padded(part_keys);
            auto fetch = mask_.prefetch(begin_ + part.r, part.count, first_ + part.key, part.keys);
            for (Index j = 0; j < part.keys; j += NR) {
                score(part, j, at_.scores + j);
                for (Index i = 0; i < part.count; i += 2 * (part_keys / NR)) fetch();
            }
            finish_scores(part, 0, part.keys);
            begin_rows(part, at_.scores);
            for (Index j = 0; j < part.keys; j += NR) exponentials(part, j, at_.scores + j);
        }
        if (risen_) rescale(part);
        for (Index n = 0; n < length_; n += NR) sum(part, n);
        if (nonfinite_.count > 0) add_nonfinite(part);
    }

    // Products of keys [j, j + NR) of the part.
    void score(const Part& part, Index j, float* c) {
        const Index column = part.key + j, width = micropanel_width(column, round_up(count_, W));
        const Element<P>*a = at_.q + part.r * query_row_, *b = at_.keys + column * depth_;
        Index done = 0;
        if (part.count == group_rows && width == NR && depth_ >= tile_size) {
            done = depth_ / tile_size * tile_size;
            square_of_tiles<Tiles>(a, query_row_, tile_size, b, done, c, score_row_, false);
        }
        if (done < depth_)
            product<P>(part.count, width, {a + done, query_row_, 1}, {b + done * width, depth_ - done},
                       {c, score_row_, done > 0 ? Start::add : Start::zero});
    }

    // Scores of keys [j, j + keys) of the part, −∞ up to the end of a panel.
    void finish_scores(const Part& part, Index j, Index keys) {
        for (Index l = 0; l < part.count; ++l) {
            float* scores = at_.scores + l * score_row_;
            Unit::row_maximum(part.r + l, scores, first_ + part.key + j, keys, {0, round_up(keys, W)});
            if (round_up(keys, W) % NR != 0) store(scores + round_up(keys, W), splat(-infinity));
        }
    }

    void begin_part(Element<P>* p) {
        part_start_ = p;
        risen_ = false;
        for (Index l = 0; l < group_rows; l += W) store(at_.factor + l, splat(1.0F));
    }

    // Rows that have seen no key take the largest score of this panel as their base. Those that have seen nothing but
    // the lowest number, as masks of finfo.min leave it, have a sum, which raise() scales.
    void begin_rows(const Part& part, const float* scores) {
        for (Index i = 0; i < part.count; i += W) {
            const F before = load(at_.maximum + part.r + i);
            if (!any(before == F(lowest))) continue;
            const Mask begins = (before == F(lowest)) & (sums_of_lanes(part.r + i) == F(0.0F));
            F highs[W];
            for (Index l = 0; l < W; ++l) {
                const float* row = scores + (i + l) * score_row_;
                highs[l] = i + l < part.count ? max(load(row), load(row + W)) : splat(lowest);
            }
            const F high = max(row_maxima(highs), splat(lowest));
            store_partial(at_.maximum + part.r + i, select(begins, high, before), min(part.count - i, W));
        }
    }

    [[gnu::noinline]] void exponentials(const Part& part, Index j, const float* scores) {
        Element<P>* p = at_.probabilities + j * (group_rows / 2);
        const Rows rows = rows_of(part);
        Index l = 0;
        for (; l + 1 < part.count; l += 2) exponentials<2>(part, rows, l, scores, score_row_, p);
        if (l < part.count) exponentials<1>(part, rows, l, scores, score_row_, p);
    }

    // What exponentials read and write of each row of a group.
    struct Rows {
        const float *base, *rise;
        float* lanes;
        F slope;
    };
    Rows rows_of(const Part& part) const {
        return {at_.maximum + part.r, at_.rise + part.r, at_.lanes + part.r * W, splat(slope_)};
    }

    // Of rows [l, l + rows) of the group; scores, p: of the panel; stride: between rows of scores.
    template <Index rows>
    SOFTDELTA_INLINE void exponentials(const Part& part, const Rows& at, Index l, const float* scores, Index stride,
                                       Element<P>* p) {
        F x[2 * rows], total[rows];
        for (;;) {
            for (Index i = 0; i < 2 * rows; ++i) {
                const F above = load(scores + (l + i / 2) * stride + i % 2 * W) - splat(at.base[l + i / 2]);
                x[i] = exp2_for_bf16(fma(above, at.slope, splat(at.rise[l + i / 2])));
            }
            for (Index i = 0; i < rows; ++i) total[i] = x[2 * i] + x[2 * i + 1];
            Mask large = total[0] > F(forward_blocks::most_total);
            if constexpr (rows == 2) large = large | (total[1] > F(forward_blocks::most_total));
            if (__builtin_expect(!any(large), 1) || !raise_rows<rows>(part, l, scores, stride, p)) break;
        }
        for (Index i = 0; i < rows; ++i) {
            float* lanes = at.lanes + (l + i) * W;
            store(lanes, load(lanes) + total[i]);
            store_bf16(p + (l + i) * tile_size, x[2 * i], x[2 * i + 1]);
        }
    }

    // False when no row needs it.
    template <Index rows>
    [[gnu::noinline]] bool raise_rows(const Part& part, Index l, const float* scores, Index stride, Element<P>* p) {
        bool risen = false;
        for (Index i = l; i < l + rows; ++i) risen = raise(part.r + i, i, scores + i * stride, p) || risen;
        return risen;
    }

    // Row r, l of its group, may have a score in the panel that is much larger than those before.
    bool raise(Index r, Index l, const float* scores, Element<P>* p) {
        const float high = maximum(max(load(scores), load(scores + W)));
        float &base = at_.maximum[r], &rise = at_.rise[r];
        const float above = (high - base) * slope_;
        if (!(above + rise > forward_blocks::kept_rise)) return false;
        float factor = 0;
        if (above <= forward_blocks::most_rise) {
            const float whole = std::ceil(above);
            factor = std::ldexp(1.0F, static_cast<int>(-rise - whole));
            rise = -whole;
        } else {
            base = high;
            rise = 0;
        }
        store(at_.lanes + r * W, load(at_.lanes + r * W) * splat(factor));
        while (p > part_start_) {
            p -= group_rows * tile_size;
            const U words = load(p + l * tile_size);
            store(p + l * tile_size, bf16_pairs(as_floats(words << 16) * splat(factor),
                                                as_floats(words & U(0xffff0000U)) * splat(factor)));
        }
        at_.factor[l] *= factor;
        return risen_ = true;
    }

    void rescale(const Part& part) {
        for (Index l = 0; l < part.count; ++l) {
            if (at_.factor[l] == 1.0F) continue;
            const F factor = splat(at_.factor[l]);
            float* o = at_.o + (part.r + l) * length_;
            for (Index n = 0; n < length_; n += W) store(o + n, factor * load(o + n));
        }
    }

    // Columns [n, n + NR) of o.
    void sum(const Part& part, Index n) {
        float* c = at_.o + part.r * length_ + n;
        const Index width = micropanel_width(n, length_), depth = (part.keys + 1) / 2;
        const Element<P>*a = at_.probabilities, *b = at_.values + n * value_depth_ + part.key / 2 * width;
        Index done = 0;
        if (part.count == group_rows && width == NR && depth >= tile_size) {
            done = depth / tile_size * tile_size;
            square_of_tiles<Tiles>(a, tile_size, group_rows * tile_size, b, done, c, length_, true);
        }
        for (; done < depth; done += tile_size)
            product<P>(part.count, width, {a + done * group_rows, tile_size, 1},
                       {b + done * width, min(tile_size, depth - done)}, {c, length_, Start::add});
    }

    // Adds values that are not finite to a part's rows of o.
    void add_nonfinite(const Part& part) {
        auto* value = reinterpret_cast<float*>(at_.staging);
        for (Index a = 0; a < nonfinite_.count; ++a) {
            const Index j = nonfinite_.rows[a], k = j - part.key;
            if (k < 0 || k >= part.keys) continue;
            load_row(key_row(head_.v, first_ + j), head_.value_size, value);
            for (Index l = 0; l < part.count; ++l) {
                const Index r = part.r + l;
                if (!mask_.sees_any(begin_ + r, at_.seen[r], first_ + j, first_ + j + 1)) continue;
                const Element<P>* p = at_.probabilities + (k / NR * group_rows + l) * tile_size;
                add_scaled(a_element(p, k % NR, P{}), value, length_, at_.o + r * length_);
            }
        }
    }

    // at_.sum of W rows at a time.
    void add_lanes() {
        for (Index r = 0; r < rows_; r += W) store(at_.sum + r, sums_of_lanes(r));
    }
    F sums_of_lanes(Index r) const {
        F lanes[W];
        for (Index i = 0; i < W; ++i) lanes[i] = load(at_.lanes + min(r + i, rows_ - 1) * W);
        return row_sums(lanes);
    }

    struct Sum {
        float maximum, sum, factor;  // factor: of the sums before the rise was a part of the maximum
    };
    Sum sum_of_row(Index r) const {
        if (at_.rise[r] == 0) return {at_.maximum[r], at_.sum[r], 1};
        const double base = at_.maximum[r], slope = slope_, rise = -at_.rise[r];
        const auto maximum = static_cast<float>(base + rise / slope);
        const auto factor = static_cast<float>(std::exp2(rise - (maximum - base) * slope));
        return {maximum, at_.sum[r] * factor, factor};
    }

    Index depth_, length_, query_row_;
    Index first_ = 0, count_ = 0, value_depth_ = 0;  // of the block
    Index score_row_ = NR;                           // floats between rows of scores
    Element<P>* part_start_ = nullptr;               // probabilities of the part that is computed
    RunPipeline pipeline_ = choose_pipeline();
    bool risen_ = false;  // some factor of the part is not 1
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
