// The verdict on a dump of a layer around the delta rules, as verify.h gives of the operations themselves. An ordinary
// right kernel computes in f32 and rounds a result once: the baseline is the f64 formula of operands whose last digits
// in f32 are random. It may also round what comes between two operations to the type of the tensors: what a norm
// multiplies by weight and gate, and in a backward pass the gradient of the activation.
#pragma once

#include "io/call/layer.h"
#include "judge/verify.h"

namespace softdelta::judge {

std::vector<Finding> verify(const io::LayerCall& call, const std::map<std::string, Tensor>& results,
                            const Options& options);

}  // namespace softdelta::judge
