// Forward attention of one key head; see head.h.
#pragma once

#include "engines/cpu/kernels/attention/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const AttentionForward attention_forward;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
