// The causal convolution: each channel by itself, tokens in order.
#pragma once

#include "engines/cpu/kernels/layer/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const ConvolutionKernels convolution_kernels;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
