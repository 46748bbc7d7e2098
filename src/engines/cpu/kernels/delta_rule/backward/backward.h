// The backward pass of the delta rules, for the table.
#pragma once

#include "engines/cpu/kernels/delta_rule/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const DeltaBackward delta_backward;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
