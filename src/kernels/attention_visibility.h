// What a row may see: a range of keys by position, and within it an addend for each key, bias or −∞.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/attention_rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr float infinity = std::numeric_limits<float>::infinity();

constexpr Index smaller(Index a, Index b) {
    return a < b ? a : b;
}
constexpr Index larger(Index a, Index b) {
    return a > b ? a : b;
}

template <class T>
SOFTDELTA_INLINE F load_part(const T* p, Index n) {
    return n >= W ? load(p) : load_first(p, n);
}

SOFTDELTA_INLINE F load_floats(DType dtype, const void* data, Index at, Index n) {
    if (dtype == DType::f32) return load_part(static_cast<const float*>(data) + at, n);
    if (dtype == DType::bf16) return load_part(static_cast<const core::bf16*>(data) + at, n);
    return load_part(static_cast<const core::f16*>(data) + at, n);
}

// Dynamic mask: which biases of a row are large enough, those above the bound and of equal ones the first. Made by
// attention_selection.h.
struct Selection {
    const float* bound = nullptr;  // [rows from first on]
    const Index* last_tie = nullptr;
    Index first = 0;
};

class Visibility {
  public:
    // selection: of a head with top_w.
    explicit Visibility(const AttentionHead& head, Selection selection = {}) : head_(head), selection_(selection) {}

    // The keys that position alone lets row r see.
    Range range(Index r) const {
        const Index i = r % head_.queries;
        return {larger(0, i + head_.left), smaller(head_.keys, i + head_.right + 1)};
    }

    bool by_position_only() const { return head_.mask.data == nullptr && head_.bias.data == nullptr; }

    // seen is the row's range. out[j − first] for keys j of [first, first + count), count ≤ a multiple of W: bias, 0,
    // or −∞ where row r sees nothing. Whole vectors are written.
    void addends(Index r, Range seen, Index first, Index count, float* out) const {
        for (Index j = 0; j < count; j += W) store(out + j, addend(r, seen, first + j));
    }

    // Whether row r, of range `seen`, sees a key of [first, last).
    bool any(Index r, Range seen, Index first, Index last) const {
        first = larger(first, seen.begin);
        last = smaller(last, seen.end);
        if (first >= last || by_position_only()) return first < last;
        for (Index j = first; j < last; j += W) {
            const F x = addend(r, {seen.begin, last}, j);
            if (xsimd::any(x > F(-infinity)) || xsimd::any(!(x == x))) return true;
        }
        return false;
    }

  private:
    // Keys j … j + W − 1 of row r.
    SOFTDELTA_INLINE F addend(Index r, Range seen, Index j) const {
        const Index n = head_.keys - j;  // that exist
        F x = splat(0.0F);
        if (head_.bias.data != nullptr) x = bias(r, j, n);
        if (head_.top_w >= 0) {
            const F bound = splat(selection_.bound[r - selection_.first]);
            const F behind = lanes() + splat(static_cast<float>(j - selection_.last_tie[r - selection_.first]));
            const Mask kept = (x > bound) | ((x == bound) & (behind <= F(0.0F)));
            x = xsimd::select(kept, x, F(-infinity));
        }
        if (head_.mask.data != nullptr) {
            const Index row = plane_row(head_, head_.mask, r);
            const auto* flags = static_cast<const std::uint8_t*>(head_.mask.data) + row;
            x = xsimd::select(flags_at(flags + j * head_.mask.column, head_.mask.column, n), x, F(-infinity));
        }
        if (j < seen.begin || j + W > seen.end) {
            const F begin = splat(static_cast<float>(larger(seen.begin - j, 0)));
            const F end = splat(static_cast<float>(smaller(seen.end - j, W)));
            x = xsimd::select((lanes() >= begin) & (lanes() < end), x, F(-infinity));
        }
        return x;
    }

    SOFTDELTA_INLINE F bias(Index r, Index j, Index n) const {
        const Plane& b = head_.bias;
        const Index at = plane_row(head_, b, r) + j * b.column;
        if (b.column == 1) return load_floats(b.dtype, b.data, at, n);
        if (b.column == 0) return splat(load_float(b.dtype, b.data, at));
        alignas(64) float part[W] = {};
        for (Index i = 0; i < W && i < n; ++i) part[i] = load_float(b.dtype, b.data, at + i * b.column);
        return load(part);
    }

    SOFTDELTA_INLINE static Mask flags_at(const std::uint8_t* p, Index step, Index n) {
        if (step == 1 && n >= W) return nonzero_bytes(p);
        alignas(64) std::uint8_t part[W] = {};
        for (Index i = 0; i < W && i < n; ++i) part[i] = p[i * step];
        return nonzero_bytes(part);
    }

    const AttentionHead& head_;
    Selection selection_;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
