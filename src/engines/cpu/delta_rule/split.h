// The forward pass of a few heads on many threads: windows of chunks are folded, chunk beside chunk, and scanned, value
// columns beside value columns. While a window is scanned the next one is folded.
//
//     scan            window 0    window 1    window 2
//     fold  window 0  window 1    window 2
//
// A range of columns waits for the chunks of its head alone, and for itself; a chunk for those who have read what lay
// in its memory.
//
// A sequence that is a few tokens on states that stay where they are is a unit of its own, as everywhere.
//
// How many value columns are scanned together depends on the number of threads; no sum runs over them.
#pragma once

#include <atomic>

#include "core/parallel.h"
#include "engines/cpu/delta_rule/call.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::cpu {

class DeltaSplitPass {
  public:
    // Whether threads without a head of their own would lose more time than sharing heads costs. Results have the same
    // bits.
    static bool pays(const DeltaCall& call, const kernels::Table& table, const core::DeltaOutputs& out, int threads);

    DeltaSplitPass(const DeltaCall& call, const kernels::Table& table, const core::DeltaOutputs& out, int threads);

    std::size_t bytes() const;
    void run(std::byte* memory);

    // Bytes that are enough for all calls within limits, whose steps need so many for a thread.
    static std::size_t bound(const DeltaCall& call, const kernels::Table& table, int threads,
                             const core::Limits& limits, std::size_t step_scratch);

  private:
    static constexpr Index windows_at_once = 2;

    Index ranges() const { return heads_ * parts_; }
    Index key_units() const { return call_.sequences() * call_.key_heads(); }
    Index windows() const;
    void take(kernels::Scratch& memory);
    void fold(Index window, Index unit, std::byte* scratch) const;
    void fold_chunk(Index window, Index chunk, Index key_unit, std::byte* scratch) const;
    void scan(Index window, Index range, std::byte* scratch) const;
    void scan_columns(Index window, Index range, std::byte* scratch) const;
    std::byte* folded(Index window, Index value_head) const;  // of all sequences' heads

    const DeltaCall& call_;
    const kernels::DeltaSplit& kernel_;
    const kernels::DeltaStep& step_;
    const core::DeltaOutputs& out_;
    kernels::DeltaHeads largest_;
    kernels::DeltaSplitSizes sizes_;
    std::size_t thread_bytes_;
    Index heads_;            // value heads of all sequences
    Index window_;           // chunks
    Index columns_, parts_;  // of a range; ranges of value columns of a head
    core::Team team_;
    std::byte *scratch_ = nullptr, *states_ = nullptr, *folded_ = nullptr;
    std::atomic<Index>* chunks_done_ = nullptr;   // [windows, key heads of all sequences] chunks that are folded
    std::atomic<Index>* windows_done_ = nullptr;  // [ranges] windows that are scanned
};

}  // namespace softdelta::cpu
