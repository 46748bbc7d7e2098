// The delta rules token by token, states in registers: decode.
#pragma once

#include "core/delta_rule.h"
#include "core/execution.h"
#include "engines/cuda/delta_rule/lengths.h"

namespace softdelta::cuda {

// Of sequences with at most so many tokens states are most of what moves. −1 where operands do not have 16 bits: f32
// sums do not keep what they have.
core::Index few_tokens(const core::DeltaInputs& in);

void step_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                  const core::DeltaOutputs& out, const TokenRange& taken);

}  // namespace softdelta::cuda
