// The forward pass of a few heads on many threads: windows of chunks are folded, chunk beside chunk, and scanned, value
// columns beside value columns. While a window is scanned the next one is folded.
//
//     scan            window 0    window 1    window 2
//     fold  window 0  window 1    window 2
//
// How many value columns are scanned together depends on the number of threads; no sum runs over them.
#pragma once

#include "core/parallel.h"
#include "engines/cpu/delta_rule/call.h"

namespace softdelta::cpu {

class DeltaSplitPass {
  public:
    // Whether heads are so few and tokens so many that threads would wait for each other longer than this takes more.
    // Sums are the same.
    static bool pays(const DeltaCall& call, const kernels::DeltaSplit& kernel, const core::DeltaOutputs& out,
                     int threads);

    DeltaSplitPass(const DeltaCall& call, const kernels::DeltaSplit& kernel, const core::DeltaOutputs& out,
                   int threads);

    std::size_t bytes() const;
    void run(std::byte* memory) const;

  private:
    Index ranges() const { return heads_ * parts_; }
    // One worker folds a window after it has scanned the one before.
    Index windows_at_once() const { return team_.workers > 1 ? 2 : 1; }
    void fold(Index window, Index unit, std::byte* memory, std::byte* scratch) const;
    void scan(Index window, Index unit, std::byte* memory, std::byte* scratch) const;
    std::byte* scratch(std::byte* memory, int thread) const;
    std::byte* state(std::byte* memory, Index range) const;
    std::byte* folded(std::byte* memory, Index window, Index value_head) const;  // of all sequences' heads

    const DeltaCall& call_;
    const kernels::DeltaSplit& kernel_;
    const core::DeltaOutputs& out_;
    kernels::DeltaHeads largest_;
    kernels::DeltaSplitSizes sizes_;
    Index heads_;            // value heads of all sequences
    Index window_;           // chunks
    Index columns_, parts_;  // of a range; ranges of value columns of a head
    core::Team team_;
};

}  // namespace softdelta::cpu
