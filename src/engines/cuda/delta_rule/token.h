// The delta rules token by token, states in registers: decode.
#pragma once

#include "core/delta_rule.h"
#include "core/execution.h"

namespace softdelta::cuda {

// Whether operands have 16 bits, and sequences so few tokens that states are most of what moves.
bool takes_few_tokens(const core::DeltaInputs& in);

void token_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out);

}  // namespace softdelta::cuda
