// The forward pass of the delta rules, chunk by chunk.
#pragma once

#include "kernels/delta_rule.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const DeltaForward delta_forward;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
