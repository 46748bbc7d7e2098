// The units of work of a forward pass. A sequence of many rows is cut into blocks of rows, one of few rows (decode)
// into ranges of keys whose partial softmaxes are combined in order. A batch may have both: prefill and decode. Ranges
// depend on the sequence's own lengths and on sizes alone, blocks of rows on the threads and the other sequences, too.
#pragma once

#include <cstddef>

#include "core/parallel.h"
#include "engines/cpu/attention/head.h"
#include "engines/cpu/kernels/range.h"
#include "engines/cpu/kernels/table.h"

namespace softdelta::cpu {

// How a sequence is cut.
struct AttentionCut {
    bool by_keys;         // ranges of keys, for several key heads together; else blocks of rows, for each key head
    bool decode;          // by_keys, and computed by the decode kernel
    Index pieces;         // ranges or blocks
    Index size;           // keys of a range or rows of a block
    Index first;          // key of the first range
    Index rows;           // of a head
    kernels::Range seen;  // keys that some row may see by position, from a multiple of the kernel's key_step on
};

class AttentionPlan {
  public:
    AttentionPlan(const AttentionHeads& heads, const kernels::Table& table, int threads);

    AttentionCut cut(const AttentionOutline& outline) const;
    Index units(const AttentionCut& cut) const { return cut.pieces * (cut.by_keys ? key_groups_ : key_heads_); }

    Index unit_heads() const { return unit_heads_; }      // key heads of a unit that is a range of keys
    Index key_groups() const { return key_groups_; }      // groups of key heads
    bool has_blocks() const { return has_blocks_; }       // some sequence is cut into blocks of rows
    bool combines() const { return combines_; }           // whether a sequence has several ranges
    Index partial_rows() const { return partial_rows_; }  // of a head, those of all ranges of all sequences
    const core::Team& team() const { return team_; }
    // Memory of one thread in bytes.
    std::size_t thread_bytes() const { return thread_bytes_; }

    // At least the counts of every plan within limits: rows of partial softmaxes, bytes of a thread.
    struct Bound {
        Index partial_rows;
        std::size_t thread_bytes;
    };
    Bound bound(kernels::AttentionHead head, const kernels::Table& table, const core::Limits& limits) const;

  private:
    Index range(Index keys) const;
    // Of all sequences: units, and the most rows of one.
    struct Counts {
        Index blocks = 0, ranges = 0;
        Index rows = 0, decoded_rows = 0;
        Index partial_rows = 0;
        bool combines = false;
    };
    Counts choose_block_rows(const AttentionHeads& heads, const kernels::AttentionForward& kernel, Index threads);
    Counts count(const AttentionHeads& heads) const;

    Index key_heads_, key_groups_, unit_heads_;
    Index parts_;           // ranges of a sequence, at most
    Index decode_rows_;     // most rows for the decode kernel
    Index block_rows_ = 0;  // at most
    Index tile_rows_;       // a block's rows are a multiple of them
    Index partial_rows_ = 0;
    bool combines_ = false, has_blocks_ = false;
    core::Team team_;
    std::size_t thread_bytes_ = 0;
};

}  // namespace softdelta::cpu
