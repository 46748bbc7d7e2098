// The chunk form of the delta rules and blocked online-softmax attention in Eigen tiles, with every intermediate under
// the name that kernels give it (docs/stages.md). T is double or float; float with a rounding seed is the
// low-precision baseline that limits of error are computed from.
#pragma once

#include "core/attention.h"
#include "core/delta_rule.h"
#include "core/execution.h"
#include "engines/engine.h"

namespace softdelta::stages {

extern const engines::Engine engine_f64, engine_f32;

// Throw core::InvalidArgument for a wanted intermediate that does not exist, or of a wrong shape.
void check_attention_intermediates(const core::AttentionInputs& in, const core::Execution& execution);
void check_delta_intermediates(const core::DeltaInputs& in, const core::DeltaOptions& options,
                               const core::Execution& execution);

template <class T>
void attention_forward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                       const core::Execution& execution, const core::AttentionOutputs& out);
template <class T>
void attention_backward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                        const core::Execution& execution, const core::AttentionGradients& grad);
template <class T>
void delta_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out);
template <class T>
void delta_backward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                    const core::DeltaGradients& grad);

}  // namespace softdelta::stages
