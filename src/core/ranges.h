// Between ranges of tokens (docs/math.md): what a range does to the state that enters it, and what follows from that
// for many ranges in a row.
#pragma once

#include "core/delta_rule.h"

namespace softdelta::core {

// S_out = M S_in + E
struct DeltaSummary {
    Tensor M;  // [N, HV, K, K], rows are those of S_out; of a rule that maps by a number [N, HV]
    Tensor E;  // [N, HV, K, V] or [N, HV, V, K]
};

// dS_in = Mᵀ dS_out + R
struct DeltaSummaryGradient {
    Tensor d_o;  // [B, T, HV, V]
    Tensor R;    // as E
};

// Summaries of ranges, in the order of tokens.
struct DeltaFoldInputs {
    Tensor M;              // [P, N, HV, K, K] or [P, N, HV]
    Tensor E;              // [P, N, HV, K, V] or [P, N, HV, V, K]
    Tensor initial_state;  // [N, HV, K, V] or [N, HV, V, K]; absent: 0
};

struct DeltaFoldOutputs {
    Tensor states;       // as E: the state that enters each range
    Tensor final_state;  // as initial_state: what leaves the last
};

template <>
inline constexpr auto operands_of<DeltaSummary> = std::to_array<Operand<DeltaSummary>>({
    {.name = "M", .tensor = &DeltaSummary::M, .shape = "N HV K K", .number_shape = "N HV", .written = true},
    {.name = "E", .tensor = &DeltaSummary::E, .shape = "N HV K V", .v_first_shape = "N HV V K", .written = true},
});
template <>
inline constexpr auto operands_of<DeltaSummaryGradient> = std::to_array<Operand<DeltaSummaryGradient>>({
    {.name = "d_o", .tensor = &DeltaSummaryGradient::d_o, .shape = "B T HV V"},
    {.name = "R",
     .tensor = &DeltaSummaryGradient::R,
     .shape = "N HV K V",
     .v_first_shape = "N HV V K",
     .written = true},
});
template <>
inline constexpr auto operands_of<DeltaFoldInputs> = std::to_array<Operand<DeltaFoldInputs>>({
    {.name = "M", .tensor = &DeltaFoldInputs::M, .shape = "P N HV K K", .number_shape = "P N HV"},
    {.name = "E", .tensor = &DeltaFoldInputs::E, .shape = "P N HV K V", .v_first_shape = "P N HV V K"},
    {.name = "initial_state",
     .tensor = &DeltaFoldInputs::initial_state,
     .shape = "N HV K V",
     .v_first_shape = "N HV V K"},
});
template <>
inline constexpr auto operands_of<DeltaFoldOutputs> = std::to_array<Operand<DeltaFoldOutputs>>({
    {.name = "states",
     .tensor = &DeltaFoldOutputs::states,
     .shape = "P N HV K V",
     .v_first_shape = "P N HV V K",
     .written = true},
    {.name = "final_state",
     .tensor = &DeltaFoldOutputs::final_state,
     .shape = "N HV K V",
     .v_first_shape = "N HV V K",
     .written = true},
});

}  // namespace softdelta::core
