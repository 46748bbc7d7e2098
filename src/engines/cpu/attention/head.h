// One key head of one sequence of a call, as the kernels see it.
#pragma once

#include <algorithm>

#include "core/attention.h"
#include "core/execution.h"
#include "engines/cpu/kernels/table.h"

namespace softdelta::cpu {

using core::Index;
using core::Tensor;

constexpr Index ceil_divide(Index a, Index b) {
    return (a + b - 1) / b;
}

// Sizes of a sequence's heads and which keys position lets rows see: query i sees keys [i + left, i + right].
struct AttentionOutline {
    Index queries, keys, group, left, right, top_w;
    Index rows() const { return group * queries; }
};

class AttentionHeads {
  public:
    AttentionHeads(const core::AttentionInputs& in, const core::AttentionOptions& options,
                   const core::Execution& execution, const kernels::Table& table, const Tensor* d_o = nullptr);

    Index sequences() const { return core::sequence_count(in_); }
    Index key_heads() const { return in_.k.shape[2]; }
    Index group() const { return in_.q.shape[2] / in_.k.shape[2]; }
    Index longest_keys() const { return longest_keys_; }
    Index most_rows() const { return longest_queries_ * group(); }  // rows of a head

    core::AttentionSequence sequence(Index n) const { return core::sequence(in_, n); }
    AttentionOutline outline(const core::AttentionSequence& s) const {
        const Index diagonal = options_.shift + (ends_meet_ ? s.k_count - s.q_count : 0);
        return {s.q_count,
                s.k_count,
                common_.group,
                std::max(diagonal + left_, -unbounded),
                std::min(diagonal + right_, unbounded),
                options_.top_w};
    }
    AttentionOutline outline(Index n) const { return outline(sequence(n)); }
    kernels::AttentionHead head(const core::AttentionSequence& s, Index key_head) const {
        kernels::AttentionHead head = common_;
        place(head, s, outline(s), key_head);
        return head;
    }
    kernels::AttentionHead head(Index n, Index key_head) const { return head(sequence(n), key_head); }
    // What all heads of the decode kernel have: it reads pairs of bf16 where they lie, so that pairs cost nothing to
    // make.
    kernels::AttentionHead decode_head() const;
    // Makes one of them, or the head of another sequence, that of this sequence.
    void place(kernels::AttentionHead& head, const core::AttentionSequence& s, const AttentionOutline& sizes,
               Index key_head) const;

    // The same for the key head after that of `before`.
    void place_next(kernels::AttentionHead& head, const kernels::AttentionHead& before,
                    const core::AttentionSequence& s, Index key_head) const;

    // A head with the most rows and keys of any: for what depends on sizes alone.
    kernels::AttentionHead largest() const;

    // Rows of a tensor shaped as q: o, do, dq.
    kernels::QueryRows query_rows(const Tensor& t, const core::AttentionSequence& s, Index key_head) const;
    // Rows of a tensor shaped as k: v, dk, dv.
    kernels::KeyRows key_rows(const Tensor& t, const core::AttentionSequence& s, Index key_head) const;
    // A tensor shaped as lse [B, H, Lq].
    kernels::Plane row_values(const Tensor& t, const core::AttentionSequence& s, Index key_head) const;
    // A tensor [H]: a sink or a slope for each query head.
    kernels::Plane head_values(const Tensor& t, Index key_head) const;
    // A mask or bias, or its gradient.
    kernels::Plane plane(const Tensor& t, const core::AttentionSequence& s, Index key_head) const;

  private:
    // Mask, bias, sink and slopes.
    void place_addends(kernels::AttentionHead& head, const core::AttentionSequence& s, Index key_head) const;
    // Where k or v of a sequence's head begins, and its scales.
    void place(kernels::KeyRows& rows, const Tensor& t, const Tensor& scale, const core::AttentionSequence& s,
               Index key_head) const;

    const core::AttentionInputs& in_;
    const core::AttentionOptions& options_;
    kernels::AttentionHead common_;  // what all heads have: a call of many short sequences makes one after the other
    bool decode_bf16_products_;
    Index q_step_, k_step_, v_step_;  // bytes from a key head to the next
    bool has_addends_;
    static constexpr Index unbounded = Index{1} << 60;  // farther than any key; small enough to be added to positions
    bool ends_meet_;      // on the diagonal the last query has the last key, else the first the first
    Index left_, right_;  // from the diagonal to the first and the last key that a query sees
    Index longest_queries_ = 0, longest_keys_ = 0;
};

}  // namespace softdelta::cpu
