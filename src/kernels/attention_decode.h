// Attention of few query rows over many keys; see attention.h.
#pragma once

#include "kernels/attention.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

extern const AttentionDecode attention_decode;

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
