// The truth: token recurrence and full softmax in f64 with hand-written adjoints (docs/math.md). Plain loops; nothing
// here is shared with what it judges. Operands are checked and have their defaults before they come here.
#pragma once

#include "core/attention.h"
#include "core/delta_rule.h"
#include "core/execution.h"
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

}  // namespace softdelta::reference
