// A folded chunk over a range of value columns: values in, the scan, o out.
#pragma once

#include "kernels/delta_rule_prepare.h"
#include "kernels/delta_rule_scan.h"
#include "kernels/delta_rule_states.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

constexpr Index smaller(Index a, Index b) {
    return a < b ? a : b;
}

// Fewer rows cost less in pairs. Of bf16 they cost digits: every chunk multiplies with a rounded copy of the state.
template <class P>
constexpr Index most_forward_rows = P::depth == 1 ? 32 : largest_chunk;

template <class P>
ChunkSizes<P> forward_sizes(const DeltaHeads& heads) {
    return {heads.key_size, heads.value_size, smaller(heads.tokens, most_forward_rows<P>)};
}

template <class P>
class ForwardChunk {
  public:
    ForwardChunk(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& scratch)
        : heads_(heads),
          columns_(sizes.value_columns()),
          o_(scratch.take<float>(sizes.rows * columns_)),
          stage_(scratch.take<float>(columns_)) {}

    Range all_columns() const { return {0, columns_}; }
    float* stage() const { return stage_; }  // [V], free between chunks

    // part: value columns from a multiple of panel_width on.
    void run(const Tokens& at, const Folded<P>& folded, const float* beta, Range part, const StatePanels<P>& state,
             const DeltaOutput& out, Prefetch& ahead) {
        const Index width = smaller(part.end, heads_.value_size) - part.begin;
        const auto v = [&](Index i) { return from_column(heads_.v, at.head, at.begin + i, part.begin); };
        const auto o = [&](Index i) { return from_column(out.o, at.head, at.begin + i, part.begin); };
        load_values(at.n, width, v, beta, stage_, part, state);
        const bool direct =
            out.o.data != nullptr && out.o.dtype == DType::f32 && out.o.column == 1 && columns_ == heads_.value_size;
        if (direct)
            return scan(heads_.erases(), folded, heads_.key_size, part, state,
                        static_cast<float*>(const_cast<void*>(o(0).data)) - part.begin, out.o.row, ahead);
        scan(heads_.erases(), folded, heads_.key_size, part, state, o_, columns_, ahead);
        if (out.o.data == nullptr) return;
        for (Index i = 0; i < at.n; ++i) {
            const Row to = o(i);
            store_row(o_ + i * columns_ + part.begin, width, const_cast<void*>(to.data), to.dtype, to.step);
        }
    }

  private:
    static Row from_column(const DeltaRows& t, Index head, Index i, Index column) {
        const Row row = row_at(t, head, i, t.column);
        const Index bytes = column * t.column * static_cast<Index>(core::size_of(t.dtype));
        return {static_cast<const std::byte*>(row.data) + bytes, row.dtype, row.step};
    }

    const DeltaHeads& heads_;
    Index columns_;
    float* o_;      // [n, V]
    float* stage_;  // [V]
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
