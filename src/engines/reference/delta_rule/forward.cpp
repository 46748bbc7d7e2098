// The forward pass of the delta rules: one (sequence, value head) after another, token by token.
#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "engines/reference/delta_rule/fold.h"
#include "engines/reference/delta_rule/state.h"
#include "engines/reference/delta_rule/step.h"
#include "engines/reference/reference.h"
#include "engines/work.h"

namespace softdelta::reference {

namespace {

constexpr Index segment_tokens = 64;

// Where the chunks of each sequence begin in the second dimension of `states`.
std::vector<Index> first_chunks(const core::DeltaInputs& in, Index interval) {
    std::vector<Index> first(static_cast<std::size_t>(core::sequence_count(in)));
    Index next = 0;
    for (std::size_t n = 0; in.cu_seqlens && n < first.size(); ++n) {
        first[n] = next;
        next += (core::sequence(in, static_cast<Index>(n)).count + interval - 1) / interval;
    }
    return first;
}

// The work of one thread and its memory.
class Forward {
  public:
    Forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaOutputs& out,
            const std::vector<Index>& first_chunk)
        : in_(in),
          options_(options),
          out_(out),
          initial_state_(keys_first(in.initial_state, options.state_v_first)),
          final_state_(keys_first(out.final_state, options.state_v_first)),
          states_(keys_first(out.states, options.state_v_first)),
          first_chunk_(first_chunk),
          interval_(options.state_interval * options.steps),
          steps_(steps_of(options.rule.erase)),
          state_(in.q.shape[3], in.v.shape[3]),
          keys_(segment_tokens, in.q.shape[3]),
          values_(segment_tokens, in.q.shape[3], in.v.shape[3]),
          o_(values_.v),
          u_(values_.v) {}

    // A unit is one value head of one sequence.
    void operator()(Index unit) {
        const Index value_heads = in_.v.shape[2], n = unit / value_heads, head = unit % value_heads;
        const core::DeltaSequence sequence = core::step_sequence(in_, options_, n);
        if (sequence.is_padding) return clear(sequence, first_chunk_[static_cast<std::size_t>(n)], head);
        state_.load(sequence.state < 0 ? core::Tensor{} : initial_state_, sequence.state, head);
        for (Index t = 0; t < sequence.count; t += segment_tokens)
            run({sequence.batch, sequence.begin + t, std::min(segment_tokens, sequence.count - t)}, t,
                first_chunk_[static_cast<std::size_t>(n)], head);
        if (sequence.final_state >= 0) state_.store(final_state_, sequence.final_state, head);
    }

  private:
    // Where there is no sequence: o and u are 0, and so are the states that are returned.
    void clear(const core::DeltaSequence& sequence, Index first_chunk, Index head) {
        std::fill(o_.begin(), o_.end(), 0.0);
        for (const core::Tensor* rows : {&out_.o, &out_.u})
            for (Index t = 0; *rows && t < sequence.count; t += segment_tokens)
                store_values(*rows, {sequence.batch, sequence.begin + t, std::min(segment_tokens, sequence.count - t)},
                             head, o_, rows == &out_.o ? options_.steps : 1);
        state_.load({}, 0, 0);
        for (Index t = 0; states_ && t < sequence.count; t += interval_)
            for (Index tile = 0; tile < state_.tiles(); ++tile)
                store_tile(states_, states_.offset({sequence.batch, first_chunk + t / interval_, head}), tile,
                           state_.tile(tile));
    }

    // A segment that begins at row `position` of its sequence.
    void run(const Segment& segment, Index position, Index first_chunk, Index head) {
        const Index K = in_.q.shape[3], V = in_.v.shape[3];
        fold_keys(in_, options_, segment, core::key_head_of(in_, options_, head), keys_);
        fold_values(in_, options_, segment, head, values_);
        for (Index tile = 0; tile < state_.tiles(); ++tile) {
            double* S = state_.tile(tile);
            for (Index t = 0; t < segment.count; ++t) {
                if ((position + t) % interval_ == 0)
                    keep(segment.batch, first_chunk + (position + t) / interval_, head, tile, S);
                steps_.forward(K, token_at(in_, keys_, values_, t, tile), S,
                               o_.data() + t * columns_of(V) + tile * tile_columns,
                               u_.data() + t * columns_of(V) + tile * tile_columns);
            }
        }
        if (out_.o) store_values(out_.o, segment, head, o_, options_.steps);
        if (out_.u) store_values(out_.u, segment, head, u_);
    }

    // A state that is returned, or goes to the pool.
    void keep(Index batch, Index chunk, Index head, Index tile, const double* S) {
        if (states_) store_tile(states_, states_.offset({batch, chunk, head}), tile, S);
        if (!in_.snapshot_indices) return;
        const Index entry = core::load_index(in_.snapshot_indices, in_.snapshot_indices.offset({batch, chunk}));
        if (entry >= 0) store_tile(final_state_, final_state_.offset({entry, head}), tile, S);
    }

    const core::DeltaInputs& in_;
    const core::DeltaOptions& options_;
    const core::DeltaOutputs& out_;
    const core::Tensor initial_state_, final_state_, states_;  // [.., K, V]
    const std::vector<Index>& first_chunk_;
    const Index interval_;  // rows between the states that are returned
    const Steps& steps_;
    State state_;
    KeyRows keys_;
    ValueRows values_;
    std::vector<double> o_, u_;
};

}  // namespace

void delta_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, int threads,
                   const core::DeltaOutputs& out) {
    const std::vector<Index> first_chunk = first_chunks(in, options.state_interval);
    const core::Work work = engines::work_of(in, engines::Direction::forward);
    core::parallel_units(core::useful_threads(threads, work), core::sequence_count(in) * in.v.shape[2],
                         [&] { return Forward(in, options, out, first_chunk); });
}

}  // namespace softdelta::reference
