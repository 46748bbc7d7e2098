// The backward pass of the delta rules, for the table: a forward sweep that saves states and U, then chunks from the
// last to the first.
#pragma once

#include "engines/cpu/kernels/delta_rule/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const DeltaBackward delta_backward;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
