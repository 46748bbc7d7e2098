// The delta rules forward in chunks of 64 tokens on matrix products of 16-bit operands.
#pragma once

#include <cstddef>

#include "core/delta_rule.h"
#include "core/execution.h"
#include "core/handover.h"
#include "engines/cuda/delta_rule/lengths.h"

namespace softdelta::cuda {

// Whether the chunk kernels take the call: layouts, types and sizes alone decide.
bool takes_chunks(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaOutputs& out);

std::size_t chunk_forward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                    const core::Execution& execution);
// What a call in chunks writes to execution.kept; 0: nothing.
std::size_t chunk_kept_size(const core::DeltaInputs& in, const core::DeltaOptions& options);
void chunk_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out, const core::Handover& handover, const TokenRange& taken);

}  // namespace softdelta::cuda
