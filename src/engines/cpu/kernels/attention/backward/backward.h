// Backward attention of one key head; see head.h.
#pragma once

#include "engines/cpu/kernels/attention/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const AttentionBackward attention_backward;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
