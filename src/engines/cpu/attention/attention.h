// Attention by the fast kernels.
#pragma once

#include <cstddef>
#include <memory>

#include "core/attention.h"
#include "core/execution.h"
#include "engines/engine.h"

namespace softdelta::cpu {

void attention_forward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                       const core::Execution& execution, const core::AttentionOutputs& out);

std::unique_ptr<engines::Prepared> prepare_attention_forward(const engines::AttentionForward& call);

// Bytes of workspace that the same call needs.
std::size_t attention_forward_workspace(const core::AttentionInputs& in, const core::AttentionOptions& options,
                                        const core::Execution& execution);

// Enough for all calls within limits.
std::size_t attention_forward_bound(const core::AttentionInputs& in, const core::AttentionOptions& options,
                                    const core::Execution& execution, const core::Limits& limits);

void attention_backward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                        const core::Execution& execution, const core::AttentionGradients& grad);

std::size_t attention_backward_workspace(const core::AttentionInputs& in, const core::AttentionOptions& options,
                                         const core::Execution& execution, const core::AttentionGradients& grad);

}  // namespace softdelta::cpu
