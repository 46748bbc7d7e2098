// The passes of attention: blocked online softmax, and its gradients, each element by one thread in one order.
#pragma once

#include <cstddef>
#include <string>

#include "core/attention.h"
#include "core/execution.h"

namespace softdelta::cuda {

std::size_t attention_forward_workspace(const core::AttentionInputs& in, const core::AttentionOptions& options);
void attention_forward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                       const core::Execution& execution, const core::AttentionOutputs& out);
std::size_t attention_backward_workspace(const core::AttentionInputs& in, const core::AttentionOptions& options,
                                         const core::AttentionGradients& grad);
void attention_backward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                        const core::Execution& execution, const core::AttentionGradients& grad);

// Why the kernels do not compute these inputs, of which they take so many channels; "": they do.
inline constexpr core::Index most_forward_channels = 576, most_backward_channels = 256;
std::string refuse_attention(const core::AttentionInputs& in, core::Index most);

// Sequences whose lengths a launch takes from the host; those that one launch takes of a call that is not packed.
inline constexpr int most_sequences = 256;
core::Index sequences_at_once(const core::AttentionInputs& in);

}  // namespace softdelta::cuda
