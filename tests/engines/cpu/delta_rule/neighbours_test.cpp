// The results of a sequence do not depend on its neighbours: they have the same bits in a batch, packed with others,
// and alone. Mixed batches: sequences of one token and of up to 200, or one of many, with states for decode or without.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "support/levels.h"
#include "support/parts.h"
#include "support/random_delta.h"

namespace softdelta::test {
namespace {

constexpr int teams[] = {1, 2, 5, 16};

struct Mixed {
    RandomDelta drawn;
    Index interval = 0;  // of states that are kept; 0: none
    Execution execution;
};

Mixed draw(std::uint64_t seed) {
    DeltaRanges ranges{.batch = 8, .tokens = 1200, .heads = 2, .group = 2, .key_channels = 64, .value_channels = 64};
    ranges.channel_step = seed % 5 == 0 ? 1 : 16;
    ranges.shortest = 1;
    ranges.lengths = {0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 8, 9, 16, 31, 33, 64, 65, 129, 200};
    constexpr DType types[] = {DType::f32, DType::bf16, DType::bf16, DType::f32, DType::f16};
    const DType dtype = types[seed / 2 % std::size(types)];
    ranges.dtypes = {dtype};
    ranges.tiled = true;
    ranges.hard = seed % 3 == 0;
    Mixed call{draw_delta(seed, ranges), 0, {}};
    if (seed % 4 != 0) {  // states that steps take
        Random random(seed);
        call.drawn.initial_state = Array(seed % 8 == 1 ? dtype : DType::f32, call.drawn.state_shape());
        fill_normal(call.drawn.initial_state, random);
    }
    constexpr Index intervals[] = {0, 0, 0, 64, 384};
    call.interval = intervals[seed % std::size(intervals)];
    call.execution.engine = "fast";
    call.execution.threads = teams[seed % std::size(teams)];
    return call;
}

// Results of all sequences, some of which lie in `rows`, some in an entry for each.
using Arrays = std::map<std::string, Array>;

Tensor view(const Arrays& arrays, const std::string& name) {
    const auto found = arrays.find(name);
    return found == arrays.end() ? Tensor() : found->second.view();
}

DType type_of(const Array& a, DType otherwise) {
    return a.view() ? a.view().dtype() : otherwise;
}

Arrays make_outputs(const Mixed& call) {
    const RandomDelta& d = call.drawn;
    Arrays out;
    out["o"] = Array(d.v.view().dtype(), d.o_shape());
    out["final_state"] = Array(type_of(d.initial_state, DType::f32), d.state_shape());
    if (call.interval == 0) return out;
    out["u"] = Array(DType::f32, d.u_shape());
    out["states"] = Array(DType::f32, d.states_shape(call.interval));
    return out;
}

Arrays make_gradients(const Mixed& call) {
    Arrays out;
    for (const DeltaOperand& operand : delta_operands()) {
        const Array& input = call.drawn.*operand.array;
        const std::string name = operand.name;
        if (name == "initial_state")
            out["d" + name] = Array(DType::f32, call.drawn.state_shape());
        else if (input.view() && name != "g_gamma" && name != "A_log" && name != "dt_bias")
            out["d" + name] = Array(input.view().dtype(), {input.view().shape().begin(), input.view().shape().end()});
    }
    return out;
}

// What of a call belongs to one sequence; or all of it.
class Part {
  public:
    Part(const Mixed& call, Index sequence)
        : call_(call),
          n_(sequence),
          batch_(call.drawn.batch(sequence)),
          begin_(call.drawn.begin(sequence)),
          count_(call.drawn.length(sequence)) {}

    Tensor rows(const Tensor& t) const { return tokens_of(t, batch_, begin_, count_); }
    Tensor entry(const Tensor& t) const { return part_of(t, 0, n_, 1); }
    Tensor states(const Tensor& t) const {
        if (!t) return t;
        const auto intervals = [&](Index tokens) { return (tokens + call_.interval - 1) / call_.interval; };
        Index before = 0;
        for (Index n = 0; call_.drawn.cu_seqlens.view() && n < n_; ++n) before += intervals(call_.drawn.length(n));
        return tokens_of(t, batch_, before, intervals(count_));
    }

  private:
    const Mixed& call_;
    Index n_, batch_, begin_, count_;
};

struct Whole {
    Tensor rows(const Tensor& t) const { return t; }
    Tensor entry(const Tensor& t) const { return t; }
    Tensor states(const Tensor& t) const { return t; }
};

template <class Piece>
DeltaInputs inputs_of(const Mixed& call, const Piece& piece) {
    DeltaInputs in = call.drawn.inputs();
    for (Tensor* t : {&in.q, &in.k, &in.p, &in.v, &in.g, &in.beta}) *t = piece.rows(*t);
    in.initial_state = piece.entry(in.initial_state);
    if constexpr (std::is_same_v<Piece, Part>) in.cu_seqlens = {};
    return in;
}

template <class Piece>
void run_forward(const Mixed& call, const Piece& piece, const Execution& execution, const Arrays& out) {
    DeltaOptions options = call.drawn.options;
    if (call.interval > 0) options.state_interval = call.interval;
    delta_forward(inputs_of(call, piece),
                  {.o = piece.rows(view(out, "o")),
                   .final_state = piece.entry(view(out, "final_state")),
                   .states = piece.states(view(out, "states")),
                   .u = piece.rows(view(out, "u"))},
                  options, execution);
}

template <class Piece>
void run_backward(const Mixed& call, const Piece& piece, const Execution& execution, const Arrays& kept,
                  const Arrays& out) {
    DeltaOptions options = call.drawn.options;
    DeltaGradients grad;
    grad.d_o = piece.rows(call.drawn.d_o.view());
    grad.dfinal_state = piece.entry(call.drawn.dfinal_state.view());
    grad.states = piece.states(view(kept, "states")), grad.u = piece.rows(view(kept, "u"));
    if (call.interval > 0) options.state_interval = call.interval;
    for (const DeltaOperand& operand : delta_operands()) {
        const std::string name = std::string("d") + operand.name;
        grad.*operand.gradient = name == "dinitial_state" ? piece.entry(view(out, name)) : piece.rows(view(out, name));
    }
    delta_backward(inputs_of(call, piece), grad, options, execution);
}

// Results of a call against those of a call for each of its sequences, on one thread.
std::string check(const Mixed& call, bool backward) {
    Execution one = call.execution;
    one.threads = 1;
    const Arrays kept = make_outputs(call);
    if (!backward || call.interval > 0) run_forward(call, Whole{}, call.execution, kept);
    Arrays together = backward ? make_gradients(call) : make_outputs(call);
    Arrays alone = backward ? make_gradients(call) : make_outputs(call);
    if (backward)
        run_backward(call, Whole{}, call.execution, kept, together);
    else
        run_forward(call, Whole{}, call.execution, together);
    for (Index n = 0; n < call.drawn.sequences; ++n) {
        if (backward)
            run_backward(call, Part(call, n), one, kept, alone);
        else
            run_forward(call, Part(call, n), one, alone);
    }
    std::string faults;
    for (const auto& [name, array] : together)
        if (const Index at = first_difference(array, alone.at(name)); at >= 0)
            faults += call.drawn.describe() + ": " + name + " has other bits alone, element " + std::to_string(at) +
                      ": " + std::to_string(array.get(at)) + ", alone " + std::to_string(alone.at(name).get(at)) + "\n";
    return faults;
}

TEST(DeltaNeighbours, ChangeNoBitForward) {
    check_calls(call_count(150), draw, [](const Mixed& call, std::uint64_t) { return check(call, false); });
}

TEST(DeltaNeighbours, ChangeNoBitBackward) {
    check_calls(call_count(100), draw, [](const Mixed& call, std::uint64_t) { return check(call, true); });
}

}  // namespace
}  // namespace softdelta::test
