// The forward pass of the delta rules, chunk by chunk.
#pragma once

#include "engines/cpu/kernels/delta_rule/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const DeltaForward delta_forward;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
