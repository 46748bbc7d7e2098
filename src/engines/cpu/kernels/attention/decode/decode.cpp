// Few query rows over many keys, as fast as memory can be read:
//     q [rows,D] · kᵀ [D,4] → s [rows,4] → p = e^(s − m) [rows,4] → o [rows,Dv] += p · v [4,Dv]
// Keys and values are not packed: a tile of keys goes through all heads in the order of memory, while rows of a later
// tile are fetched. Products with queries have lanes along D, sums of values along Dv. In between every row of every
// head is a slot, and four keys of a slot are neighbours in a vector, so that few rows fill it:
//     vector of scores, W = 16:  | slot 0: k₀ k₁ k₂ k₃ | slot 1: k₀ k₁ k₂ k₃ | slot 2 … | slot 3 … |
// One thought: the state of a decode step is shared by all of it; its products are in products.h.
#include "engines/cpu/kernels/isa_unit.h"

#include "engines/cpu/kernels/attention/blocks.h"
#include "engines/cpu/kernels/attention/decode/heads.h"
#include "engines/cpu/kernels/attention/decode/products.h"
#include "engines/cpu/kernels/attention/nonfinite.h"
#include "engines/cpu/kernels/attention/scores.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

constexpr Index key_block = decode_blocks::keys;

enum class Seen : std::uint8_t { by_none, by_some, by_all };

struct Memory {
    float* q;              // [slots, a_row_length(D)] floats or pairs
    float* o;              // [slots, round_up(Dv, W)] sums that are not divided yet
    float *maximum, *sum;  // [slots, slot_keys] largest score; Σ 2^((score − maximum)·slope)
    float* products;       // [W, W] whose lanes are still to be summed
    float *scores, *p;     // [slots, slot_keys] of the next keys; their exponentials
    float* addends;        // [slots, key_block]
    Seen* seen;            // [heads, key_block] by how many of the head's rows
    Index *key_at,
        *value_at;  // [2·key_block] bytes from the first key of a head to the keys of this block and the next
    float *key_staging, *value_staging;    // [slot_keys, row] of what is not stored in whole vectors
    float* zeros;                          // [round_up(Dv, W)] stands for a hidden value
    Index *key_scale_at, *value_scale_at;  // [key_block] as key_at, of scales
    float *key_scales, *value_scales;      // [scales_length] of the rows that are read
    float* factors;                        // [slots of a head, scales_length(Dv)] probabilities times scales

    Memory(const AttentionHead& head, Index heads, Scratch memory) { take(head, heads, memory); }
    static std::size_t size(const AttentionHead& head, Index heads) {
        Scratch count(nullptr);
        Memory unused;
        unused.take(head, heads, count);
        return count.used();
    }

  private:
    Memory() = default;
    void take(const AttentionHead& head, Index heads, Scratch& memory) {
        const Index slots = heads * slots_of(head);
        const Index lanes = round_up(slots * slot_keys, W);
        const Index row = round_up(head.size, W), value_row = round_up(head.value_size, W);
        q = memory.take<float>(slots * row + W);
        o = memory.take<float>(slots * value_row);
        maximum = memory.take<float>(lanes);
        sum = memory.take<float>(lanes);
        products = memory.take<float>(W * W);
        scores = memory.take<float>(lanes);
        p = memory.take<float>(lanes);
        addends = memory.take<float>(round_up(slots, W) * key_block);
        seen = memory.take<Seen>(heads * key_block);
        key_at = memory.take<Index>(2 * key_block);
        value_at = memory.take<Index>(2 * key_block);
        key_staging = memory.take<float>(slot_keys * row);
        value_staging = memory.take<float>(slot_keys * value_row);
        zeros = memory.take<float>(value_row);
        key_scale_at = value_scale_at = nullptr;
        key_scales = value_scales = factors = nullptr;
        if (head.k.scale == nullptr && head.v.scale == nullptr) return;
        key_scale_at = memory.take<Index>(key_block);
        value_scale_at = memory.take<Index>(key_block);
        key_scales = memory.take<float>(scales_length(head.size));
        value_scales = memory.take<float>(scales_length(head.value_size));
        factors = memory.take<float>(slots_of(head) * scales_length(head.value_size));
    }
};

template <class P>
class Decode {
  public:
    Decode(const AttentionHead* heads, Index count, std::byte* scratch)
        : heads_(heads),
          head_(*heads),
          count_(count),
          rows_(head_.rows()),
          at_once_(rows_at_once(rows_)),
          slots_(slots_of(head_)),
          lanes_(round_up(count * slots_ * slot_keys, W)),
          value_row_(round_up(head_.value_size, W)),
          at_(head_, count, Scratch(scratch)),
          keys_whole_(head_.k.column == 1 && head_.size % (W * P::depth) == 0),
          values_whole_(head_.v.column == 1 && head_.value_size % W == 0),
          dots_(dots<P>(keys_whole_ ? head_.k.dtype : DType::f32, at_once_, head_.fetches_to_second_cache)),
          add_values_(add_values(values_whole_ ? head_.v.dtype : DType::f32, at_once_, head_.fetches_to_second_cache)),
          add_floats_(add_values(DType::f32, at_once_, head_.fetches_to_second_cache)) {
        const Index bytes = (head_.size + head_.value_size) / 2 * static_cast<Index>(core::size_of(head_.k.dtype));
        const Index ahead =
            min(decode_blocks::prefetch_bytes / max(1, slot_keys * bytes) + 1, count * (key_block / slot_keys));
        ahead_keys_ = ahead / (2 * count) * slot_keys, ahead_steps_ = ahead % (2 * count);
        keeps_products_ = keeps_products(head_);
        slope_ = score_scale(head_) * log2_e;
        as_one_ = sees_as_one();
    }

    void start() {
        const Index row = a_row_length<P>(head_.size);
        for (Index h = 0; h < count_; ++h) {
            auto* q = reinterpret_cast<Element<P>*>(at_.q) + h * slots_ * row;
            pack_a<P>(
                rows_, head_.size, [&](Index r) { return query_row(heads_[h], heads_[h].q, r); }, q);
            for (Index i = rows_ * row; i < slots_ * row; ++i) q[i] = 0;
        }
        fill(at_.o, count_ * slots_ * value_row_, 0);
        fill(at_.maximum, lanes_, lowest);
        fill(at_.sum, lanes_, 0);
        fill(at_.products, W * W, 0);
        fill(at_.zeros, value_row_, 0);
    }

    void keys(Index first, Index last) {
        seen_ = {last, first};
        all_see_ = {first, last};
        const AttentionMask mask(head_);
        for (Index r = 0; r < rows_; ++r) {
            const Range row = mask.key_range(r);
            all_see_ = {max(all_see_.begin, row.begin), min(all_see_.end, row.end)};
            if (row.empty()) continue;
            seen_ = {min(seen_.begin, row.begin), max(seen_.end, row.end)};
        }
        first = max(first, seen_.begin);
        last = min(last, seen_.end);
        if (!is_whole(first, last - first)) fill(at_.addends, round_up(count_ * slots_, W) * key_block, 0);
        for (Index j = first; j < last; j += key_block) block(j, min(key_block, last - j), last);
    }

    void finish(const PartialSoftmax& out, Index stride) const {
        for (Index h = 0; h < count_; ++h) {
            const PartialSoftmax to{out.o + h * stride, out.maximum + h * stride, out.sum + h * stride};
            const Index slot = h * slots_;
            for (Index i = 0; i < rows_ * value_row_; i += W) store(to.o + i, load(at_.o + slot * value_row_ + i));
            for (Index r = 0; r < rows_; ++r) {
                const float* sum = at_.sum + (slot + r) * slot_keys;
                to.maximum[r] = at_.maximum[(slot + r) * slot_keys];
                to.sum[r] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
            }
        }
    }

  private:
    static void fill(float* p, Index n, float x) {
        for (Index i = 0; i < n; i += W) store(p + i, splat(x));
    }

    void block(Index first, Index count, Index last) {
        whole_ = is_whole(first, count);
        if (!whole_ && !find_addends(first, count)) return;
        const Index found = round_up(count, slot_keys) + ahead_keys_ + 2 * slot_keys;  // by find_rows_to_prefetch
        find_addresses(head_.k, first, last, found, at_.key_at);
        find_addresses(head_.v, first, last, found, at_.value_at);
        find_scales(head_.k, first, last, at_.key_scale_at);
        find_scales(head_.v, first, last, at_.value_scale_at);
        // Scores of the next keys are under way while values wait for the exponentials of these.
        scores(0);
        softmax(0);
        for (Index j = 0; j < count; j += slot_keys) {
            const bool more = j + slot_keys < count;
            if (more) scores(j + slot_keys);
            for (Index h = 0; h < count_; ++h) values(h, j);
            if (more) softmax(j + slot_keys);
        }
    }

    // Whether these keys have no addends: all rows see all of them, and they fill vectors.
    bool is_whole(Index first, Index count) const {
        return keeps_products_ && count % slot_keys == 0 && all_see_.begin <= first && first + count <= all_see_.end;
    }

    // Addresses of `count` keys from `first` on. Beyond the last key they repeat its address: only the prefetch reads
    // them.
    static void find_addresses(const KeyRows& t, Index first, Index last, Index count, Index* at) {
        const auto row = t.row * static_cast<Index>(core::size_of(t.dtype));
        if (t.table == nullptr) return find_multiples(row, first, last, count, at);
        const Index exist = min(count, last - first);
        for (Index i = 0, in_block = first % t.block_rows; i < exist; in_block = 0) {
            const Index begin =
                static_cast<const std::byte*>(key_row(t, first + i).data) - static_cast<const std::byte*>(t.data);
            const Index n = min(t.block_rows - in_block, exist - i);
            for (Index j = 0; j < n; ++j) at[i + j] = begin + j * row;
            i += n;
        }
        for (Index i = exist; i < count; ++i) at[i] = at[exist - 1];
    }

    // The same of scales, which are not fetched: they lie beside their numbers, or are few.
    static void find_scales(const KeyRows& t, Index first, Index last, Index* at) {
        const Index row = t.scale_row * static_cast<Index>(core::size_of(t.scales.dtype));
        if (t.scale == nullptr) return;
        if (t.table == nullptr) return find_multiples(row, first, last, key_block, at);
        for (Index i = 0; i < key_block; ++i)
            at[i] = static_cast<const std::byte*>(key_row(t, min(first + i, last - 1)).scale) -
                    static_cast<const std::byte*>(t.scale);
    }

    // at[i] = min(first + i, last − 1)·row
    static void find_multiples(Index row, Index first, Index last, Index count, Index* at) {
        const Index exist = min(count, last - first);
        for (Index i = 0; i < exist; ++i) at[i] = (first + i) * row;
        for (Index i = exist; i < count; ++i) at[i] = (last - 1) * row;
    }

    // Whether all rows of all heads have the same addends: one query, and a mask and bias for all its heads.
    bool sees_as_one() const {
        if (head_.queries != 1 || head_.bias_slope.data != nullptr || head_.alibi_slope.data != nullptr) return false;
        const auto same = [&](const Plane AttentionHead::*plane) {
            const Plane& first = head_.*plane;
            if (first.data == nullptr) return true;
            for (Index h = 1; h < count_; ++h)
                if ((heads_[h].*plane).data != first.data) return false;
            return first.head == 0 || head_.group == 1;
        };
        return same(&AttentionHead::mask) && same(&AttentionHead::bias);
    }

    // Which keys of the block the rows of each head see. False when no row sees a key.
    bool find_addends(Index first, Index count) {
        bool any = false;
        const Index rows_that_differ = as_one_ ? 1 : rows_;
        for (Index h = 0; h < (as_one_ ? 1 : count_); ++h) {
            const AttentionMask mask(heads_[h]);
            Seen* seen = seen_of(h);
            std::uint8_t rows[key_block] = {};  // that see a key
            for (Index r = 0; r < rows_that_differ; ++r) {
                float* addends = addends_of(h * slots_ + r);
                const Range row = mask.key_range(r);
                mask.addends(r, {row.begin, min(row.end, first + count)}, first, key_block, addends);
                for (Index j = 0; j < key_block; ++j) rows[j] += addends[j] == -infinity ? 0 : 1;
            }
            for (Index j = 0; j < key_block; ++j) {
                seen[j] = rows[j] == 0 ? Seen::by_none : rows[j] < rows_that_differ ? Seen::by_some : Seen::by_all;
                any = any || rows[j] != 0;
            }
        }
        return any;
    }

    // Addresses of slot_keys rows of a head from key j of the block on.
    static void find_rows(const KeyRows& t, const Index* at, Index j, const void** rows) {
        for (Index i = 0; i < slot_keys; ++i) rows[i] = static_cast<const std::byte*>(t.data) + at[j + i];
    }

    // Key or value j of the block, which lies at `data`.
    static Row row_at(const KeyRows& t, const void* data, const Index* scale_at, Index j) {
        Row row{data, t.dtype, t.column};
        if (t.scale == nullptr) return row;
        row.scale = static_cast<const std::byte*>(t.scale) + scale_at[j];
        row.scales = &t.scales;
        return row;
    }

    // Scales of slot_keys rows of n elements, from row j of the block on.
    static QuantisedRows scales_of(const KeyRows& t, const Index* scale_at, Index j, Index n, float* scales) {
        if (t.scale == nullptr) return {};
        const void* rows[slot_keys];
        for (Index k = 0; k < slot_keys; ++k) rows[k] = static_cast<const std::byte*>(t.scale) + scale_at[j + k];
        return load_scales(t.scales, rows, n, scales);
    }

    // Rows are read in steps: keys j of head after head, values j − slot_keys of head after head, then the next keys.
    // Finds the rows of the step that is ahead.
    void find_rows_to_prefetch(Index j, Index step, const void** rows) const {
        j += ahead_keys_, step += ahead_steps_;
        if (step >= 2 * count_) j += slot_keys, step -= 2 * count_;
        if (step < count_)
            find_rows(heads_[step].k, at_.key_at, j, rows);
        else
            find_rows(heads_[step - count_].v, at_.value_at, max(0, j - slot_keys), rows);
    }

    // Scores of all slots and slot_keys keys from j on.
    void scores(Index j) {
        const Index row = a_row_length<P>(head_.size);
        float* out = at_.scores;
        Index products = 0;
        for (Index h = 0; h < count_; ++h) {
            const void *keys[slot_keys], *ahead[slot_keys];
            find_rows(heads_[h].k, at_.key_at, j, keys);
            find_rows_to_prefetch(j, h, ahead);
            for (Index i = 0; i < slot_keys && !keys_whole_; ++i) {
                const Row from = row_at(heads_[h].k, keys[i], at_.key_scale_at, j + i);
                keys[i] = stored_row(from, head_.size, reinterpret_cast<Stored<P>*>(at_.key_staging + i * row), P{});
            }
            const QuantisedRows quantised =
                keys_whole_ ? scales_of(heads_[h].k, at_.key_scale_at, j, head_.size, at_.key_scales) : QuantisedRows{};
            for (Index s = 0; s < slots_; s += at_once_) {
                const bool summed = at_once_ * slot_keys >= W;
                dots_(at_.q + (h * slots_ + s) * row, row, row / W, keys, quantised, ahead,
                      summed ? out : at_.products + products * W);
                if (summed) {
                    out += at_once_ * slot_keys;
                } else if ((products += at_once_ * slot_keys) == W) {
                    sum_products(out);
                    out += W, products = 0;
                }
            }
        }
        if (products > 0) sum_products(out);
    }

    // Of the products of few rows, which fill a vector together.
    void sum_products(float* out) const {
        F rows[W];
        for (Index i = 0; i < W; ++i) rows[i] = load(at_.products + i * W);
        store(out, row_sums(rows));
    }

    float* addends_of(Index slot) const { return at_.addends + (as_one_ ? 0 : slot * key_block); }
    Seen* seen_of(Index h) const { return at_.seen + (as_one_ ? 0 : h * key_block); }

    // Of keys [j, j + slot_keys) of the block.
    void softmax(Index j) {
        for (Index i = 0; i < lanes_; i += W) softmax(i, j);
    }
    // A vector of slots, from lane i on.
    SOFTDELTA_INLINE void softmax(Index i, Index j) {
        F score = load(at_.scores + i);
        if (!whole_) score = visible(score, i, j);
        if (any(score > load(at_.maximum + i))) raise(i, score);
        const F p = exp2((score - load(at_.maximum + i)) * splat(slope_));
        store(at_.sum + i, load(at_.sum + i) + p);
        store(at_.p + i, p);
    }

    // Scores of keys from j on with scale, softcap, bias and mask; where position alone hides keys, with the mask
    // alone.
    F visible(F score, Index i, Index j) const {
        F addend = splat_four(at_.addends + j);
        if (!as_one_) {
            alignas(64) float part[W];
            for (Index l = 0; l < W; ++l) part[l] = addends_of((i + l) / slot_keys)[j + l % slot_keys];
            addend = load(part);
        }
        if (!keeps_products_) score = score * splat(head_.scale);
        if (head_.softcap != 0) score = splat(head_.softcap) * tanh(score * splat(1.0F / head_.softcap));
        return select(addend == F(-infinity), addend, score + addend);
    }

    // New maxima of the slots from lane `first` on; sums under the old maxima are multiplied by e^(old − new).
    [[gnu::noinline]] void raise(Index first, F score) {
        alignas(64) float scores[W];
        store(scores, score);
        for (Index i = 0; i < W; i += slot_keys) {
            const Index lane = first + i;
            const float before = at_.maximum[lane];
            float after = before;
            for (Index l = 0; l < slot_keys; ++l)
                if (scores[i + l] > after) after = scores[i + l];
            if (after == before) continue;
            const F factor = exp2(splat((before - after) * slope_));
            for (Index l = 0; l < slot_keys; ++l) at_.maximum[lane + l] = after;
            store_partial(at_.sum + lane, load_partial(at_.sum + lane, slot_keys) * factor, slot_keys);
            const Index slot = lane / slot_keys;
            if (slot >= count_ * slots_) continue;
            float* o = at_.o + slot * value_row_;
            for (Index c = 0; c < value_row_; c += W) store(o + c, load(o + c) * factor);
        }
    }

    void values(Index h, Index j) {
        const void *rows[slot_keys], *ahead[slot_keys];
        find_rows(heads_[h].v, at_.value_at, j, rows);
        find_rows_to_prefetch(j + slot_keys, count_ + h, ahead);
        bool nonfinite[slot_keys] = {}, any_nonfinite = false;
        // Quantised numbers that stay out become zeros, with those beside them: a row of zeros has no blocks.
        bool staged = !values_whole_;
        for (Index i = 0; i < slot_keys && head_.v.scale != nullptr && !whole_; ++i)
            staged = staged || seen_of(h)[j + i] != Seen::by_all;
        for (Index i = 0; i < slot_keys && (staged || !whole_); ++i) {
            const Seen seen = whole_ ? Seen::by_all : seen_of(h)[j + i];
            const Row value = row_at(heads_[h].v, rows[i], at_.value_scale_at, j + i);
            // 0·∞ is NaN: a value that is not finite and not seen by all rows is added row by row (nonfinite.h).
            nonfinite[i] = seen == Seen::by_some && !is_finite(value, head_.value_size);
            any_nonfinite = any_nonfinite || nonfinite[i];
            if (seen == Seen::by_none || nonfinite[i]) {
                rows[i] = at_.zeros;
            } else if (staged) {
                float* staging = at_.value_staging + i * value_row_;
                load_row(value, head_.value_size, staging);
                rows[i] = staging;
            }
        }
        Factors factors{at_.p + h * slots_ * slot_keys, slot_keys};
        const QuantisedRows quantised =
            staged ? QuantisedRows{}
                   : scales_of(heads_[h].v, at_.value_scale_at, j, head_.value_size, at_.value_scales);
        if (quantised.scale != nullptr) factors = scaled(factors);
        const AddValues add = staged ? add_floats_ : add_values_;
        for (Index s = 0; s < slots_; s += at_once_)
            add({factors.p + s * factors.row, factors.row}, rows, quantised, ahead, value_row_,
                at_.o + (h * slots_ + s) * value_row_);
        if (any_nonfinite) add_nonfinite(h, j, nonfinite);
    }

    // Factors of the slots of a head with scales in them.
    Factors scaled(Factors factors) const {
        const Index row = scales_length(head_.value_size);
        for (Index s = 0; s < slots_; ++s) {
            const F p = splat_four(factors.p + s * slot_keys);
            for (Index i = 0; i < row; i += W) store(at_.factors + s * row + i, p * load(at_.value_scales + i));
        }
        return {at_.factors, row};
    }

    void add_nonfinite(Index h, Index j, const bool* nonfinite) {
        const void* rows[slot_keys];
        find_rows(heads_[h].v, at_.value_at, j, rows);
        for (Index i = 0; i < slot_keys; ++i) {
            if (!nonfinite[i]) continue;
            load_row(row_at(heads_[h].v, rows[i], at_.value_scale_at, j + i), head_.value_size, at_.value_staging);
            for (Index s = h * slots_; s < h * slots_ + rows_; ++s) {
                if (addends_of(s)[j + i] == -infinity) continue;
                add_scaled(at_.p[s * slot_keys + i], at_.value_staging, value_row_, at_.o + s * value_row_);
            }
        }
    }

    const AttentionHead* heads_;
    const AttentionHead& head_;  // the first: all have the same sizes, types and strides
    Index count_, rows_, at_once_, slots_, lanes_, value_row_;
    Memory at_;
    bool keys_whole_, values_whole_;  // rows are whole vectors in memory
    Dots dots_;
    AddValues add_values_, add_floats_;
    Index ahead_keys_, ahead_steps_;       // from the rows that are read to those that are fetched meanwhile
    Range seen_, all_see_;                 // keys that some row sees by position, that every row sees
    bool as_one_;                          // whether the addends of one row are those of all
    bool keeps_products_, whole_ = false;  // position alone hides keys; every row sees every key of this block
    float slope_;                          // score·slope is an exponent of 2
};

// On its own, so that the compiler arranges it as if all calls read all heads: within the loop of run(), masked calls
// take 5 % longer.
template <class P>
[[gnu::noinline]] void run_together(const AttentionHead* heads, Index count, Index first, Index last,
                                    std::byte* scratch, const PartialSoftmax& out, Index stride) {
    Decode<P> decode(heads, count, scratch);
    decode.start();
    decode.keys(first, last);
    decode.finish(out, stride);
}

void run(const AttentionHead* heads, Index count, Index first, Index last, std::byte* scratch,
         const PartialSoftmax& out, Index stride) {
    if (heads->rows() == 0) return;
    const Computing<FloatProduct> computing;  // decode has no matrix tiles
    with_product(heads->bf16_products, [&](auto p) {
        using P = decltype(p);
        const Index at_once = heads_at_once<P>(heads, count);
        for (Index h = 0; h < count; h += at_once)
            run_together<P>(heads + h, at_once, first, last, scratch,
                            {out.o + h * stride, out.maximum + h * stride, out.sum + h * stride}, stride);
    });
}

}  // namespace

const AttentionDecode attention_decode = {
    .most_rows = decode_blocks::rows,
    .scratch = Memory::size,
    .run = run,
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
