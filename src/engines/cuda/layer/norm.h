// The gated norm after a delta rule.
#pragma once

#include <string>

#include "engines/engine.h"

namespace softdelta::cuda {

// "": every call but of 2³¹ rows and more.
std::string refuse_norm(const core::NormInputs& in);

void norm_forward(const engines::NormForward& call);
void norm_backward(const engines::NormBackward& call);
std::size_t norm_backward_workspace(const engines::NormBackward& call);

}  // namespace softdelta::cuda
