// Calls of the delta rules drawn at random: rule, shapes, options, layouts and numbers, all from one seed. A failing
// test prints the seed; SOFTDELTA_SEED=<seed> draws that call first.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/rule_facts.h"
#include "softdelta/softdelta.hpp"
#include "support/array.h"

namespace softdelta::test {

struct DeltaRanges {
    Index batch = 2, tokens = 9, heads = 2, group = 3, key_channels = 6, value_channels = 18;  // largest sizes drawn
    Index channel_step = 1;                                                                    // of both
    Index shortest = 0;                                                                        // tokens
    std::vector<Index> lengths{};  // tokens of half of the sequences, where no more than drawn otherwise; none: no such
    std::vector<DType> dtypes{DType::f64};  // each tensor takes one of them
    bool packed = false;                    // all calls are
    bool dense = false;                     // so are all tensors
    bool steps = false;                     // draw tokens of several steps, too
    bool facts = false;                     // rules are any facts, and not those of the table
    bool tiled = false;                     // draw head orders, too
    bool repeats = false;                   // draw strides of zero, too, of any operand
    bool far = false;                       // rows that are normed may be beyond what f32 holds the square of, too
    bool hard = false;  // also gates to +200 on states that are 0, raw gates near 1e9, tiny keys, large states
};

struct RandomDelta {
    std::uint64_t seed = 0;
    Index sequences = 0;
    DeltaOptions options;
    Array q, k, p, v, g, g_gamma, beta, initial_state, A_log, dt_bias, cu_seqlens;  // empty: not given
    Array d_o, dfinal_state;                                                        // gradients of the results
    std::vector<std::string> features;                                              // what the draw has

    const core::Rule& rule() const { return *core::find_rule(static_cast<std::int32_t>(options.rule)); }
    DeltaInputs inputs() const;
    Shape o_shape() const;
    Shape u_shape() const;
    Shape state_shape() const;   // of initial_state and final_state
    Shape states_shape() const;  // of `states`
    Shape states_shape(Index interval) const;
    Index length(Index n) const;
    Index begin(Index n) const;  // first token of sequence n in its batch row
    Index batch(Index n) const;  // that row
    std::string describe() const;
};

RandomDelta draw_delta(std::uint64_t seed, const DeltaRanges& ranges = {});

// The same numbers in dense f64 tensors.
Array dense_copy(const Array& a);
RandomDelta dense_copy(const RandomDelta& call);

// An input with a gradient, by its name in case files.
struct DeltaOperand {
    const char* name;
    Array RandomDelta::*array;
    Tensor DeltaInputs::*input;
    Tensor DeltaGradients::*gradient;
};

// q k p v g g_gamma beta initial_state A_log dt_bias
std::span<const DeltaOperand> delta_operands();

// Every result by name, dense f64: o, final_state and states; d + the name of every input given, and dinitial_state.
using Results = std::map<std::string, Array>;
Results forward_results(const RandomDelta& call, const Execution& execution);
Results backward_results(const RandomDelta& call, const Execution& execution);

}  // namespace softdelta::test
