// The passes of attention: blocked online softmax, and its gradients, each element by one thread in one order.
#pragma once

#include "engines/engine.h"

namespace softdelta::cuda {

std::size_t attention_forward_workspace(const engines::AttentionForward& of);
void attention_forward(const engines::AttentionForward& of);
std::size_t attention_backward_workspace(const engines::AttentionBackward& of);
void attention_backward(const engines::AttentionBackward& of);

inline constexpr core::Index most_forward_channels = 576, most_backward_channels = 256;

// Sequences whose lengths a launch takes from the host; those that one launch takes of a call that is not packed.
inline constexpr int most_sequences = 256;
core::Index sequences_at_once(const core::AttentionInputs& in);

}  // namespace softdelta::cuda
