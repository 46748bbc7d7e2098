// The layers around a delta rule: the causal convolution before it, the gated norm after it.
#pragma once

#include <string>

#include "engines/engine.h"

namespace softdelta::cuda {

inline constexpr core::Index most_convolution_width = 16;  // of its weights
void convolution_forward(const engines::ConvolutionForward& call);
void convolution_backward(const engines::ConvolutionBackward& call);
std::size_t convolution_backward_workspace(const engines::ConvolutionBackward& call);

// "": every call but of 2³¹ rows and more.
std::string refuse_norm(const core::NormInputs& in);
void norm_forward(const engines::NormForward& call);
void norm_backward(const engines::NormBackward& call);
std::size_t norm_backward_workspace(const engines::NormBackward& call);

}  // namespace softdelta::cuda
