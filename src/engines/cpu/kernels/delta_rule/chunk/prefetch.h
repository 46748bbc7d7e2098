// Rows that the next piece of work reads, fetched while products run.
#pragma once

#include "engines/cpu/kernels/delta_rule/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

class Prefetch : public PrefetchList {
  public:
    using PrefetchList::add;

    // Rows of `columns` neighbours of a tensor; rows whose elements lie apart are left alone.
    void add(const DeltaRows& t, const Tokens& at, Index columns) {
        if (t.data == nullptr || t.column != 1 || at.n == 0) return;
        const Index size = static_cast<Index>(core::size_of(t.dtype));
        add(row_at(t, at.head, at.begin, 1).data, t.row * size, columns * size, at.n);
    }

    // Memory in one piece.
    void add(const void* data, Index bytes) { add(data, 0, bytes, 1); }
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
