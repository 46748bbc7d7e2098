// Attention's gradients, each element by one thread in one order.
#pragma once

#include <cstddef>

#include "core/attention.h"
#include "core/execution.h"

namespace softdelta::cuda {

std::size_t attention_backward_workspace(const core::AttentionInputs& in, const core::AttentionOptions& options,
                                         const core::AttentionGradients& grad);
void attention_backward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                        const core::Execution& execution, const core::AttentionGradients& grad);

}  // namespace softdelta::cuda
