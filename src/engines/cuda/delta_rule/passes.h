// The passes of the delta rules: in chunks of 64 tokens on matrix products, token by token in f64,
// and few tokens with states in registers (decode).
#pragma once

#include "engines/cuda/delta_rule/lengths.h"
#include "engines/engine.h"

namespace softdelta::cuda {

// Rules that the chunk kernels know: the others go token by token.
bool chunks_know(const core::DeltaOptions& options);

// Whether the chunk kernels take a call: layouts, types and sizes alone decide.
bool takes_chunks(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaOutputs& out);
bool takes_chunk_gradients(const core::DeltaInputs& in, const core::DeltaOptions& options,
                           const core::DeltaGradients& grad);

std::size_t chunk_forward_workspace(const engines::DeltaForward& of);
// What a call in chunks writes to execution.kept; 0: nothing.
std::size_t chunk_kept_size(const core::DeltaInputs& in, const core::DeltaOptions& options);
// handover: the call's, or what other kernels leave of it.
void chunk_forward(const engines::DeltaForward& of, const core::Handover& handover, const TokenRange& taken);
std::size_t chunk_backward_workspace(const engines::DeltaBackward& of);
void chunk_backward(const engines::DeltaBackward& of);

// Whatever the chunk form does not take.
void tokens_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                    const core::DeltaOutputs& out, const TokenRange& taken);
std::size_t tokens_backward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                      const core::DeltaGradients& grad);
void tokens_backward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                     const core::DeltaGradients& grad);

// Of sequences with at most so many tokens states are most of what moves. f32 operands: they go token by token in f64.
core::Index few_tokens(const core::DeltaInputs& in);
void step_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                  const core::DeltaOutputs& out, const TokenRange& taken);

}  // namespace softdelta::cuda
