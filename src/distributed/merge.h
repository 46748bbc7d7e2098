// Softmax over disjoint sets of keys, put together: o = Σ_r e^(lse_r − lse) o_r, lse = log Σ_r e^lse_r.
#pragma once

#include <vector>

#include "core/attention.h"

namespace softdelta::distributed {

// o [B, Lq, H, Dv] and lse [B, H, Lq] of each set, summed in this order. A row without a key has lse −∞.
void merge(const std::vector<core::AttentionOutputs>& parts, int threads, const core::AttentionOutputs& out);

}  // namespace softdelta::distributed
