// Which keys a row sees: a range of keys by position, and within it an addend for each key, its bias or −∞. The bias
// may have a slope, and ALiBi a part in it: slope·b − alibi_slope·|i + Lk − Lq − j|. Example: causal, 4 keys, a mask
// that hides key 1, bias b:
//
//     row 1:  key_range [0, 2)   addends  b₀  −∞   ·   ·
//     row 3:  key_range [0, 4)   addends  b₀  −∞  b₂  b₃
#pragma once

#include <cmath>
#include <limits>

#include "engines/cpu/kernels/attention/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float lowest = std::numeric_limits<float>::lowest();

// The dynamic mask keeps the top_w keys of largest bias in a row: those above `bound`, and of those equal to it the
// ones up to key last_tie. top_k.h finds both.
struct TopK {
    const float* bound = nullptr;  // [rows from `first` on]
    const Index* last_tie = nullptr;
    Index first = 0;
};

// Fetches rows [r, r + rows) and keys [first, first + keys) of two planes.
inline auto prefetch_planes(const AttentionHead& head, const Plane& one, const Plane& other, Index r, Index rows,
                            Index first, Index keys) {
    const auto fetch_row = [&head, first, keys](const Plane& t, Index row) {
        if (t.data != nullptr)
            prefetch_row({element(t.data, t.dtype, plane_row(head, t, row) + first), t.dtype, t.column}, keys);
    };
    const bool none = one.data == nullptr && other.data == nullptr;
    return PrefetchRows(none ? r + rows : r, r + rows, [&one, &other, fetch_row](Index row) {
        fetch_row(one, row);
        fetch_row(other, row);
    });
}

class AttentionMask {
  public:
    // top_k: for a head with top_w.
    explicit AttentionMask(const AttentionHead& head, TopK top_k = {}) : head_(head), top_k_(top_k) {}

    // The keys that position alone lets row r see.
    Range key_range(Index r) const {
        const Index i = head_.group == 1 ? r : r % head_.queries;
        return {max(0, i + head_.left), min(head_.keys, i + head_.right + 1)};
    }

    bool hides_by_position_only() const { return head_.mask.data == nullptr && head_.bias.data == nullptr; }
    // … and no addend is anything but 0.
    bool by_position_only() const { return hides_by_position_only() && !has_slopes(); }

    // Whether the addends of a row, within its key range, are the biases alone, which bias_row() gives.
    bool by_bias_only() const {
        return head_.bias.data != nullptr && head_.bias.column == 1 && head_.mask.data == nullptr && head_.top_w < 0 &&
               !has_slopes();
    }
    Row bias_row(Index r, Index first) const {
        const Plane& b = head_.bias;
        return {element(b.data, b.dtype, plane_row(head_, b, r) + first), b.dtype, 1};
    }

    // out[j − first] for keys j of [first, first + count), count ≤ a multiple of W: bias, 0,
    // or −∞ where row r does not see the key. Whole vectors are written. seen: the row's key range.
    void addends(Index r, Range seen, Index first, Index count, float* out) const {
        load_bias(r, first, count, out);
        if (has_slopes()) apply_slopes(r, first, count, out);
        if (head_.top_w >= 0) hide_below_top_k(r, first, count, out);
        if (head_.mask.data != nullptr) hide_masked(r, first, count, out);
        for (Index j = 0; j < count; j += W) {
            if (first + j >= seen.begin && first + j + W <= seen.end) continue;
            const F begin = splat(static_cast<float>(max(seen.begin - first - j, 0)));
            const F end = splat(static_cast<float>(min(seen.end - first - j, W)));
            store(out + j, select((iota() >= begin) & (iota() < end), load(out + j), F(-infinity)));
        }
    }

    // Whether addends are 0 and −∞ alone, within its key range as flags say, which mask_row() gives.
    bool by_flags_only() const {
        return head_.mask.data != nullptr && head_.mask.column == 1 && head_.bias.data == nullptr && head_.top_w < 0 &&
               !has_slopes();
    }
    const std::uint8_t* mask_row(Index r, Index first) const {
        return static_cast<const std::uint8_t*>(head_.mask.data) + plane_row(head_, head_.mask, r) + first;
    }

    // Fetches what addends() will read of rows [r, r + rows) and keys [first, first + keys).
    auto prefetch(Index r, Index rows, Index first, Index keys) const {
        return prefetch_planes(head_, head_.bias, head_.mask, r, rows, first, keys);
    }

    // Whether row r, of key range `seen`, sees a key of [first, last).
    bool sees_any(Index r, Range seen, Index first, Index last) const {
        seen.end = min(last, seen.end);
        first = max(first, seen.begin);
        if (first >= seen.end || hides_by_position_only()) return first < seen.end;
        for (Index j = first; j < seen.end; j += W) {
            alignas(64) float x[W];
            addends(r, seen, j, W, x);
            if (!all(load(x) == F(-infinity))) return true;
        }
        return false;
    }

  private:
    void load_bias(Index r, Index first, Index count, float* out) const {
        const Plane& b = head_.bias;
        const Index at = b.data == nullptr ? 0 : plane_row(head_, b, r) + first * b.column;
        const Index exist = min(count, head_.keys - first);
        if (b.data != nullptr && b.column != 0) {
            load_row({element(b.data, b.dtype, at), b.dtype, b.column}, exist, out);
            for (Index j = round_up(exist, W); j < count; j += W) store(out + j, splat(0.0F));
            return;
        }
        const F x = splat(b.data == nullptr ? 0.0F : load_float(b.dtype, b.data, at));
        for (Index j = 0; j < count; j += W) store(out + j, x);
    }

    bool has_slopes() const { return head_.bias_slope.data != nullptr || head_.alibi_slope.data != nullptr; }

    // What is finite stays finite: beyond the range of f32 it is the largest number.
    void apply_slopes(Index r, Index first, Index count, float* out) const {
        const Plane &bias = head_.bias_slope, &alibi = head_.alibi_slope;
        const F bias_slope = splat(bias.data == nullptr ? 1.0F : head_value(head_, bias, r));
        const F alibi_slope = splat(alibi.data == nullptr ? 0.0F : head_value(head_, alibi, r));
        const Index diagonal = (head_.group == 1 ? r : r % head_.queries) + head_.keys - head_.queries;
        for (Index j = 0; j < count; j += W) {
            const F x = load(out + j);
            const F distance = abs(splat(static_cast<float>(diagonal - first - j)) - iota());
            const F sum = x * bias_slope - alibi_slope * distance;  // min and max give their second operand of a NaN
            store(out + j, select(x == F(-infinity), x, min(splat(-lowest), max(splat(lowest), sum))));
        }
    }

    void hide_below_top_k(Index r, Index first, Index count, float* out) const {
        const F bound = splat(top_k_.bound[r - top_k_.first]);
        const Index last_tie = top_k_.last_tie[r - top_k_.first] - first;
        for (Index j = 0; j < count; j += W) {
            const F x = load(out + j);
            const F after_last_tie = iota() + splat(static_cast<float>(j - last_tie));
            const Mask kept = (x > bound) | ((x == bound) & (after_last_tie <= F(0.0F)));
            store(out + j, select(kept, x, F(-infinity)));
        }
    }

    void hide_masked(Index r, Index first, Index count, float* out) const {
        const Index step = head_.mask.column;
        const auto* flags =
            static_cast<const std::uint8_t*>(head_.mask.data) + plane_row(head_, head_.mask, r) + first * step;
        const Index exist = min(count, head_.keys - first);
        Index j = 0;
        for (; step == 1 && j + W <= exist; j += W)
            store(out + j, select(nonzero_bytes(flags + j), load(out + j), F(-infinity)));
        for (; j < exist; j += W) {
            alignas(64) std::uint8_t part[W] = {};
            for (Index i = 0; i < min(W, exist - j); ++i) part[i] = flags[(j + i) * step];
            store(out + j, select(nonzero_bytes(part), load(out + j), F(-infinity)));
        }
    }

    const AttentionHead& head_;
    TopK top_k_;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
