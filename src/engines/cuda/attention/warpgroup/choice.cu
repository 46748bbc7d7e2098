// Which calls the kernels of warpgroups compute.
#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/warpgroup/added.h"
#include "engines/cuda/level.h"

namespace softdelta::cuda {

bool takes_warpgroups(const AttentionCall& call, core::Device device, int most_channels) {
    constexpr Index longest = Index(1) << 30;
    const DType type = call.q.dtype;
    return (type == DType::bf16 || type == DType::f16) &&
           std::max(call.channels, call.value_channels) <= most_channels && has_units(call.q, call.channels, type) &&
           has_units(call.k, call.channels, type) && has_units(call.v, call.value_channels, type) &&
           call.queries <= most_warpgroup_rows && call.keys < longest && call.top_w < 0 &&
           (!call.bias || warpgroup::has_bias_units(call.bias, type)) && level_of(device) == Level::sm_90a;
}

// Each element is of one head of one sequence, and of one key. Slopes would have to come between ds and dbias, and a
// soft cap after it.
bool takes_bias_gradient(const AttentionCall& call, const Gradients& grad, Index sequences) {
    if (!grad.dbias || call.bias_slopes || call.softcap != 0 || grad.bias_batches != sequences ||
        grad.bias_heads != call.heads || grad.bias_keys == 1)
        return false;
    return grad.bias_queries == 1 || warpgroup::has_bias_units(grad.dbias, call.q.dtype);
}

}  // namespace softdelta::cuda
