// The gated norm: each row by itself.
#pragma once

#include "engines/cpu/kernels/layer/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const NormKernels norm_kernels;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
