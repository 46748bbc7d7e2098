// The delta rules by the fast kernels.
#pragma once

#include <cstddef>

#include "core/delta_rule.h"
#include "core/execution.h"

namespace softdelta::cpu {

void delta_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out);

// Bytes of workspace that the same call needs.
std::size_t delta_forward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                    const core::Execution& execution, const core::DeltaOutputs& out);

// Enough for all calls within limits.
std::size_t delta_forward_bound(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                const core::Execution& execution, const core::Limits& limits);

void delta_backward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                    const core::DeltaGradients& grad);

std::size_t delta_backward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                     const core::Execution& execution, const core::DeltaGradients& grad);

}  // namespace softdelta::cpu
