#include "distributed/fold.h"

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "core/rows.h"

namespace softdelta::distributed {

namespace {

using core::Index;
using core::Tensor;

// States as [.., K, V], whatever their layout.
Tensor key_first(Tensor t, bool state_v_first) {
    if (!t || !state_v_first) return t;
    const auto last = static_cast<std::size_t>(t.rank - 1);
    std::swap(t.shape[last], t.shape[last - 1]);
    std::swap(t.stride[last], t.stride[last - 1]);
    return t;
}

// One head of one sequence, `columns` of its values; T is what sums are kept in.
template <class T>
class Head {
  public:
    Head(const core::DeltaFoldInputs& in, const core::DeltaFoldOutputs& out, bool backward)
        : in_(in), out_(out), backward_(backward), K_(in.E.shape[3]) {}

    void run(Index n, Index head, Index first, Index count) {
        const Index ranges = in_.E.shape[0];
        state_.assign(size(K_ * count), T(0));
        next_.resize(state_.size());
        row_.resize(size(count));
        map_.resize(size(K_));
        if (in_.initial_state)
            for (Index i = 0; i < K_; ++i)
                core::read_row(in_.initial_state, in_.initial_state.offset({n, head, i, first}), 3, count,
                               row(state_, i, count));
        for (Index step = 0; step < ranges; ++step) {
            const Index r = backward_ ? ranges - 1 - step : step;
            if (out_.states)
                for (Index i = 0; i < K_; ++i)
                    core::write_row(out_.states, out_.states.offset({r, n, head, i, first}), 4, count,
                                    row(state_, i, count));
            advance(r, n, head, first, count, step == 0 && !in_.initial_state);
        }
        if (out_.final_state)
            for (Index i = 0; i < K_; ++i)
                core::write_row(out_.final_state, out_.final_state.offset({n, head, i, first}), 3, count,
                                row(state_, i, count));
    }

  private:
    static std::size_t size(Index n) { return static_cast<std::size_t>(n); }
    static T* row(std::vector<T>& m, Index i, Index count) { return m.data() + i * count; }

    // Row i of M, or of Mᵀ.
    void load_map(Index r, Index n, Index head, Index i) {
        const Index at = backward_ ? in_.M.offset({r, n, head, 0, i}) : in_.M.offset({r, n, head, i, 0});
        core::read_row(in_.M, at, backward_ ? 3 : 4, K_, map_.data());
    }

    // The state after range r, M·state + E. Where M is 0 the state's element is left out, also an Inf or NaN. Without
    // an initial state the first range gives E alone.
    void advance(Index r, Index n, Index head, Index first, Index count, bool nothing_entered) {
        const bool number = in_.M.rank == 3;
        const T decay = number ? static_cast<T>(core::load(in_.M, in_.M.offset({r, n, head}))) : T(0);
        for (Index i = 0; i < K_; ++i) {
            T* sum = row(next_, i, count);
            std::fill_n(sum, count, T(0));
            const Index begin = number ? i : 0, end = nothing_entered ? begin : (number ? i + 1 : K_);
            if (!number && end > begin) load_map(r, n, head, i);
            for (Index j = begin; j < end; ++j) {
                const T weight = number ? decay : map_[size(j)];
                if (weight == T(0)) continue;
                const T* x = row(state_, j, count);
                for (Index c = 0; c < count; ++c) sum[c] += weight * x[c];
            }
            core::read_row(in_.E, in_.E.offset({r, n, head, i, first}), 4, count, row_.data());
            for (Index c = 0; c < count; ++c) sum[c] += row_[size(c)];
        }
        state_.swap(next_);
    }

    const core::DeltaFoldInputs& in_;
    const core::DeltaFoldOutputs& out_;
    bool backward_;
    Index K_;
    std::vector<T> state_, next_, row_, map_;  // [K, count] twice, [count], [K]
};

template <class T>
void run(const core::DeltaFoldInputs& in, bool backward, int threads, const core::DeltaFoldOutputs& out) {
    constexpr Index columns = 64;  // of a unit: columns of a state are independent
    const Index N = in.E.shape[1], HV = in.E.shape[2], V = in.E.shape[4], parts = (V + columns - 1) / columns;
    core::parallel_units(threads, N * HV * parts, [&] {
        return [&, head = Head<T>(in, out, backward)](Index unit) mutable {
            const Index first = unit % parts * columns;
            head.run(unit / parts / HV, unit / parts % HV, first, std::min(columns, V - first));
        };
    });
}

void run(core::DeltaFoldInputs in, bool state_v_first, bool backward, int threads, core::DeltaFoldOutputs out) {
    bool f64 = false;
    core::for_each_given(in, [&](const auto&, const Tensor& t) { f64 = f64 || t.dtype == core::DType::f64; });
    for (Tensor* t : {&in.E, &in.initial_state, &out.states, &out.final_state}) *t = key_first(*t, state_v_first);
    f64 ? run<double>(in, backward, threads, out) : run<float>(in, backward, threads, out);
}

}  // namespace

void fold(const core::DeltaFoldInputs& in, bool state_v_first, int threads, const core::DeltaFoldOutputs& out) {
    run(in, state_v_first, false, threads, out);
}

void fold_backward(const core::DeltaFoldInputs& in, bool state_v_first, int threads,
                   const core::DeltaFoldOutputs& out) {
    run(in, state_v_first, true, threads, out);
}

}  // namespace softdelta::distributed
