// Attention of few query rows over many keys; see head.h.
#pragma once

#include "engines/cpu/kernels/attention/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const AttentionDecode attention_decode;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
