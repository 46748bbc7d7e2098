// What a unit of query rows is, whichever way it multiplies: its operands, which keys it sees, and its scores.
#pragma once

#include "engines/cpu/kernels/attention/forward/memory.h"
#include "engines/cpu/kernels/attention/top_k.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

template <class P>
class ForwardUnit {
  protected:
    static constexpr Index block_keys = forward_blocks::keys_of<P>, score_row = forward_blocks::score_row<P>;
    // Floats from a score to that of the next key: vectors of 16 keys lie two tiles apart.
    static constexpr Index key_step = P::Tiles::exist ? 2 * tile_size : 1;
    static constexpr Index group_rows = forward_blocks::group_rows<P>;

    ForwardUnit(const AttentionHead& head, Index begin, Index end, std::byte* scratch)
        : head_(head),
          begin_(begin),
          rows_(end - begin),
          at_(take(head, end - begin, scratch)),
          mask_(head, {at_.bound, at_.last_tie, begin}),
          keeps_products_(keeps_products(head)),
          biased_(mask_.by_bias_only() && head.softcap == 0),
          flagged_(P::Tiles::exist && mask_.by_flags_only() && head.softcap == 0),
          slope_(score_scale(head) * log2_e) {}

    void start() {
        for (Index r = 0; r < rows_; ++r) at_.seen[r] = mask_.key_range(begin_ + r);
        if (head_.top_w >= 0)
            for (Index r = 0; r < rows_; ++r) find_top_k(head_, begin_ + r, at_.row, at_.bound + r, at_.last_tie + r);
    }

    // Calls block(first, count) for each block of keys of [first, last), cut to what some row sees by position. Where
    // blocks begin, and whether one is whole, does not depend on the unit's rows, and a cut leaves micropanels where
    // they are: results have the same bits in all units that begin with a group.
    template <class Block>
    void each_block(Index first, Index last, Block&& block) {
        Range seen{last, first};
        for (Index r = 0; r < rows_; ++r)
            if (const Range row = at_.seen[r]; !row.empty())
                seen = {min(seen.begin, row.begin), max(seen.end, row.end)};
        const Index begin = max(seen.begin - first, 0) / NR * NR, end = min(seen.end, last) - first;
        for (Index j = begin; j < end;) {
            const Index start = j / block_keys * block_keys, next = min(start + block_keys, end);
            whole_ = all_rows_see({first + start, min(first + start + block_keys, last)});
            block(first + j, next - j);
            j = next;
        }
    }

    bool all_rows_see(Range keys) const {
        return mask_.hides_by_position_only() && head_.left + head_.queries - 1 <= keys.begin &&
               keys.end <= head_.right + 1;
    }

    // Which keys of the block each group of rows sees, in whole vectors. False when no row sees a key of the block.
    bool find_groups(Index first, Index count) {
        if (whole_) {
            for (Index r = 0, t = 0; r < rows_; r += group_rows, ++t) at_.tiles[t] = {0, round_up(count, W)};
            return true;
        }
        bool found = false;
        for (Index r = 0, t = 0; r < rows_; r += group_rows, ++t) {
            mask_.prefetch(begin_ + r, 1, first + count, W)();  // for sees_any() of the next block
            Range seen{count, 0};
            bool any = false;
            for (Index i = r; i < min(r + group_rows, rows_); ++i) {
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

    // The largest scores of a row, lane by lane. Products become scores (scores.h), −∞ where the row does not see the
    // key.
    SOFTDELTA_INLINE F row_maximum(Index r, float* scores, Index first, Index keys, Range tile) {
        // In the last block of a range of keys the row's own range may reach farther: there is no key beyond the block.
        const Range seen{at_.seen[r].begin, min(at_.seen[r].end, first + keys)};
        const bool whole = seen.begin <= first + tile.begin && first + tile.end <= seen.end;
        F high[2] = {splat(lowest), splat(lowest)};
        if (whole && keeps_products_) {
            Index j = tile.begin;
            for (; j + W < tile.end; j += 2 * W) {
                high[0] = max(high[0], load(scores + j * key_step));
                high[1] = max(high[1], load(scores + (j + W) * key_step));
            }
            if (j < tile.end) high[0] = max(high[0], load(scores + j * key_step));
        } else if (whole && flagged_) {
            const std::uint8_t* flags = mask_.mask_row(begin_ + r, first);
            const F scale = splat(head_.scale);
            for (Index j = tile.begin; j < tile.end; j += W) {
                const F score = load(scores + j * key_step) * scale;
                store(scores + j * key_step, select(nonzero_bytes(flags + j), score, F(-infinity)));
            }
        } else if (whole && biased_) {
            high[0] = biased(mask_.bias_row(begin_ + r, first), scores, tile);
        } else {
            mask_.addends(begin_ + r, seen, first + tile.begin, tile.end - tile.begin, at_.addends);
            if (head_.softcap != 0) cap(scores, tile);
            const F scale = splat(keeps_products_ || head_.softcap != 0 ? 1.0F : head_.scale);
            for (Index j = tile.begin; j < tile.end; j += W) {
                const F addend = load(at_.addends + j - tile.begin);
                const F score = fma(load(scores + j * key_step), scale, addend);
                const F kept = select(addend == F(-infinity), addend, score);
                high[0] = max(high[0], kept);
                store(scores + j * key_step, kept);
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
            const F kept = select(addend == F(-infinity), addend, fma(load(scores + j * key_step), scale, addend));
            high = max(high, kept);
            store(scores + j * key_step, kept);
        }
        return high;
    }

    void cap(float* scores, Range tile) const {
        const F slope = splat(head_.scale / head_.softcap);
        for (Index j = tile.begin; j < tile.end; j += W)
            store(scores + j * key_step, splat(head_.softcap) * tanh(load(scores + j * key_step) * slope));
    }

    static ForwardMemory<P> take(const AttentionHead& head, Index rows, std::byte* scratch) {
        Scratch memory(scratch);
        return ForwardMemory<P>::take(head, rows, memory);
    }

    const AttentionHead& head_;
    Index begin_, rows_;
    ForwardMemory<P> at_;
    AttentionMask mask_;
    bool keeps_products_;  // scores are kept as products: position alone hides keys
    bool biased_;          // no softcap, no mask: addends are the biases as they lie in memory
    bool flagged_;         // no softcap, no bias: addends are 0 or −∞, as the mask says; by matrix tiles
    float slope_;          // score·slope is an exponent of 2
    bool whole_ = false;   // every row of the head sees every key of the block; it is not cut then
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
