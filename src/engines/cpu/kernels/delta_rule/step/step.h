// A few tokens at once on a state that stays where the caller has it: decode. The state is read twice and written once.
#pragma once

#include "engines/cpu/kernels/delta_rule/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const DeltaStep delta_step;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
