// The delta rules' gradients in chunks of 64 tokens on matrix products of 16-bit operands.
#pragma once

#include <cstddef>

#include "core/delta_rule.h"
#include "core/execution.h"
#include "core/handover.h"

namespace softdelta::cuda {

// Whether the chunk kernels take the call: layouts, types and sizes alone decide.
bool takes_chunk_gradients(const core::DeltaInputs& in, const core::DeltaOptions& options,
                           const core::DeltaGradients& grad);

std::size_t chunk_backward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                     const core::DeltaGradients& grad, const core::Execution& execution);
void chunk_backward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                    const core::DeltaGradients& grad, const core::Handover& handover);

}  // namespace softdelta::cuda
