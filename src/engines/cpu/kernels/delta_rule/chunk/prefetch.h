// Rows that the next piece of work reads lie far apart in memory: they are asked for line by line while products run.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/gate.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

class Prefetch {
  public:
    // Rows of `columns` elements of a tensor that lie next to each other; others are left to themselves.
    void add(const DeltaRows& t, const Tokens& at, Index columns) {
        if (t.data == nullptr || t.column != 1 || at.n == 0) return;
        const Index size = static_cast<Index>(core::size_of(t.dtype));
        rows_[count_++] = {static_cast<const char*>(row_at(t, at.head, at.begin, 1).data), t.row * size,
                           (columns * size + line - 1) / line, at.n};
        lines_ += rows_[count_ - 1].lines * at.n;
    }

    // Memory in one piece.
    void add(const void* data, Index bytes) {
        rows_[count_++] = {static_cast<const char*>(data), 0, (bytes + line - 1) / line, 1};
        lines_ += rows_[count_ - 1].lines;
    }

    Index lines() const { return lines_; }

    void next(Index lines) {
        while (lines > 0 && which_ < count_) {
            const Rows& x = rows_[which_];
            const Index n = lines < x.lines - line_ ? lines : x.lines - line_;
            const char* first = x.data + row_ * x.row + line_ * line;
            for (Index i = 0; i < n; ++i) __builtin_prefetch(first + i * line, 0, 3);
            lines -= n;
            line_ += n;
            if (line_ < x.lines) return;
            line_ = 0;
            if (++row_ < x.count) continue;
            row_ = 0;
            ++which_;
        }
    }

  private:
    static constexpr Index line = 64;  // bytes of a cache line
    struct Rows {
        const char* data;
        Index row, lines, count;
    };
    Rows rows_[6];  // k, p, v, g, and two of q, d_o, saved state, saved U
    Index count_ = 0, lines_ = 0;
    Index which_ = 0, row_ = 0, line_ = 0;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
