// Blocked online softmax of a unit of query rows, for one block of packed keys after the other:
//     q [R,D]·kᵀ [D,L] → s [R,L] → m' = max(m, rowmax s) [R] → p = e^(s − m') [R,L]
//     p [R,L]·v [L,Dv] + e^(m − m')·o → o [R,Dv]
// o is divided by the sum of p once, after the last block. One thought: what a unit keeps between blocks.
#include "engines/cpu/kernels/isa_unit.h"

#include "engines/cpu/kernels/attention/forward/by_tiles.h"
#include "engines/cpu/kernels/attention/forward/combine.h"
#include "engines/cpu/kernels/attention/forward/unit.h"
#include "engines/cpu/kernels/attention/nonfinite.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

template <class P>
class Forward : ForwardUnit<P> {
    using Unit = ForwardUnit<P>;
    using Unit::at_, Unit::begin_, Unit::head_, Unit::mask_, Unit::rows_, Unit::score_row, Unit::slope_;

  public:
    Forward(const AttentionHead& head, Index begin, Index end, bool /*exact*/, std::byte* /*packed*/,
            std::byte* scratch)
        : Unit(head, begin, end, scratch) {}

    void start() {
        pack_a<P>(
            rows_, head_.size, [&](Index r) { return query_row(head_, head_.q, begin_ + r); }, at_.q);
        const Index length = rows_ * round_up(head_.value_size, W);
        for (Index i = 0; i < length; i += W) store(at_.o + i, splat(0.0F));
        Unit::start();
        for (Index r = 0; r < rows_; ++r) {
            at_.maximum[r] = lowest;
            at_.sum[r] = 0;
        }
    }

    void keys(Index first, Index last) {
        Unit::each_block(first, last, [&](Index begin, Index count) { block(begin, count); });
    }

    void finish(const AttentionOutput& out) {
        const Index length = round_up(head_.value_size, W);
        for (Index r = 0; r < rows_; ++r)
            finish_row(head_, begin_ + r, at_.o + r * length, at_.maximum[r], at_.sum[r], out);
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
        if (!Unit::find_groups(first, count)) return;
        pack(first, count);
        for (Index r = 0; r < rows_; r += forward_blocks::rows)
            rows(r, min(forward_blocks::rows, rows_ - r), first, count);
    }

    auto key(const KeyRows& t, Index first) {
        return [&t, first](Index j) { return key_row(t, first + j); };
    }

    void pack(Index first, Index count) {
        pack_b_transposed<P>(count, head_.size, key(head_.k, first), at_.staging, at_.keys);
        pack_b(count, head_.value_size, key(head_.v, first), reinterpret_cast<Stored<P>*>(at_.staging), at_.values,
               P{});
        nonfinite_.count = 0;
        if (!Unit::whole_) nonfinite_.template take_out<P>(count, head_.value_size, key(head_.v, first), at_.values);
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
                highs[l] = i + l < count
                               ? Unit::row_maximum(r + i + l, at_.scores + (m + i + l) * score_row, first, keys, tile)
                               : splat(lowest);
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

    NonfiniteRows<forward_blocks::keys_of<P>> nonfinite_;
};

template <class P>
using ForwardOf = std::conditional_t<P::Tiles::exist, ForwardByTiles<P>, Forward<P>>;

template <class P>
void run_head(const AttentionHead& head, Index begin, Index end, std::byte* packed, std::byte* scratch,
              const AttentionOutput& out) {
    ForwardOf<P> forward(head, begin, end, out.lse.data != nullptr, packed, scratch);
    forward.start();
    forward.keys(0, head.keys);
    forward.finish(out);
}

template <class P>
void run_head_partial(const AttentionHead& head, Index begin, Index end, Index first, Index last, std::byte* scratch,
                      const PartialSoftmax& out) {
    ForwardOf<P> forward(head, begin, end, true, nullptr, scratch);
    forward.start();
    forward.keys(first, last);
    forward.finish_partial(out);
}

Index tile_rows(bool bf16_products) {
    return with_product(bf16_products, [](auto p) -> Index { return forward_blocks::group_rows<decltype(p)>; });
}

std::size_t scratch(const AttentionHead& head, Index rows) {
    return with_product(head.bf16_products, [&](auto p) { return forward_scratch<decltype(p)>(head, rows); });
}

std::size_t packed_keys(const AttentionHead& head) {
    return with_product(head.bf16_products, [&](auto p) -> std::size_t {
        Scratch count(nullptr);
        if constexpr (decltype(p)::Tiles::exist) TileOperands::take(head, head.keys, count);
        return count.used();
    });
}

void pack_keys(const AttentionHead& head, Index first, Index last, std::byte* packed, std::byte* scratch) {
    with_product(head.bf16_products, [&](auto p) {
        if constexpr (decltype(p)::Tiles::exist) {
            Scratch memory(packed);
            const TileOperands operands = TileOperands::take(head, head.keys, memory);
            const PackOperands<decltype(p)> pack(head, operands, reinterpret_cast<std::uint32_t*>(scratch));
            for (Index j = first; j < last; j += TileOperands::part_keys)
                pack.part(j, min(j + TileOperands::part_keys, last), j);
        }
    });
}

void run(const AttentionHead& head, Index begin, Index end, std::byte* packed, std::byte* memory,
         const AttentionOutput& out) {
    compute_with(head.bf16_products, [&](auto p) { run_head<decltype(p)>(head, begin, end, packed, memory, out); });
}

void run_partial(const AttentionHead& head, Index begin, Index end, Index first, Index last, std::byte* memory,
                 const PartialSoftmax& out) {
    compute_with(head.bf16_products,
                 [&](auto p) { run_head_partial<decltype(p)>(head, begin, end, first, last, memory, out); });
}

}  // namespace

const AttentionForward attention_forward = {
    .block_rows = forward_blocks::unit_rows,
    .tile_rows = tile_rows,
    .partial_row = partial_row,
    .scratch = scratch,
    .packed_keys = packed_keys,
    .pack_keys = pack_keys,
    .run = run,
    .run_partial = run_partial,
    .combine = combine,
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
