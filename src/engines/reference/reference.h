// The truth: token recurrence and full softmax in f64 with hand-written adjoints (docs/math.md). Plain loops; nothing
// here is shared with what it judges. Operands are checked and have their defaults before they come here.
#pragma once

#include "core/attention.h"
#include "core/delta_rule.h"
#include "core/execution.h"
#include "core/layer/convolution.h"
#include "core/layer/norm.h"
#include "engines/engine.h"

namespace softdelta::reference {

extern const engines::Engine engine;

void attention_forward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                       const core::Execution& execution, const core::AttentionOutputs& out);
void attention_backward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                        const core::Execution& execution, const core::AttentionGradients& grad);
void delta_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, int threads,
                   const core::DeltaOutputs& out);
void delta_backward(const core::DeltaInputs& in, const core::DeltaOptions& options, int threads,
                    const core::DeltaGradients& grad);
void convolution_forward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                         const core::Execution& execution, const core::ConvolutionOutputs& out);
void convolution_backward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                          const core::Execution& execution, const core::ConvolutionGradients& grad);
void norm_forward(const core::NormInputs& in, const core::NormOptions& options, const core::Execution& execution,
                  const core::NormOutputs& out);
void norm_backward(const core::NormInputs& in, const core::NormOptions& options, const core::Execution& execution,
                   const core::NormGradients& grad);

}  // namespace softdelta::reference
