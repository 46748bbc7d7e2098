// The delta rules token by token in f64, a block for some value columns of a head: f32 operands, gates of channels,
// and whatever the chunk form does not take.
#pragma once

#include "core/delta_rule.h"
#include "core/execution.h"
#include "engines/cuda/delta_rule/lengths.h"

namespace softdelta::cuda {

void tokens_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                    const core::DeltaOutputs& out, const TokenRange& taken);

}  // namespace softdelta::cuda
