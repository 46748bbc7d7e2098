// The backward pass of the delta rules. The states of a segment of tokens are recomputed from the one at its start, so
// memory grows with √T. The value heads of a key head belong to one unit: dq, dk and dp are their sums, in order.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "engines/reference/delta_rule/fold.h"
#include "engines/reference/delta_rule/state.h"
#include "engines/reference/delta_rule/step.h"
#include "engines/reference/reference.h"
#include "engines/work.h"

namespace softdelta::reference {

namespace {

// Tokens of a segment: √T, so that the states kept within and at the start of segments balance.
Index tokens_of_segment(const core::DeltaInputs& in, const core::DeltaOptions& options) {
    Index longest = 0;
    for (Index n = 0; n < core::sequence_count(in); ++n)
        longest = std::max(longest, core::step_sequence(in, options, n).count);
    return std::max<Index>(64, static_cast<Index>(std::sqrt(static_cast<double>(longest))));
}

// The work of one thread and its memory.
class Backward {
  public:
    Backward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaGradients& grad,
             Index tokens, std::vector<GateSums>& sums)
        : in_(in),
          options_(options),
          grad_(grad),
          initial_state_(keys_first(in.initial_state, options.state_v_first)),
          dfinal_state_(keys_first(grad.dfinal_state, options.state_v_first)),
          dinitial_state_(keys_first(grad.dinitial_state, options.state_v_first)),
          K_(in.q.shape[3]),
          V_(in.v.shape[3]),
          group_(in.v.shape[2] / in.q.shape[2]),
          tokens_(tokens),
          sums_(sums),
          steps_(steps_of(options.rule.erase)),
          keys_(tokens, K_),
          dkeys_(tokens, K_),
          values_(tokens, K_, V_),
          dvalues_(tokens, K_, V_),
          d_o_(values_.v),
          states_(static_cast<std::size_t>(group_), State(K_, V_)),
          erased_states_(static_cast<std::size_t>(tokens * K_ * tile_columns)),
          erased_values_(static_cast<std::size_t>(tokens)) {}

    // A unit is one key head of one sequence.
    void operator()(Index unit) {
        const Index n = unit / in_.q.shape[2], key_head = unit % in_.q.shape[2];
        const core::DeltaSequence sequence = core::step_sequence(in_, options_, n);
        const Index segments = (sequence.count + tokens_ - 1) / tokens_;
        keep_segment_starts(sequence, segments, key_head);
        for (Index i = 0; i < group_; ++i) state(i).load(dfinal_state_, n, value_head(key_head, i));
        for (Index s = segments; s-- > 0;) {
            const Segment segment = segment_of(sequence, s);
            fold_keys(in_, options_, segment, key_head, keys_);
            dkeys_.clear();
            for (Index i = 0; i < group_; ++i) {
                const Index head = value_head(key_head, i);
                adjoin(segment, head, start(s, i), state(i),
                       sums_[static_cast<std::size_t>(n * in_.v.shape[2] + head)]);
            }
            unfold_keys(in_, options_, segment, key_head, dkeys_, grad_);
        }
        for (Index i = 0; i < group_; ++i) state(i).store(dinitial_state_, n, value_head(key_head, i));
    }

  private:
    Index value_head(Index key_head, Index i) const { return core::value_head_of(in_, options_, key_head, i); }

    Segment segment_of(const core::DeltaSequence& sequence, Index s) const {
        return {sequence.batch, sequence.begin + s * tokens_, std::min(tokens_, sequence.count - s * tokens_)};
    }

    // The running state of value head i of the group, or its gradient.
    State& state(Index i) { return states_[static_cast<std::size_t>(i)]; }
    // The state before segment s.
    State& start(Index s, Index i) { return starts_[static_cast<std::size_t>(s * group_ + i)]; }

    // Runs through the sequence once and keeps the state at every segment's start.
    void keep_segment_starts(const core::DeltaSequence& sequence, Index segments, Index key_head) {
        const auto needed = static_cast<std::size_t>(segments * group_);
        if (starts_.size() < needed) starts_.resize(needed, State(K_, V_));
        for (Index i = 0; i < group_; ++i) state(i).load(initial_state_, sequence.state, value_head(key_head, i));
        for (Index s = 0; s < segments; ++s) {
            const Segment segment = segment_of(sequence, s);
            fold_keys(in_, options_, segment, key_head, keys_);
            for (Index i = 0; i < group_; ++i) {
                start(s, i) = state(i);
                fold_values(in_, options_, segment, value_head(key_head, i), values_);
                for (Index tile = 0; tile < state(i).tiles(); ++tile) run(segment, tile, state(i).tile(tile));
            }
        }
    }

    void run(const Segment& segment, Index tile, double* S) {
        for (Index t = 0; t < segment.count; ++t)
            steps_.forward_and_keep(K_, token_at(in_, keys_, values_, t, tile), S, S, erased_values_[0]);
    }

    // The adjoint of one segment of one value head: dstate from its end to its start.
    void adjoin(const Segment& segment, Index head, State& start, State& dstate, GateSums& sums) {
        fold_values(in_, options_, segment, head, values_);
        if (grad_.d_o) load_values(grad_.d_o, segment, head, d_o_, options_.steps);
        dvalues_.clear();
        for (Index tile = 0; tile < dstate.tiles(); ++tile) adjoin(segment, tile, start.tile(tile), dstate.tile(tile));
        unfold_values(in_, options_, segment, head, dvalues_, grad_, sums);
    }

    void adjoin(const Segment& segment, Index tile, double* S, double* dS) {
        const auto erased_state = [this](Index t) { return erased_states_.data() + t * K_ * tile_columns; };
        const auto erased_value = [this](Index t) -> Columns& { return erased_values_[static_cast<std::size_t>(t)]; };
        for (Index t = 0; t < segment.count; ++t)
            steps_.forward_and_keep(K_, token_at(in_, keys_, values_, t, tile), S, erased_state(t), erased_value(t));
        for (Index t = segment.count; t-- > 0;)
            steps_.adjoint(K_, token_at(in_, keys_, values_, t, tile), erased_state(t), erased_value(t),
                           d_o_.data() + t * columns_of(V_) + tile * tile_columns, dS,
                           gradients_at(in_, dkeys_, dvalues_, t, tile));
    }

    const core::DeltaInputs& in_;
    const core::DeltaOptions& options_;
    const core::DeltaGradients& grad_;
    const core::Tensor initial_state_, dfinal_state_, dinitial_state_;  // [.., K, V]
    const Index K_, V_, group_, tokens_;
    std::vector<GateSums>& sums_;  // [N, HV]
    const Steps& steps_;
    KeyRows keys_, dkeys_;
    ValueRows values_, dvalues_;
    std::vector<double> d_o_;             // [tokens, columns]
    std::vector<State> states_;           // [group]
    std::vector<State> starts_;           // [segments, group]
    std::vector<double> erased_states_;   // [tokens, K, 16] E of one tile
    std::vector<Columns> erased_values_;  // [tokens] e of one tile
};

// Sums over the sequences, in order.
void store_sums(const std::vector<GateSums>& sums, Index value_heads, Index channels,
                const core::DeltaGradients& grad) {
    const auto store_sum = [&](const core::Tensor& t, Index i, Index head, auto&& part) {
        double total = 0;
        for (auto n = static_cast<std::size_t>(head); n < sums.size(); n += static_cast<std::size_t>(value_heads))
            total += part(sums[n]);
        if (t) store(t, t.offset({i}), total);
    };
    const core::GateParameters to = core::gate_parameters(grad);
    for (Index head = 0; head < value_heads; ++head) {
        store_sum(to.A_log, head, head, [](const GateSums& s) { return s.A_log; });
        store_sum(grad.dg_gamma, head, head, [](const GateSums& s) { return s.g_gamma; });
        for (Index i = 0; i < channels; ++i)
            store_sum(to.bias, head * channels + i, head,
                      [i](const GateSums& s) { return s.bias[static_cast<std::size_t>(i)]; });
    }
}

}  // namespace

void delta_backward(const core::DeltaInputs& in, const core::DeltaOptions& options, int threads,
                    const core::DeltaGradients& grad) {
    const Index N = core::sequence_count(in), HV = in.v.shape[2], channels = gate_channels(in, options);
    std::vector<GateSums> sums(static_cast<std::size_t>(N * HV));
    for (GateSums& s : sums) s.bias.resize(static_cast<std::size_t>(channels));
    const Index tokens = tokens_of_segment(in, options);
    const core::Work work = engines::work_of(in, engines::Direction::backward);
    core::parallel_units(core::useful_threads(threads, work), N * in.q.shape[2],
                         [&] { return Backward(in, options, grad, tokens, sums); });
    store_sums(sums, HV, channels, grad);
}

}  // namespace softdelta::reference
