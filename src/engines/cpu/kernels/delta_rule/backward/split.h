// The backward pass of one key head for many threads, for the table.
#pragma once

#include "engines/cpu/kernels/delta_rule/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const DeltaBackwardSplit delta_backward_split;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
