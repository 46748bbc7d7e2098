// What the sources of a level define for its table (isa_unit.cpp).
#pragma once

#include "engines/cpu/kernels/table.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const AttentionForward attention_forward;
extern const AttentionDecode attention_decode;
extern const AttentionBackward attention_backward;
extern const DeltaForward delta_forward;
extern const DeltaSplit delta_split;
extern const DeltaStep delta_step;
extern const DeltaBackward delta_backward;
extern const DeltaBackwardSplit delta_backward_split;
extern const ConvolutionKernels convolution_kernels;
extern const NormKernels norm_kernels;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
