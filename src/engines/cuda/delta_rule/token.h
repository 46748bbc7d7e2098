// The delta rules token by token, states in registers: decode, and whatever the chunk form does not take.
#pragma once

#include "core/delta_rule.h"
#include "core/execution.h"

namespace softdelta::cuda {

void token_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out);

}  // namespace softdelta::cuda
