// One key head of one sequence of a call, as the kernels see it.
#pragma once

#include "core/attention.h"
#include "core/execution.h"
#include "engines/cpu/kernels/table.h"

namespace softdelta::cpu {

using core::Index;
using core::Tensor;

class AttentionHeads {
  public:
    AttentionHeads(const core::AttentionInputs& in, const core::AttentionOptions& options,
                   const core::Execution& execution, const kernels::Table& table, const Tensor* d_o = nullptr);

    Index sequences() const { return core::sequence_count(in_); }
    Index key_heads() const { return in_.k.shape[2]; }
    Index group() const { return in_.q.shape[2] / in_.k.shape[2]; }
    Index longest_keys() const { return longest_keys_; }
    Index most_rows() const { return longest_queries_ * group(); }  // rows of a head

    // Sizes of a sequence's heads and which keys position lets rows see; no operands.
    kernels::AttentionHead outline(Index sequence) const { return outline(core::sequence(in_, sequence)); }
    kernels::AttentionHead head(Index sequence, Index key_head) const;
    // The same for the decode kernel: it reads pairs of bf16 where they lie, so that pairs cost nothing to make.
    kernels::AttentionHead decode_head(Index sequence, Index key_head) const;

    // A head with the most rows and keys of any: for what depends on sizes alone.
    kernels::AttentionHead largest() const;

    // Rows of a tensor shaped as q: o, do, dq.
    kernels::QueryRows query_rows(const Tensor& t, Index sequence, Index key_head) const {
        return query_rows(t, core::sequence(in_, sequence), key_head);
    }
    // Rows of a tensor shaped as k: v, dk, dv.
    kernels::KeyRows key_rows(const Tensor& t, Index sequence, Index key_head) const {
        return key_rows(t, core::sequence(in_, sequence), key_head);
    }
    // A tensor shaped as lse [B, H, Lq].
    kernels::Plane row_values(const Tensor& t, Index sequence, Index key_head) const;
    // A tensor [H]: a sink or a slope for each query head.
    kernels::Plane head_values(const Tensor& t, Index key_head) const;
    // A mask or bias, or its gradient.
    kernels::Plane plane(const Tensor& t, Index sequence, Index key_head) const {
        return plane(t, core::sequence(in_, sequence), key_head);
    }

  private:
    kernels::AttentionHead outline(const core::AttentionSequence& s) const;
    kernels::QueryRows query_rows(const Tensor& t, const core::AttentionSequence& s, Index key_head) const;
    kernels::KeyRows key_rows(const Tensor& t, const core::AttentionSequence& s, Index key_head,
                              const Tensor& scale = {}) const;
    kernels::Plane plane(const Tensor& t, const core::AttentionSequence& s, Index key_head) const;

    const core::AttentionInputs& in_;
    const core::AttentionOptions& options_;
    bool bf16_products_, decode_bf16_products_;
    Index longest_queries_ = 0, longest_keys_ = 0;
};

}  // namespace softdelta::cpu
