// The intermediates of a delta rule that a caller may ask for, by name (docs/stages.md).
#pragma once

#include <string_view>
#include <vector>

#include "core/execution.h"
#include "engines/stages/delta_rule/scan.h"

namespace softdelta::stages::delta {

// Where a head's rows and states lie in the tensors of a call.
struct Place {
    core::DeltaSequence sequence;
    Index n;   // which sequence
    Index hv;  // value head
};

class Intermediates {
  public:
    // Throws core::InvalidArgument for a name or shape that does not exist. Both passes know all names.
    Intermediates(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution);

    bool wants(std::string_view name) const { return find(name) != nullptr; }
    bool wants_inverse() const { return wants("dw") || wants("dA") || wants("dL"); }

    template <class T>
    void report_forward(const Place& at, const Piece& piece, const Chunk<T>& c, const Folded<T>& f,
                        const Scan<T>& x) const;
    // What the scan gave, before the unfold uses it up; then what the unfold gave.
    template <class T>
    void report_backward(const Place& at, const Piece& piece, const ScanGradients<T>& dx,
                         const FoldedGradients<T>& d) const;
    template <class T>
    void report_unfolded(const Place& at, const Piece& piece, const FoldRule<T>& rule, const Chunk<T>& c,
                         const Folded<T>& f, const FoldedGradients<T>& d, const Unfolded<T>& u) const;

  private:
    const Tensor* find(std::string_view name) const;
    // Rows of [B, T, HV, columns] or [B, T, HV]; the rest of a row of pairs is 0.
    template <class T>
    void write_rows(std::string_view name, const Place& at, const Piece& piece, const Tile<T>& x) const;
    template <class T>
    void write_pairs(std::string_view name, const Place& at, const Piece& piece, const Tile<T>& x) const;
    // The state at the start or end of a chunk, [B, NT, HV, K, V].
    template <class T>
    void write_state(std::string_view name, const Place& at, const Piece& piece, const Tile<T>& x) const;
    template <class T>
    void report_gate(const Place& at, const Piece& piece, const FoldRule<T>& rule, const Chunk<T>& c,
                     const Folded<T>& f, const FoldedGradients<T>& d, const Unfolded<T>& u) const;

    const std::vector<core::Stage>& wanted_;
    Index chunk_size_;
    std::vector<Index> first_chunk_;  // [N] of each sequence in [NT]
    bool has_p_;
};

// For sequences packed in one row: how many intervals lie before each sequence. Else 0 for each.
std::vector<Index> count_intervals_before(const core::DeltaInputs& in, Index interval);

}  // namespace softdelta::stages::delta
