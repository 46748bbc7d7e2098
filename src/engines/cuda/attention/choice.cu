// Which calls the kernels of warpgroups compute, and how.
#include <algorithm>

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/warpgroup/added.h"
#include "engines/cuda/device/level.h"

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

// Where a launch would have too few blocks to fill the card, ds is computed once more: that takes less time. So does it
// where few keys are seen, and with few channels.
ScorePlan plan_scores(const core::AttentionInputs& in, const core::AttentionOptions& options,
                      const core::AttentionGradients& grad) {
    constexpr Index most_elements = Index(1) << 28;  // 512 MiB
    // Blocks of a causal call differ in length: several for each multiprocessor even that out.
    const Index least_blocks = options.causal == core::Causal::none ? 120 : 256;
    const Index Lq = in.q.shape[1], H = in.q.shape[2], Lk = in.k.shape[1], Hk = in.k.shape[2];
    const Index channels = std::max(in.q.shape[3], in.v.shape[3]);
    const bool is_whole = !in.cu_seqlens_q && !in.cu_seqlens_k && !in.cache_seqlens && !in.block_table;
    const bool is_plain = !in.mask && !in.alibi_slopes && !in.bias_slopes && options.softcap == 0 &&
                          options.scale > 0 && options.top_w < 0 && options.window_left < 0 && options.window_right < 0;
    if (!is_whole || !is_plain || !grad.dq || !(grad.dk || grad.dv) || (grad.dbias && grad.dbias.shape[2] != 1) ||
        in.q.dtype != DType::bf16 || channels <= 64 || channels > 128 || level_of(in.q.device) != Level::sm_90a)
        return {};
    ScorePlan plan;
    plan.row = (Lk + 7) / 8 * 8;
    const Index of_key_head = H / std::max(Hk, Index(1)) * Lq * plan.row, sequences = core::sequence_count(in);
    if (of_key_head == 0 || of_key_head > most_elements) return {};
    const Index units = most_elements / of_key_head;
    if (units >= Hk) {
        plan.key_heads = Hk;
        plan.sequences = std::min({sequences, units / Hk, Index(AttentionSequences::most)});
    } else {
        const Index turns = (Hk + units - 1) / units;
        plan.key_heads = (Hk + turns - 1) / turns;
        plan.sequences = 1;
    }
    const Index blocks = plan.sequences * plan.key_heads * ((Lk + warpgroup_rows - 1) / warpgroup_rows);
    if (plan.sequences * plan.key_heads < sequences * Hk && blocks < least_blocks) return {};
    plan.elements = plan.sequences * plan.key_heads * of_key_head;
    return plan;
}

}  // namespace softdelta::cuda
