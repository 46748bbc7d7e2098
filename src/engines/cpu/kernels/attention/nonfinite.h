// Rows of a packed operand that hold an Inf or a NaN. A product multiplies them with probabilities of 0 too, of rows
// that do not see the key, and 0·∞ is NaN. Such a row is therefore cleared in the operand, and the pass adds it row by
// row where it is seen. Operands are tested once, when they are packed.
#pragma once

#include "engines/cpu/kernels/attention/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// The indices of such rows in an operand of at most `most` rows.
template <Index most>
struct NonfiniteRows {
    Index count = 0, rows[most];

    // Finds them in B, packed from `total` rows of n, and clears them there.
    template <class P, class Rows>
    void take_out(Index total, Index n, const Rows& row_at, Element<P>* b) {
        count = 0;
        if (all_finite(b, depth_of<P>(total) * round_up(n, W))) return;
        for (Index i = 0; i < total; ++i) {
            if (is_finite(row_at(i), n)) continue;
            clear_b_row<P>(i, total, n, b);
            rows[count++] = i;
        }
    }
};

// sum += factor·x, whole vectors around n floats.
SOFTDELTA_INLINE void add_scaled(float factor, const float* x, Index n, float* sum) {
    for (Index i = 0; i < n; i += W) store(sum + i, fma(splat(factor), load(x + i), load(sum + i)));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
