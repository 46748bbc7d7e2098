// Blocked online softmax of a unit of query rows, for one block of packed keys after the other:
//     q [R,D]·kᵀ [D,L] → s [R,L] → m' = max(m, rowmax s) [R] → p = e^(s − m') [R,L]
//     p [R,L]·v [L,Dv] + e^(m − m')·o → o [R,Dv]
// o is divided by the sum of p once, after the last block. One thought: what a unit keeps between blocks.
#include "engines/cpu/kernels/attention/forward/forward.h"

#include "engines/cpu/kernels/attention/forward/combine.h"
#include "engines/cpu/kernels/attention/forward/memory.h"
#include "engines/cpu/kernels/attention/nonfinite.h"
#include "engines/cpu/kernels/attention/top_k.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

namespace block = forward_blocks;

template <class P>
class Forward {
  public:
    Forward(const AttentionHead& head, Index begin, Index end, std::byte* scratch)
        : head_(head),
          begin_(begin),
          rows_(end - begin),
          at_(head, end - begin, Scratch(scratch)),
          mask_(head, {at_.bound, at_.last_tie, begin}),
          keeps_products_(keeps_products(head)),
          biased_(mask_.by_bias_only() && head.softcap == 0),
          slope_(score_unit(head) * log2_e) {}

    void start() {
        pack_a<P>(
            rows_, head_.size, [&](Index r) { return query_row(head_, head_.q, begin_ + r); }, at_.q);
        const Index length = rows_ * round_up(head_.value_size, W);
        for (Index i = 0; i < length; i += W) store(at_.o + i, splat(0.0F));
        for (Index r = 0; r < rows_; ++r) {
            at_.seen[r] = mask_.key_range(begin_ + r);
            at_.maximum[r] = lowest;
            at_.sum[r] = 0;
        }
        if (head_.top_w >= 0)
            for (Index r = 0; r < rows_; ++r) find_top_k(head_, begin_ + r, at_.row, at_.bound + r, at_.last_tie + r);
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
        for (Index j = first; j < last; j += block_keys) block(j, min(block_keys, last - j));
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
    static constexpr Index block_keys = ForwardMemory<P>::L, score_row = ForwardMemory<P>::score_row;

    void block(Index first, Index count) {
        if (!find_tiles(first, count)) return;
        const auto key = [&](const KeyRows& t) { return [&, first](Index j) { return key_row(t, first + j); }; };
        pack_b_transposed<P>(count, head_.size, key(head_.k), at_.staging, at_.keys);
        pack_b(count, head_.value_size, key(head_.v), reinterpret_cast<Stored<P>*>(at_.staging), at_.values, P{});
        nonfinite_.count = 0;
        if (!whole_) nonfinite_.template take_out<P>(count, head_.value_size, key(head_.v), at_.values);
        if constexpr (P::Tiles::exist)
            for (Index t = 0; t < row_tiles() + 2; ++t) side_by_side(t, first, count);
        else
            for (Index r = 0; r < rows_; r += block::rows) rows(r, min(block::rows, rows_ - r), first, count);
    }

    // Which keys of the block each row tile sees, in whole vectors. False when no row sees a key of the block.
    bool find_tiles(Index first, Index count) {
        whole_ = mask_.hides_by_position_only() && all_see_.begin <= first && first + count <= all_see_.end;
        if (whole_) {
            for (Index r = 0, t = 0; r < rows_; r += row_tile<P>, ++t) at_.tiles[t] = {0, round_up(count, W)};
            return true;
        }
        bool found = false;
        for (Index r = 0, t = 0; r < rows_; r += row_tile<P>, ++t) {
            mask_.prefetch(begin_ + r, 1, first + block_keys, W)();  // for sees_any() of the next block
            Range seen{count, 0};
            bool any = false;
            for (Index i = r; i < min(r + row_tile<P>, rows_); ++i) {
                const Range row = at_.seen[i];
                const Range here{max(row.begin - first, 0), min(row.end - first, count)};
                if (here.empty()) continue;
                seen = {min(seen.begin, here.begin), max(seen.end, here.end)};
                any = any || mask_.sees_any(begin_ + i, row, first, first + count);
            }
            at_.tiles[t] = any ? Range{seen.begin / W * W, round_up(seen.end, W)} : Range{0, 0};
            found = found || any;
        }
        return found;
    }

    // Adds values that are not finite to rows [r, r + count) of the unit, [m, m + count) of the block.
    void add_nonfinite(Index r, Index m, Index count, Index first) {
        const Index length = round_up(head_.value_size, W);
        auto* value = reinterpret_cast<float*>(at_.staging);
        for (Index a = 0; a < nonfinite_.count; ++a) {
            const Index j = nonfinite_.rows[a];
            load_row(key_row(head_.v, first + j), head_.value_size, value);
            for (Index i = 0; i < count; ++i) {
                if (!mask_.sees_any(begin_ + r + i, at_.seen[r + i], first + j, first + j + 1)) continue;
                const float p = a_element(at_.probabilities + (m + i) * probability_row<P>, j, P{});
                add_scaled(p, value, length, at_.o + (r + i) * length);
            }
        }
    }

    // Query rows [r, r + count) of the unit and keys [first, first + keys).
    void rows(Index r, Index count, Index first, Index keys) {
        const Range* tiles = at_.tiles + r / row_tile<P>;
        const Index depth = depth_of<P>(head_.size), row = a_row_length<P>(head_.size);
        const Index value_depth = depth_of<P>(keys);
        for (Index m = 0, t = 0; m < count; m += row_tile<P>, ++t) {
            const Index height = min(row_tile<P>, count - m);
            product<P>(height, round_up(keys, W), {at_.q + (r + m) * row, row, 1}, {at_.keys, depth},
                       {at_.scores + m * score_row, score_row}, tiles + t, nullptr,
                       mask_.prefetch(begin_ + r + m, height, first, keys));
            at_.depths[t] = {tiles[t].begin / P::depth, min(tiles[t].end / P::depth, value_depth)};
            softmax_tile(r + m, m, height, first, keys, tiles[t]);
        }
        const Index length = round_up(head_.value_size, W);
        product<P>(count, length, {at_.probabilities, probability_row<P>, 1}, {at_.values, value_depth},
                   {at_.o + r * length, length, Start::scale, at_.factor}, nullptr, at_.depths);
        if (nonfinite_.count > 0) add_nonfinite(r, 0, count, first);
    }

    // A row tile: its first row in the unit and in the block, its rows, and the keys of the block that it sees.
    struct RowTile {
        Index r, m, count;
        Range seen;
    };
    Index row_tiles() const { return (rows_ + row_tile<P> - 1) / row_tile<P>; }
    RowTile tile_at(Index t) const {
        const Index r = t * row_tile<P>;
        return {r, t % 2 * row_tile<P>, min(row_tile<P>, rows_ - r), at_.tiles[t]};
    }

    // By matrix tiles, which work beside the vector units: row tile t − 1 gets its probabilities between the products
    // of t with the keys and of t − 2 with the values.
    //
    //     products        q₀kᵀ    q₁kᵀ    q₂kᵀ, p₀v    q₃kᵀ, p₁v    …
    //     exponentials            p₀      p₁           p₂           …
    [[gnu::noinline]] void side_by_side(Index t, Index first, Index keys) {
        const Index D = depth_of<P>(head_.size), row = a_row_length<P>(head_.size);
        const Index length = round_up(head_.value_size, W), value_depth = depth_of<P>(keys);
        const bool has_scores = t < row_tiles(), has_values = t >= 2, has_exponentials = t >= 1 && t <= row_tiles();
        const RowTile scored = has_scores ? tile_at(t) : RowTile{}, summed = has_values ? tile_at(t - 2) : RowTile{};
        const RowTile tile = has_exponentials ? tile_at(t - 1) : RowTile{};
        const Range depth{summed.seen.begin / P::depth, min(summed.seen.end / P::depth, value_depth)};
        const Index products = steps(scored.seen, {0, D}) + steps({0, length}, depth);
        const Index rows = tile.seen.empty() ? 0 : tile.count;
        F totals[row_tile<P>];
        if (rows > 0) update_maxima(tile.r, tile.m, rows, first, keys, tile.seen);
        Index done = 0, i = 0;
        auto fetch = mask_.prefetch(begin_ + scored.r, scored.count, first, keys);
        const auto exponentials_of_row = [&](Index l) {
            totals[l] = exponentials(tile.r + l, tile.m + l, tile.seen);
            const F factor = splat(at_.factor[tile.m + l]);
            float* o = at_.o + (tile.r + l) * length;
            for (Index n = 0; n < length; n += W) store(o + n, factor * load(o + n));
        };
        const auto between = [&] {
            fetch();
            ++done;
            for (; i < rows && i * products < done * rows; ++i) exponentials_of_row(i);
        };
        if (!scored.seen.empty())
            multiply({at_.q + scored.r * row, row, 1}, scored.count, {at_.keys, D}, {0, D}, round_up(keys, W),
                     scored.seen, {at_.scores + scored.m * score_row, score_row}, between);
        if (!depth.empty())
            multiply({at_.probabilities + summed.m * probability_row<P>, probability_row<P>, 1}, summed.count,
                     {at_.values, value_depth}, depth, length, {0, length},
                     {at_.o + summed.r * length, length, Start::add}, between);
        for (; i < rows; ++i) exponentials_of_row(i);
        for (Index l = 0; l < rows; l += W) {
            for (; i < round_up(rows, W); ++i) totals[i] = splat(0.0F);
            update_sums(tile.r + l, tile.m + l, min(rows - l, W), totals + l);
        }
        if (nonfinite_.count > 0 && has_values) add_nonfinite(summed.r, summed.m, summed.count, first);
    }

    // How often multiply() calls `between`, where no column is left over.
    static Index steps(Range columns, Range depth) {
        if (columns.empty() || depth.empty()) return 0;
        return (round_up(columns.end, NR) - columns.begin / NR * NR) / NR *
               (round_up(depth.end - depth.begin, tile_size) / tile_size);
    }

    // product() for a row tile and a range of the columns, with `between` after each step along the depth.
    template <class Between>
    [[gnu::noinline]] void multiply(MatrixA<P> a, Index rows, PackedB<P> b, Range depth, Index columns, Range range,
                                    MatrixC c, Between& between) {
        const float one = 1.0F;
        for (Index n = range.begin / NR * NR; n < range.end; n += NR) {
            const Element<P>* panel = b.data + n * b.depth;
            const Index width = micropanel_width(n, columns);
            if (rows < row_tile<P> || width < NR) {
                product<P>(rows, width, a, {panel, b.depth}, {c.data + n, c.row, c.start}, nullptr, &depth);
                continue;
            }
            tile_block<typename P::Tiles, 2>(a.data + depth.begin, a.row, 1, rows, panel + depth.begin * NR,
                                             depth.end - depth.begin, c.data + n, c.row, rows,
                                             c.start == Start::zero ? nullptr : &one, 0, between);
        }
    }

    // A row tile: rows [r, r + count) of the unit, [m, m + count) of the block. Updates the maxima, turns scores into
    // exponentials, updates the sums, and sets the factor e^(m − m') of what was summed before. W rows are reduced
    // together.
    void softmax_tile(Index r, Index m, Index count, Index first, Index keys, Range tile) {
        if (tile.empty()) {
            for (Index i = 0; i < count; ++i) at_.factor[m + i] = 1;
            return;
        }
        update_maxima(r, m, count, first, keys, tile);
        for (Index i = 0; i < count; i += W) {
            F totals[W];
            for (Index l = 0; l < W; ++l)
                totals[l] = i + l < count ? exponentials(r + i + l, m + i + l, tile) : splat(0.0F);
            update_sums(r + i, m + i, min(count - i, W), totals);
        }
    }

    void update_maxima(Index r, Index m, Index count, Index first, Index keys, Range tile) {
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
    }

    // Of up to W rows, from the sums of each row lane by lane.
    void update_sums(Index r, Index m, Index count, F* lanes) {
        F totals[W];
        for (Index l = 0; l < W; ++l) totals[l] = lanes[l];
        const F sum = fma(load(at_.sum + r), load(at_.factor + m), row_sums(totals));
        store_partial(at_.sum + r, sum, count);
    }

    // The largest scores of a row, lane by lane. Products become scores (scores.h), −∞ where the row does not see the
    // key.
    SOFTDELTA_INLINE F row_maximum(Index r, Index m, Index first, Index keys, Range tile) {
        float* scores = at_.scores + m * score_row;
        // In the last block of a range of keys the row's own range may reach farther: there is no key beyond the block.
        const Range seen{at_.seen[r].begin, min(at_.seen[r].end, first + keys)};
        const bool whole = seen.begin <= first + tile.begin && first + tile.end <= seen.end;
        F high[2] = {splat(lowest), splat(lowest)};
        if (whole && keeps_products_) {
            Index j = tile.begin;
            for (; j + W < tile.end; j += 2 * W) {
                high[0] = max(high[0], load(scores + j));
                high[1] = max(high[1], load(scores + j + W));
            }
            if (j < tile.end) high[0] = max(high[0], load(scores + j));
        } else if (whole && biased_) {
            high[0] = biased(mask_.bias_row(begin_ + r, first), scores, tile);
        } else {
            mask_.addends(begin_ + r, seen, first + tile.begin, tile.end - tile.begin, at_.addends);
            if (head_.softcap != 0) cap(scores, tile);
            const F scale = splat(keeps_products_ || head_.softcap != 0 ? 1.0F : head_.scale);
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
        const F fall = splat(-slope_),
                maximum = splat(at_.maximum[r]);  // scores are loaded as operands of the subtraction
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
    ForwardMemory<P> at_;
    AttentionMask mask_;
    Range all_see_{};      // keys that every row sees by position
    bool keeps_products_;  // scores are kept as products: position alone hides keys
    bool biased_;          // no softcap, no mask: addends are the biases as they lie in memory
    float slope_;          // score·slope is an exponent of 2
    bool whole_ = false;   // every row sees every key of the block
    NonfiniteRows<block_keys> nonfinite_;
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

Index tile_rows(bool bf16_products) {
    return with_product(bf16_products, [](auto p) -> Index { return row_tile<decltype(p)>; });
}

std::size_t scratch(const AttentionHead& head, Index rows) {
    return with_product(head.bf16_products, [&](auto p) { return ForwardMemory<decltype(p)>::size(head, rows); });
}

void run(const AttentionHead& head, Index begin, Index end, std::byte* memory, const AttentionOutput& out) {
    with_product(head.bf16_products, [&](auto p) { run_head<decltype(p)>(head, begin, end, memory, out); });
}

void run_partial(const AttentionHead& head, Index begin, Index end, Index first, Index last, std::byte* memory,
                 const PartialSoftmax& out) {
    with_product(head.bf16_products,
                 [&](auto p) { run_head_partial<decltype(p)>(head, begin, end, first, last, memory, out); });
}

}  // namespace

extern const AttentionForward attention_forward = {
    .block_rows = block::unit_rows,
    .row_step = block::rows,
    .tile_rows = tile_rows,
    .partial_row = partial_row,
    .scratch = scratch,
    .run = run,
    .run_partial = run_partial,
    .combine = combine,
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
