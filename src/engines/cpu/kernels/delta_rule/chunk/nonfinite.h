// Values that are not finite, in the products of the scan. A row tile reaches over rows that not all of its own rows
// see; those have the factor 0, and 0·∞ is NaN. Such a tile shows it in the row that sees least. Its product is made
// again with zeros instead of these values, and what does depend on them becomes NaN.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/operands.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Whether the first row of every row tile of product() is finite; or the last one of every MR rows, as they are solved.
// Rows of a panel, `width` floats; 0·x is 0, or NaN.
template <class P>
bool first_rows_are_finite(Index n, Index width, const float* rows, Index row) {
    F first = splat(0.0F), second = splat(0.0F);
    for (Index m = 0; m < n; m += row_tile<P>) {
        first = fma(load(rows + m * row), splat(0.0F), first);
        second = fma(load(rows + m * row + width - W), splat(0.0F), second);
    }
    return all(first == second);
}
inline bool last_rows_are_finite(Index n, Index width, const float* rows) {
    F first = splat(0.0F), second = splat(0.0F);
    for (Index end = n; end > 0; end = (end - 1) / MR * MR) {
        first = fma(load(rows + (end - 1) * width), splat(0.0F), first);
        second = fma(load(rows + end * width - W), splat(0.0F), second);
    }
    return all(first == second);
}

SOFTDELTA_INLINE Mask is_not_finite(F x) {
    return !(abs(x) <= splat(0x1.fffffep127F));
}

// Row i of a panel of B [n, width]: a vector of it is read, or replaced where `where` says.
inline F operand_row(const float* rows, Index width, Index i, Index m) {
    return load(rows + i * width + m);
}
inline F operand_row(const std::uint32_t* pairs, Index width, Index i, Index m) {
    const U words = load(pairs + i / 2 * width + m);
    return as_floats(i % 2 == 0 ? words << 16 : words & U(0xffff0000U));
}
inline void put_in_row(float* rows, Index width, Index i, Index m, Mask where, F x) {
    float* to = rows + i * width + m;
    store(to, select(where, x, load(to)));
}
inline void put_in_row(std::uint32_t* pairs, Index width, Index i, Index m, Mask where, F x) {
    std::uint32_t* to = pairs + i / 2 * width + m;
    const U own = as_words(x) & U(0xffff0000U);
    const U words = load(to);
    const U put = i % 2 == 0 ? (words & U(0xffff0000U)) | (own >> 16) : (words & U(0x0000ffffU)) | own;
    store(to, as_words(select(where, as_floats(put), as_floats(words))));
}

// Which rows of a column depend on a value of it that is not finite: those from the first such row on, or those up to
// the last one.
class NonfiniteRows {
  public:
    explicit NonfiniteRows(Index width) : width_(width) {}

    // Zeros for these values in rows [n, width]. forward: rows from the first on depend on them.
    template <class T>
    void clear(Index n, T* rows, bool forward) {
        forward_ = forward;
        for (Index m = 0; m < width_; m += W) {
            F edge = splat(forward ? static_cast<float>(n) : -1.0F);
            for (Index i = 0; i < n; ++i) {
                const Mask bad = is_not_finite(operand_row(rows, width_, i, m));
                const F own = select(bad, splat(static_cast<float>(i)), edge);
                edge = forward ? min(edge, own) : max(edge, own);
                put_in_row(rows, width_, i, m, bad, splat(0.0F));
                bad_[i][m / W] = bad;
            }
            edge_[m / W] = edge;
        }
    }

    // NaN in rows [n, width] that depend on them.
    void spread(Index n, float* rows, Index row) const {
        for (Index i = 0; i < n; ++i)
            for (Index m = 0; m < width_; m += W) {
                const F own = splat(static_cast<float>(i));
                const Mask reached = forward_ ? own >= edge_[m / W] : own <= edge_[m / W];
                store(rows + i * row + m, select(reached, splat(__builtin_nanf("")), load(rows + i * row + m)));
            }
    }

    // NaN for the values that were cleared, in the rows where they were.
    template <class T>
    void put_back(Index n, T* rows) const {
        for (Index i = 0; i < n; ++i)
            for (Index m = 0; m < width_; m += W)
                put_in_row(rows, width_, i, m, bad_[i][m / W], splat(__builtin_nanf("")));
    }

  private:
    Index width_;
    bool forward_ = true;
    F edge_[NR_vectors];
    Mask bad_[largest_chunk][NR_vectors];
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
