// What a row may see: a range of keys by position, and within it an addend for each key, bias or −∞.
#pragma once

#include <cmath>
#include <limits>

#include "engines/cpu/kernels/attention/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr float infinity = std::numeric_limits<float>::infinity();

// Dynamic mask: which biases of a row are large enough, those above the bound and of equal ones the first. Made by
// selection.h.
struct Selection {
    const float* bound = nullptr;  // [rows from first on]
    const Index* last_tie = nullptr;
    Index first = 0;
};

// Asks for rows [r, r + rows) and keys [first, first + keys) of two planes, two rows at a call.
class Ahead {
  public:
    Ahead(const AttentionHead& head, const Plane& one, const Plane& other, Index r, Index rows, Index first, Index keys)
        : head_(head), one_(one), other_(other), row_(r), end_(r + rows), first_(first), keys_(keys) {
        if (one.data == nullptr && other.data == nullptr) row_ = end_;
    }
    void operator()() {
        for (Index i = 0; i < 2 && row_ < end_; ++i, ++row_) {
            fetch(one_);
            fetch(other_);
        }
    }

  private:
    void fetch(const Plane& t) const {
        if (t.data == nullptr || t.column != 1) return;
        const auto* begin = static_cast<const char*>(element(t.data, t.dtype, plane_row(head_, t, row_) + first_));
        for (Index i = 0; i < keys_ * static_cast<Index>(core::size_of(t.dtype)); i += 64) prefetch_line(begin + i);
    }

    const AttentionHead& head_;
    const Plane &one_, &other_;
    Index row_, end_, first_, keys_;
};

class Visibility {
  public:
    // selection: of a head with top_w.
    explicit Visibility(const AttentionHead& head, Selection selection = {}) : head_(head), selection_(selection) {}

    // The keys that position alone lets row r see.
    Range range(Index r) const {
        const Index i = head_.group == 1 ? r : r % head_.queries;
        return {max(0, i + head_.left), min(head_.keys, i + head_.right + 1)};
    }

    bool by_position_only() const { return head_.mask.data == nullptr && head_.bias.data == nullptr; }

    // Whether all addends of a row, within its range, lie as they are in bias_row().
    bool by_bias_only() const {
        return head_.bias.data != nullptr && head_.bias.column == 1 && head_.mask.data == nullptr && head_.top_w < 0;
    }
    Row bias_row(Index r, Index first) const {
        const Plane& b = head_.bias;
        return {element(b.data, b.dtype, plane_row(head_, b, r) + first), b.dtype, 1};
    }

    // seen is the row's range. out[j − first] for keys j of [first, first + count), count ≤ a multiple of W: bias, 0,
    // or −∞ where row r sees nothing. Whole vectors are written.
    void addends(Index r, Range seen, Index first, Index count, float* out) const {
        load_bias(r, first, count, out);
        if (head_.top_w >= 0) hide_unselected(r, first, count, out);
        if (head_.mask.data != nullptr) hide_masked(r, first, count, out);
        for (Index j = 0; j < count; j += W) {
            if (first + j >= seen.begin && first + j + W <= seen.end) continue;
            const F begin = splat(static_cast<float>(max(seen.begin - first - j, 0)));
            const F end = splat(static_cast<float>(min(seen.end - first - j, W)));
            store(out + j, select((iota() >= begin) & (iota() < end), load(out + j), F(-infinity)));
        }
    }

    // Asks for what addends() will read of rows [r, r + rows) and keys [first, first + keys).
    Ahead ahead(Index r, Index rows, Index first, Index keys) const {
        return {head_, head_.bias, head_.mask, r, rows, first, keys};
    }

    // Whether row r, of range `seen`, sees a key of [first, last).
    bool any(Index r, Range seen, Index first, Index last) const {
        seen.end = min(last, seen.end);
        first = max(first, seen.begin);
        if (first >= seen.end || by_position_only()) return first < seen.end;
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

    void hide_unselected(Index r, Index first, Index count, float* out) const {
        const F bound = splat(selection_.bound[r - selection_.first]);
        const Index last_tie = selection_.last_tie[r - selection_.first] - first;
        for (Index j = 0; j < count; j += W) {
            const F x = load(out + j);
            const F behind = iota() + splat(static_cast<float>(j - last_tie));
            const Mask kept = (x > bound) | ((x == bound) & (behind <= F(0.0F)));
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
    Selection selection_;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
