// Heads of one sequence of a call as the kernels see them.
#pragma once

#include "core/delta_rule.h"
#include "core/execution.h"
#include "engines/cpu/kernels/table.h"

namespace softdelta::cpu {

using core::Index;
using core::Tensor;

class DeltaCall {
  public:
    DeltaCall(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
              const kernels::Table& table);

    Index sequences() const { return core::sequence_count(in_); }
    core::DeltaSequence sequence(Index n) const { return core::sequence(in_, n); }
    // Of a sequence, or where a token has several steps their rows: kernels take each for a token.
    Index tokens(Index sequence) const { return core::step_sequence(in_, options_, sequence).count; }
    // Of a call whose groups are cut in parts, each part is a key head.
    Index key_heads() const { return in_.q.shape[2] * parts_; }
    Index value_heads() const { return in_.v.shape[2]; }
    Index group() const { return value_heads() / key_heads(); }
    // The same call for so many threads: where key heads are few, their value heads in parts, each with the keys once
    // more.
    DeltaCall in_parts(int threads) const;
    Index parts() const { return parts_; }  // of a group
    // Whether value heads of a key head lie key_heads() apart, and not side by side. A unit then has one key head,
    // whose value heads have a stride again.
    bool tiled() const { return options_.head_order == core::HeadOrder::tiled && value_heads() > in_.q.shape[2]; }
    // Where value head hv stands when those of each key head are neighbours.
    Index place_of(Index hv) const {
        const Index all = in_.q.shape[2];
        return tiled() ? hv % all * (value_heads() / all) + hv / all : hv;
    }

    // Key heads of a unit of work: heads side by side share pages of memory, row after row of them.
    Index unit_key_heads() const;
    // The same for a pass by so many threads. No sum reaches over heads: results are the same.
    Index unit_key_heads(int threads, bool all_are_steps = false) const;

    // `count` key heads from h on with their value heads.
    kernels::DeltaHeads heads(Index sequence, Index h, Index count) const {
        return heads(core::sequence(in_, sequence), h, count);
    }
    kernels::DeltaHeads heads(const core::DeltaSequence& s, Index h, Index count) const {
        kernels::DeltaHeads heads = largest(count);
        place(heads, s, h);
        return heads;
    }
    kernels::DeltaOutput output(const core::DeltaOutputs& out, Index sequence, Index h) const;
    // Makes the heads of another sequence, or largest(count), those of this sequence from h on.
    void place(kernels::DeltaHeads& heads, const core::DeltaSequence& s, Index h) const;
    // The results of a sequence that is a step: o and the final state, which are placed as the heads are.
    kernels::DeltaOutput step_output(const core::DeltaOutputs& out) const;
    void place(kernels::DeltaOutput& output, const core::DeltaOutputs& out, const core::DeltaSequence& s,
               Index h) const;
    kernels::DeltaGradients gradients(const core::DeltaGradients& grad, Index sequence, Index h) const;

    // Whether states at intervals are wanted: returned, or written to the pool.
    bool wants_states(const core::DeltaOutputs& out) const { return out.states || in_.snapshot_indices; }
    // Whether the forward pass kept what the backward pass reads.
    bool keeps(const core::DeltaGradients& grad) const {
        return grad.states && grad.u && state_interval() <= kernels::most_kept_interval;
    }
    Index state_interval() const { return options_.state_interval * options_.steps; }

    // Whether there is no such sequence; then o and u become 0, and states that are returned, of `count` key heads from
    // h on.
    bool is_padding(Index sequence) const { return core::sequence(in_, sequence).is_padding; }
    void clear(const core::DeltaOutputs& out, Index sequence, Index h, Index count) const;

    // Whether the sequence is a few tokens on states that stay where they are (decode). That depends on it alone, so
    // that neighbours change no bit of it.
    bool is_step(const kernels::DeltaStep& kernel, const core::DeltaOutputs& out, const core::DeltaSequence& s) const;
    // Of all sequences.
    struct Steps {
        bool all = true;        // whether all are, but for padding
        Index most_tokens = 0;  // of one that is
    };
    Steps steps(const kernels::DeltaStep& kernel, const core::DeltaOutputs& out) const;
    // Bytes of scratch memory for steps by `count` key heads.
    std::size_t step_scratch(const kernels::DeltaStep& kernel, Index most_tokens, Index count) const;

    // Tokens when so many threads take the key heads of all sequences, one after the other.
    struct Shares {
        Index all, longest, busiest;  // of all heads, of the longest, and of the thread that has most
    };
    Shares shares(Index threads) const;

    // The most key heads of a unit, in any call with these heads.
    Index most_unit_key_heads() const;

    // `count` key heads with the most tokens of any: for what depends on sizes alone.
    kernels::DeltaHeads largest(Index count) const;

  private:
    // What tells steps from other sequences: all but tokens, and whether there are states, is the same for all.
    struct StepForm {
        kernels::DeltaHeads heads;
        kernels::DeltaOutput output;
        void *initial_state, *final_state;  // of a sequence that has some
    };
    StepForm step_form(const core::DeltaOutputs& out) const;
    bool is_step(const kernels::DeltaStep& kernel, const core::DeltaOutputs& out, StepForm& form,
                 const core::DeltaSequence& s) const;
    // At most `most`, while there are so many units.
    Index key_heads_of_unit(Index most, Index units) const;
    // Of `states`, those of earlier sequences in the same batch row.
    Index intervals_before(Index sequence) const;
    // The first value head of key head h, and from each of its value heads to the next.
    Index first_value_head(Index h) const {
        return tiled() ? h / parts_ + h % parts_ * group() * value_head_step() : h * group();
    }
    Index value_head_step() const { return tiled() ? in_.q.shape[2] : 1; }
    // Rows of a tensor [B, nT, heads, ·] or [B, nT, heads] from key head h on, or from its value heads. Of [B, T, ..]
    // those of the first or of the last of a token's steps.
    enum class Of { steps, first_steps, last_steps };
    kernels::DeltaRows rows_like(const Tensor& t, Index step, Of of) const;  // how they lie, of every step-th head
    // Where they begin: strides in bytes. Not given: null.
    struct Place {
        Place() = default;
        Place(const Tensor& t, Index steps);
        void* at(const core::DeltaSequence& s, Index h) const {
            return first + s.batch * batch + s.begin * token + h * head;
        }

        std::byte* first = nullptr;
        Index batch = 0, token = 0, head = 0;
    };
    Place place_of(const Tensor& t, const kernels::DeltaRows& rows) const;
    kernels::DeltaRows rows(const Tensor& t, const core::DeltaSequence& s, Index h, Of of = Of::steps) const;
    kernels::DeltaRows value_rows(const Tensor& t, const core::DeltaSequence& s, Index h, Of of = Of::steps) const;
    // A tensor [heads] or, with channels, [heads·channels].
    kernels::DeltaRows parameters(const Tensor& t, Index h, Index channels) const;
    kernels::DeltaStates states(const Tensor& t, Index first, Index h) const;
    void place(kernels::DeltaStates& states, const Tensor& t, Index entry, Index h) const;

    const core::DeltaInputs& in_;
    const core::DeltaOptions& options_;
    Index parts_ = 1;             // of a group
    kernels::DeltaHeads common_;  // what all heads have, and the most tokens
    Place q_, k_, p_, v_, g_, beta_;
};

}  // namespace softdelta::cpu
