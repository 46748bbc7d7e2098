// The delta rules in chunk form: fold, scan, unfold over the pieces of each sequence and head. A unit of work is a
// sequence and key head with the value heads of its group, one after the other, so that group sums have one order.
#include <type_traits>

#include "core/parallel.h"
#include "engines/stages/delta_rule/intermediates.h"
#include "engines/stages/delta_rule/scan.h"
#include "engines/stages/stages.h"
#include "engines/work.h"

namespace softdelta::stages {

namespace delta {

namespace {

// One call, shared by all threads.
template <class T>
struct Call {
    const core::DeltaInputs& in;
    const core::DeltaOptions& options;
    const core::Execution& execution;
    Intermediates intermediates;
    FoldRule<T> rule;
    Index sequences, heads, value_heads;

    Call(const core::DeltaInputs& inputs, const core::DeltaOptions& chosen, const core::Execution& how)
        : in(inputs),
          options(chosen),
          execution(how),
          intermediates(inputs, chosen, how),
          rule{static_cast<T>(chosen.scale), chosen.rule.erases(),
               chosen.rule.erase == core::Erase::from_previous_state, how.shortcuts},
          sequences(core::sequence_count(inputs)),
          heads(inputs.q.shape[2]),
          value_heads(inputs.v.shape[2]) {}

    Index group() const { return value_heads / heads; }

    // Streams of random numbers: of value heads, then key heads, then sums over tokens.
    Rounding rounding(Index stream) const {
        const std::uint64_t seed = std::is_same_v<T, float> ? execution.rounding_seed : 0;
        return {seed, static_cast<std::uint64_t>(stream), in.q.dtype};
    }
    Rounding rounding_of_value_head(const Place& at) const { return rounding(at.n * value_heads + at.hv); }
    Rounding rounding_of_key_head(Index n, Index h) const { return rounding(sequences * value_heads + n * heads + h); }
    Rounding rounding_of_sums(Index hv) const { return rounding(sequences * (value_heads + heads) + hv); }
};

// A state [K, V] in a tensor whose last two dimensions are K, V, or V, K; `offset` is that of its first element.
template <class T>
void load_state(const Tensor& t, Index offset, bool v_first, Tile<T>& state) {
    const int k = v_first ? t.rank - 1 : t.rank - 2, v = v_first ? t.rank - 2 : t.rank - 1;
    for (Index i = 0; i < state.rows(); ++i)
        core::load_row(t, offset + i * t.stride[static_cast<std::size_t>(k)], v, state.cols(), state.row(i).data());
}

template <class T>
void store_state(const Tensor& t, Index offset, bool v_first, Tile<T> state, Rounding& rounding) {
    const int k = v_first ? t.rank - 1 : t.rank - 2, v = v_first ? t.rank - 2 : t.rank - 1;
    rounding.stored(state.data(), state.size(), t.dtype);
    for (Index i = 0; i < state.rows(); ++i)
        core::store_row(t, offset + i * t.stride[static_cast<std::size_t>(k)], v, state.cols(), state.row(i).data());
}

// What a forward pass leaves of a piece.
template <class T>
struct Passed {
    Folded<T> folded;
    Scan<T> scan;
};

// The forward pass over one value head; memory of one thread.
template <class T>
class ForwardPass {
  public:
    explicit ForwardPass(const Call<T>& call) : call_(call) {}

    // The state that enters the sequence.
    void begin(const Place& at) {
        const Tensor& initial = call_.in.initial_state;
        state.setZero(call_.in.k.shape[3], call_.in.v.shape[3]);
        if (initial && at.sequence.state >= 0)
            load_state(initial, initial.offset({at.sequence.state, at.hv, 0, 0}), call_.options.state_v_first, state);
    }

    void run(const Place& at, const Piece& piece, const Chunk<T>& c, Rounding& rounding, Passed<T>& passed) {
        fold(call_.rule, c, rounding, scratch_, passed.folded);
        scan_forward(call_.rule.erases, c, passed.folded, rounding, passed.scan, state, o);
        call_.intermediates.report_forward(at, piece, c, passed.folded, passed.scan);
    }

    // The state before row `row` of a piece that has been run from state `entering`.
    Tile<T> state_before(const Chunk<T>& c, const Passed<T>& passed, Index row, Tile<T> entering) {
        if (row > 0) advance_state(c, passed.scan, row, scratch_, entering);
        return entering;
    }

    Tile<T> state;  // [K, V] carried from piece to piece
    Tile<T> o;      // [n, V] of the last piece

  private:
    const Call<T>& call_;
    FoldScratch<T> scratch_;
};

template <class T>
class ForwardWorker {
  public:
    ForwardWorker(const Call<T>& call, const core::DeltaOutputs& out, const std::vector<Index>& first_states)
        : call_(call), out_(out), first_states_(first_states), pass_(call) {}

    void operator()(Index unit) {
        const Index n = unit / call_.heads, h = unit % call_.heads;
        const core::DeltaSequence s = core::step_sequence(call_.in, call_.options, n);
        Rounding rounding = call_.rounding_of_key_head(n, h);
        key_.load(call_.in, call_.options, s, h, rounding);
        for (Index i = 0; i < call_.group(); ++i)
            run_value_head({s, n, core::value_head_of(call_.in, call_.options, h, i)});
    }

  private:
    bool wants_states() const { return out_.states || call_.in.snapshot_indices; }

    void run_value_head(const Place& at) {
        Rounding rounding = call_.rounding_of_value_head(at);
        if (at.sequence.is_padding) return clear(at, rounding);
        value_.load(call_.in, call_.options, at.sequence, at.hv, call_.execution, rounding);
        pass_.begin(at);
        for (const Piece& piece : value_.pieces) {
            const Chunk<T> c(key_, value_, piece);
            if (wants_states()) entering_ = pass_.state;
            pass_.run(at, piece, c, rounding, passed_);
            store_rows(out_.o, at.sequence, at.hv, piece.begin, pass_.o, rounding, call_.options.steps);
            if (wants_states()) store_states(at, piece, c, rounding);
        }
        const Tensor& last = out_.final_state;
        if (last && at.sequence.final_state >= 0)
            store_state(last, last.offset({at.sequence.final_state, at.hv, 0, 0}), call_.options.state_v_first,
                        pass_.state, rounding);
    }

    // Where there is no sequence: o = 0, and so are the states that are returned.
    void clear(const Place& at, Rounding& rounding) {
        Tile<T> o = Tile<T>::Zero(at.sequence.count, call_.in.v.shape[3]);
        store_rows(out_.o, at.sequence, at.hv, 0, o, rounding, call_.options.steps);
        const Tile<T> state = Tile<T>::Zero(call_.in.k.shape[3], call_.in.v.shape[3]);
        const Index interval = call_.options.state_interval * call_.options.steps;
        for (Index i = 0; out_.states && i * interval < at.sequence.count; ++i) {
            const Index which = first_states_[static_cast<std::size_t>(at.n)] + i;
            store_state(out_.states, out_.states.offset({at.sequence.batch, which, at.hv, 0, 0}),
                        call_.options.state_v_first, state, rounding);
        }
    }

    // Those whose interval begins in the piece: returned, or into the pool.
    void store_states(const Place& at, const Piece& piece, const Chunk<T>& c, Rounding& rounding) {
        const Index interval = call_.options.state_interval * call_.options.steps;
        const Tensor& entries = call_.in.snapshot_indices;
        for (Index i = (piece.begin + interval - 1) / interval; i * interval < piece.begin + piece.count; ++i) {
            const Index batch = at.sequence.batch, which = first_states_[static_cast<std::size_t>(at.n)] + i;
            const Index entry = entries ? core::load_index(entries, entries.offset({batch, which})) : 0;
            if (entry < 0) continue;
            const Tensor& to = entries ? out_.final_state : out_.states;
            const Tile<T> state = pass_.state_before(c, passed_, i * interval - piece.begin, entering_);
            store_state(to, entries ? to.offset({entry, at.hv, 0, 0}) : to.offset({batch, which, at.hv, 0, 0}),
                        call_.options.state_v_first, state, rounding);
        }
    }

    const Call<T>& call_;
    const core::DeltaOutputs& out_;
    const std::vector<Index>& first_states_;
    ForwardPass<T> pass_;
    KeyHead<T> key_;
    ValueHead<T> value_;
    Passed<T> passed_;
    Tile<T> entering_;
};

template <class T>
class BackwardWorker {
  public:
    BackwardWorker(const Call<T>& call, const core::DeltaGradients& grad, std::vector<GateSums>& sums)
        : call_(call), grad_(grad), sums_(sums), pass_(call) {}

    void operator()(Index unit) {
        const Index n = unit / call_.heads, h = unit % call_.heads;
        const core::DeltaSequence s = core::step_sequence(call_.in, call_.options, n);
        Rounding rounding = call_.rounding_of_key_head(n, h);
        key_.load(call_.in, call_.options, s, h, rounding);
        dkey_.clear(key_);
        for (Index i = 0; i < call_.group(); ++i)
            run_value_head({s, n, core::value_head_of(call_.in, call_.options, h, i)});
        dkey_.store(grad_, s, h, key_, rounding, call_.options.steps);
    }

  private:
    void run_value_head(const Place& at) {
        Rounding rounding = call_.rounding_of_value_head(at);
        const core::DeltaSequence& s = at.sequence;
        value_.load(call_.in, call_.options, s, at.hv, call_.execution, rounding);
        pass_.begin(at);
        passed_.resize(std::max(passed_.size(), value_.pieces.size()));
        for (std::size_t i = 0; i < value_.pieces.size(); ++i)
            pass_.run(at, value_.pieces[i], {key_, value_, value_.pieces[i]}, rounding, passed_[i]);

        dvalue_.dv.resize(s.count, value_.v.cols());
        dvalue_.dbeta.resize(s.count);
        dvalue_.dg.resize(s.count, value_.G.cols());
        dstate_.setZero(pass_.state.rows(), pass_.state.cols());
        const Tensor& last = grad_.dfinal_state;
        if (last) load_state(last, last.offset({s.state, at.hv, 0, 0}), call_.options.state_v_first, dstate_);
        for (std::size_t i = value_.pieces.size(); i-- > 0;) run_backward(at, value_.pieces[i], passed_[i], rounding);
        const Tensor& first = grad_.dinitial_state;
        if (first)
            store_state(first, first.offset({s.state, at.hv, 0, 0}), call_.options.state_v_first, dstate_, rounding);
        sums_[static_cast<std::size_t>(at.n * call_.value_heads + at.hv)] =
            dvalue_.store(call_.in, call_.options, grad_, s, at.hv, rounding);
    }

    void run_backward(const Place& at, const Piece& piece, const Passed<T>& passed, Rounding& rounding) {
        const Chunk<T> c(key_, value_, piece);
        dscan_.d_o.setZero(c.rows(), c.v.cols());
        for (Index i = 0; grad_.d_o && i < c.rows(); ++i) {
            const Index token = core::token_ended(at.sequence.begin + piece.begin + i, call_.options.steps);
            if (token < 0) continue;
            const Index offset = grad_.d_o.offset({at.sequence.batch, token, at.hv, 0});
            core::load_row(grad_.d_o, offset, 3, c.v.cols(), dscan_.d_o.row(i).data());
        }
        scan_backward(call_.rule.erases, call_.intermediates.wants_inverse(), passed.folded, passed.scan, rounding,
                      dscan_, dfolded_, dstate_);
        call_.intermediates.report_backward(at, piece, dscan_, dfolded_);
        unfold(call_.rule, c, passed.folded, dfolded_, rounding, scratch_, unfolded_);
        call_.intermediates.report_unfolded(at, piece, call_.rule, c, passed.folded, dfolded_, unfolded_);
        collect(piece, c);
    }

    // The gradients of a piece's operands from their parts.
    void collect(const Piece& piece, const Chunk<T>& c) {
        const auto rows = [&piece](auto& x) { return x.middleRows(piece.begin, piece.count); };
        rows(dkey_.dq) += unfolded_.dq_state + unfolded_.dq_intra;
        rows(dkey_.dk) += unfolded_.dk_state + unfolded_.dk_intra;
        rows(dvalue_.dg) = unfolded_.dg;
        if (!call_.rule.erases) {
            rows(dvalue_.dv) = dscan_.dU;
            dvalue_.dbeta.segment(piece.begin, piece.count).setZero();
            return;
        }
        unfolded_.e_state += unfolded_.e_intra;
        dvalue_.dbeta.segment(piece.begin, piece.count) =
            (dscan_.dR.cwiseProduct(c.v)).rowwise().sum() + c.p.cwiseProduct(unfolded_.e_state).rowwise().sum();
        rows(dvalue_.dv) = dscan_.dR.array().colwise() * c.beta.array();
        unfolded_.e_state.array().colwise() *= c.beta.array();
        rows(call_.in.p ? dkey_.dp : dkey_.dk) += unfolded_.e_state;
    }

    const Call<T>& call_;
    const core::DeltaGradients& grad_;
    std::vector<GateSums>& sums_;
    ForwardPass<T> pass_;
    KeyHead<T> key_;
    KeyGradients<T> dkey_;
    ValueHead<T> value_;
    ValueGradients<T> dvalue_;
    std::vector<Passed<T>> passed_;  // of one value head
    ScanGradients<T> dscan_;
    FoldedGradients<T> dfolded_;
    FoldScratch<T> scratch_;
    Unfolded<T> unfolded_;
    Tile<T> dstate_;
};

template <class T>
void store_sum(const Tensor& t, Index i, double sum, Rounding& rounding) {
    T x = static_cast<T>(sum);
    rounding.stored(&x, 1, t.dtype);
    core::store(t, i * t.stride[0], static_cast<double>(x));
}

// Of what gates are made with: over sequences, in their order.
template <class T>
void store_gate_sums(const Call<T>& call, const core::DeltaGradients& grad, const std::vector<GateSums>& parts) {
    const Index channels = call.options.rule.gate == core::Gate::channel ? call.in.k.shape[3] : 1;
    const core::GateParameters to = core::gate_parameters(grad);
    for (Index hv = 0; hv < call.value_heads; ++hv) {
        double dA_log = 0, dg_gamma = 0;
        Line<double> dbias = Line<double>::Zero(channels);
        for (Index n = 0; n < call.sequences; ++n) {
            const GateSums& part = parts[static_cast<std::size_t>(n * call.value_heads + hv)];
            dA_log += part.dA_log;
            dg_gamma += part.dg_gamma;
            dbias += part.dbias;
        }
        Rounding rounding = call.rounding_of_sums(hv);
        if (to.A_log) store_sum<T>(to.A_log, hv, dA_log, rounding);
        if (grad.dg_gamma) store_sum<T>(grad.dg_gamma, hv, dg_gamma, rounding);
        for (Index m = 0; to.bias && m < channels; ++m) store_sum<T>(to.bias, hv * channels + m, dbias[m], rounding);
    }
}

}  // namespace

}  // namespace delta

template <class T>
void delta_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out) {
    const delta::Call<T> call(in, options, execution);
    const std::vector<core::Index> first_states = delta::count_intervals_before(in, options.state_interval);
    const core::Work work = engines::work_of(in, engines::Direction::forward);
    core::parallel_units(core::useful_threads(execution.threads, work), call.sequences * call.heads,
                         [&] { return delta::ForwardWorker<T>(call, out, first_states); });
}

template <class T>
void delta_backward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                    const core::DeltaGradients& grad) {
    const delta::Call<T> call(in, options, execution);
    std::vector<delta::GateSums> sums(static_cast<std::size_t>(call.sequences * call.value_heads));
    const core::Work work = engines::work_of(in, engines::Direction::backward);
    core::parallel_units(core::useful_threads(execution.threads, work), call.sequences * call.heads,
                         [&] { return delta::BackwardWorker<T>(call, grad, sums); });
    delta::store_gate_sums(call, grad, sums);
}

template void delta_forward<double>(const core::DeltaInputs&, const core::DeltaOptions&, const core::Execution&,
                                    const core::DeltaOutputs&);
template void delta_forward<float>(const core::DeltaInputs&, const core::DeltaOptions&, const core::Execution&,
                                   const core::DeltaOutputs&);
template void delta_backward<double>(const core::DeltaInputs&, const core::DeltaOptions&, const core::Execution&,
                                     const core::DeltaGradients&);
template void delta_backward<float>(const core::DeltaInputs&, const core::DeltaOptions&, const core::Execution&,
                                    const core::DeltaGradients&);

}  // namespace softdelta::stages
