// The causal convolution before a delta rule.
#pragma once

#include <string>

#include "engines/engine.h"

namespace softdelta::cuda {

// "": every call but of wider weights.
std::string refuse_convolution(const core::ConvolutionInputs& in);

void convolution_forward(const engines::ConvolutionForward& call);
void convolution_backward(const engines::ConvolutionBackward& call);
std::size_t convolution_backward_workspace(const engines::ConvolutionBackward& call);

}  // namespace softdelta::cuda
