// The forward pass of a few heads on many threads: a window of chunks is folded, chunk beside chunk, then scanned,
// value columns beside value columns.
#pragma once

#include "engines/cpu/delta_rule/call.h"

namespace softdelta::cpu {

class DeltaSplitPass {
  public:
    // Whether heads are so few and tokens so many that this pays.
    static bool pays(const DeltaCall& call, const core::DeltaOutputs& out);

    DeltaSplitPass(const DeltaCall& call, const kernels::DeltaSplit& kernel, const core::DeltaOutputs& out,
                   int threads);

    std::size_t bytes() const;
    void run(std::byte* memory) const;

  private:
    void fold(Index first_chunk, std::byte* memory) const;
    void scan(Index first_chunk, std::byte* memory) const;
    std::byte* scratch(std::byte* memory, int thread) const;
    std::byte* folded(std::byte* memory, Index value_head) const;  // of all sequences' heads, one after the other
    std::byte* state(std::byte* memory, Index value_head) const;

    const DeltaCall& call_;
    const kernels::DeltaSplit& kernel_;
    const core::DeltaOutputs& out_;
    kernels::DeltaHeads largest_;
    kernels::DeltaSplitSizes sizes_;
    Index heads_;   // value heads of all sequences
    Index window_;  // chunks
    Index parts_;   // ranges of value columns
    int threads_;
};

}  // namespace softdelta::cpu
