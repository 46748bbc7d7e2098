// Which kernels compute a call, and how: the forward pass, and what the backward pass asks.
#include <algorithm>

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/passes.h"
#include "engines/cuda/attention/split/split.h"
#include "engines/cuda/attention/warpgroup/added.h"
#include "engines/cuda/device/card.h"
#include "engines/cuda/device/workspace.h"

namespace softdelta::cuda {

namespace {

// Types, rows and sizes that tiles of 16 bits take.
bool takes_tiles(const AttentionCall& call, int most_channels) {
    constexpr Index longest = Index(1) << 30;
    const DType type = call.q.dtype;
    return (type == DType::bf16 || type == DType::f16) &&
           std::max(call.channels, call.value_channels) <= most_channels && has_units(call.q, call.channels, type) &&
           has_units(call.k, call.channels, type) && has_units(call.v, call.value_channels, type) &&
           call.queries <= most_warpgroup_rows && call.keys < longest && call.top_w < 0 &&
           (!call.bias || warpgroup::has_bias_units(call.bias, type));
}

}  // namespace

bool takes_warpgroups(const AttentionCall& call, core::Device device, int most_channels) {
    return takes_tiles(call, most_channels) && level_of(device) == Level::sm_90a;
}
bool takes_warps(const AttentionCall& call, core::Device device) {
    constexpr int most_channels = 128;
    return takes_tiles(call, most_channels) && level_of(device) == Level::sm_80 && call.scale > 0 &&
           !call.alibi_slopes && !call.bias_slopes && (call.softcap == 0 || !(call.bias || call.mask));
}

// Each element is of one head of one sequence, and of one key. Slopes would have to come between ds and dbias, and a
// soft cap after it.
bool takes_bias_gradient(const AttentionCall& call, const Gradients& grad, Index sequences) {
    if (!grad.dbias || call.bias_slopes || call.softcap != 0 || grad.bias_batches != sequences ||
        grad.bias_heads != call.heads || grad.bias_keys == 1)
        return false;
    return grad.bias_queries == 1 || warpgroup::has_bias_units(grad.dbias, call.q.dtype);
}

namespace {

constexpr Index most_elements = Index(1) << 28;  // of stored ds: 512 MiB

}  // namespace

// ds is computed once more where a launch would have too few blocks to fill the card, where few keys are seen, and with
// few channels: that takes less time.
ScorePlan plan_scores(const engines::AttentionBackward& of) {
    const auto& [in, options, execution, grad, handover] = of;
    // Blocks of a causal call differ in length: several for each multiprocessor even that out.
    const Index least_blocks = options.causal == core::Causal::none ? 120 : 256;
    const Index Lq = in.q.shape[1], H = in.q.shape[2], Lk = in.k.shape[1], Hk = in.k.shape[2];
    const Index channels = std::max(in.q.shape[3], in.v.shape[3]);
    const bool is_plain = !in.mask && !in.alibi_slopes && !in.bias_slopes && options.softcap == 0 &&
                          options.scale > 0 && options.top_w < 0 && options.window_left < 0 && options.window_right < 0;
    if (!is_whole(in) || !is_plain || !grad.dq || !(grad.dk || grad.dv) || (grad.dbias && grad.dbias.shape[2] != 1) ||
        in.q.dtype != DType::bf16 || channels <= 64 || channels > 128 || level_of(in.q.device) != Level::sm_90a)
        return {};
    ScorePlan plan;
    plan.row = (Lk + 7) / 8 * 8;
    const Index of_key_head = H / std::max(Hk, Index(1)) * Lq * plan.row, sequences = core::sequence_count(in);
    if (of_key_head == 0 || of_key_head > most_elements) return {};
    const Index fitting = most_elements / of_key_head;
    if (fitting >= Hk) {
        plan.key_heads = Hk;
        plan.sequences = std::min({sequences, fitting / Hk, AttentionSequences::most});
    } else {
        const Index turns = (Hk + fitting - 1) / fitting;
        plan.key_heads = (Hk + turns - 1) / turns;
        plan.sequences = 1;
    }
    const Index blocks = plan.sequences * plan.key_heads * ((Lk + warpgroup_rows - 1) / warpgroup_rows);
    if (plan.sequences * plan.key_heads < sequences * Hk && blocks < least_blocks) return {};
    plan.elements = plan.sequences * plan.key_heads * of_key_head;
    return plan;
}

BiasPlan plan_bias(const engines::AttentionBackward& of) {
    const auto& [in, options, execution, grad, handover] = of;
    const bool is_16_bit = in.q.dtype == DType::bf16 || in.q.dtype == DType::f16;
    const bool warpgroups = level_of(in.q.device) == Level::sm_90a;
    if (!grad.dbias || !is_whole(in) || !is_16_bit || options.softcap != 0 || options.top_w >= 0 ||
        std::max(in.q.shape[3], in.v.shape[3]) > warpgroup_backward_channels ||
        !(warpgroups || takes_warps(attention_call(in, options), in.q.device)))
        return {};
    const Index Lq = in.q.shape[1], H = in.q.shape[2], Lk = in.k.shape[1], Hk = in.k.shape[2], N = in.q.shape[0];
    const auto& shape = grad.dbias.shape;
    if (shape[3] != Lk || Lk <= 1 || Lq * H * N == 0) return {};
    if (shape[0] == N && shape[1] == H && !in.bias_slopes) return {};
    BiasPlan plan;
    plan.row = (Lk + 7) / 8 * 8;
    if (shape[2] == 1) {
        if (!warpgroups) return {};
        plan.of_keys = N * H * plan.row;
        return plan;
    }
    const bool all_sequences = shape[0] == 1, all_heads = shape[1] == 1;
    const Index of_key_head = H / Hk * Lq * plan.row, fitting = std::max(most_elements / of_key_head, Index(1));
    if (all_sequences) {
        plan.sequences = std::min({N, fitting, AttentionSequences::most});
        plan.key_heads = std::min(Hk, fitting / plan.sequences);
    } else {
        plan.key_heads = std::min(Hk, fitting);
        plan.sequences = std::min({N, fitting / plan.key_heads, AttentionSequences::most});
    }
    plan.heads_first = all_sequences;
    plan.elements = plan.sequences * plan.key_heads * of_key_head;
    const bool adds_sequences = all_sequences && plan.sequences < N, adds_heads = all_heads && plan.key_heads < Hk;
    if (adds_sequences || adds_heads)
        plan.kept =
            (all_sequences ? 1 : plan.sequences) * (all_heads ? 1 : plan.key_heads * (shape[1] / Hk)) * Lq * plan.row;
    return plan;
}

int planes_of(const core::AttentionInputs& in) {
    for (const core::Tensor* t : {&in.q, &in.k, &in.v})
        if (t->dtype != core::DType::bf16) return 3;
    return 1;
}

namespace {

enum class Way { other, warpgroups, warps, split, decode };

// How a forward call runs, and its memory.
struct ForwardPlan {
    Way way;
    bool wide;  // more channels than tiles have
    ForwardOutputs out;
    DecodeParts decode;
    SplitOperands split{};
    KeptKeys* kept = nullptr;
    Places places{};
};

ForwardPlan plan_of(const engines::AttentionForward& of, const AttentionCall& call, MemoryParts& parts) {
    const core::AttentionInputs& in = of.in;
    ForwardPlan p{};
    p.wide = std::max(call.channels, call.value_channels) > most_tile_channels;
    p.way = takes_decode(call, static_cast<bool>(in.cu_seqlens_q))            ? Way::decode
            : takes_warpgroups(call, in.q.device, warpgroup_forward_channels) ? Way::warpgroups
            : takes_warps(call, in.q.device)                                  ? Way::warps
            : takes_split(in, call, {})                                       ? Way::split
                                                                              : Way::other;
    p.out.o = view_of(of.out.o), p.out.lse = view_of(of.out.lse);
    if (p.way == Way::decode) p.decode = take_decode_parts(call, core::sequence_count(in), parts);
    if (p.way == Way::split) p.split = take_split_operands(in, call, false, parts);
    if (p.way != Way::other) p.out.redo = redo_of_queries(in, parts);
    p.out.redo.early = p.way == Way::warpgroups;
    if (call.top_w >= 0) p.kept = parts.take<KeptKeys>(call.heads * call.total_queries);
    p.places = take_places(in, parts);
    return p;
}

}  // namespace

std::size_t attention_forward_workspace(const engines::AttentionForward& of) {
    const AttentionCall call = attention_call(of.in, of.options);
    return Workspace::with_alignment(bytes_of([&](MemoryParts& parts) { plan_of(of, call, parts); }));
}

void attention_forward(const engines::AttentionForward& of) {
    const core::AttentionInputs& in = of.in;
    const OnDevice device(in.q.device);
    const cudaStream_t stream = stream_of(of.execution);
    AttentionCall call = attention_call(in, of.options);
    const auto plan_in = [&](MemoryParts& parts) { return plan_of(of, call, parts); };
    const Workspace workspace(of.execution, bytes_of(plan_in));
    MemoryParts parts(workspace.data());
    const ForwardPlan plan = plan_in(parts);
    call.kept = plan.kept;
    const AttentionSequences packed = place_packed(in, call, plan.places, stream);
    for_each_sequences(in, call, packed, [&](const AttentionPass& pass) {
        if (plan.kept != nullptr) launch_selection(pass, plan.kept, stream);
        if (plan.way == Way::decode) launch_decode(pass, plan.decode, plan.out, stream);
        if (plan.way == Way::warpgroups) launch_warpgroup_forward(pass, plan.out, stream);
        if (plan.way == Way::warps) launch_warp_forward(pass, plan.out, stream);
        if (plan.way == Way::split) {
            launch_split(pass, plan.split, {}, stream);
            launch_split_forward(pass, plan.split, plan.out, stream);
        }
        if (plan.wide)
            launch_wide_forward(pass, plan.out, stream);
        else
            launch_attention_forward(pass, planes_of(in), plan.out, stream);
    });
}

}  // namespace softdelta::cuda
