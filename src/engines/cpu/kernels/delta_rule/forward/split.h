// One head for many threads: chunks folded side by side, then the scan by panels of value columns.
#pragma once

#include "engines/cpu/kernels/delta_rule/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const DeltaSplit delta_split;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
