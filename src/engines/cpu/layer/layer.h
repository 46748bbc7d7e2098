// The causal convolution and the gated norm by the fast kernels.
#pragma once

#include <cstddef>
#include <string>

#include "core/execution.h"
#include "core/layer/convolution.h"
#include "core/layer/norm.h"

namespace softdelta::cpu {

using core::Index;
using core::Tensor;

void convolution_forward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                         const core::Execution& execution, const core::ConvolutionOutputs& out);
void convolution_backward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                          const core::Execution& execution, const core::ConvolutionGradients& grad);
// Why kernels do not have this width; "": they do.
std::string refuse_width(const core::ConvolutionInputs& in);

void norm_forward(const core::NormInputs& in, const core::NormOptions& options, const core::Execution& execution,
                  const core::NormOutputs& out);
void norm_backward(const core::NormInputs& in, const core::NormOptions& options, const core::Execution& execution,
                   const core::NormGradients& grad);

// Enough for all calls of these channels.
std::size_t convolution_forward_bound(const core::ConvolutionInputs& in, const core::Execution& execution);
std::size_t norm_forward_bound(const core::NormInputs& in, const core::Execution& execution);

// Bytes of workspace that the same call needs.
std::size_t convolution_forward_workspace(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                                          const core::Execution& execution, const core::ConvolutionOutputs& out);
std::size_t convolution_backward_workspace(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                                           const core::Execution& execution, const core::ConvolutionGradients& grad);
std::size_t norm_forward_workspace(const core::NormInputs& in, const core::NormOptions& options,
                                   const core::Execution& execution, const core::NormOutputs& out);
std::size_t norm_backward_workspace(const core::NormInputs& in, const core::NormOptions& options,
                                    const core::Execution& execution, const core::NormGradients& grad);

}  // namespace softdelta::cpu
