// The delta rules' gradients token by token in f64.
#pragma once

#include <cstddef>

#include "core/delta_rule.h"
#include "core/execution.h"

namespace softdelta::cuda {

std::size_t tokens_backward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                      const core::DeltaGradients& grad);
void tokens_backward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                     const core::DeltaGradients& grad);

}  // namespace softdelta::cuda
