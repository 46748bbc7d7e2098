// The end of a chunk's gradients for gates that all channels share, and β's: from sums over channels and pairs of
// tokens.
#pragma once

#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/delta_rule/unfold/places.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

// Of the lane's tokens 2·lane and 2·lane + 1: sums over channels of q∘dq and p∘dp from S, of k∘dk from dS'; and the
// pairs that span them.
struct GateParts {
    float read[2], erase[2], write[2], spans[2];
};

// From the gradient of a gate to that of what the caller gave, `at` there. In branches that are unlikely, so
// that this code does not lie between what every chunk runs: caches of instructions hold what lies together.
__device__ inline double raw_gate_gradient(const DeltaCall& call, Index at, int hv, double dg, double& dA_log) {
    const HeadGate head(call, hv);
    return head.adjoint(call, load(call.g, at), head.bias, dg, dA_log);
}

// dg_s = through + Σ_(i ≥ s) (read_i + erase_i) + Σ_(j < s) write_j + pairs (i ≥ s > j), by a warp; erasing before the
// decay: erase_i of i > s.
__device__ inline void unfold_gates(const ChunkGradients& pass, const ChunkPlace& at, int hv, int lane,
                                    const GateParts& of, float through) {
    const auto& [call, sequences, saved, grad] = pass;
    const bool before_decay = call.erase == core::Erase::from_previous_state;
    float later = of.read[0] + of.erase[0] + of.read[1] + of.erase[1], earlier = of.write[0] + of.write[1];
    unrolled<5>([&](int i) {
        const int lanes = 1 << i;
        const float more = __shfl_down_sync(0xffffffffu, later, lanes);
        if (lane + lanes < 32) later += more;
        const float less = __shfl_up_sync(0xffffffffu, earlier, lanes);
        if (lane >= lanes) earlier += less;
    });
    // Without the lane's own: those of its neighbour.
    const float rest = __shfl_down_sync(0xffffffffu, later, 1), before = __shfl_up_sync(0xffffffffu, earlier, 1);
    later = lane < 31 ? rest : 0.0F;
    earlier = lane > 0 ? before : 0.0F;
    float dg[2];
    const float of_last = of.read[1] + (before_decay ? 0.0F : of.erase[1]);
    dg[1] = later + of_last;
    dg[0] = later + of.read[1] + of.erase[1] + of.read[0] + (before_decay ? 0.0F : of.erase[0]);
    dg[0] += earlier;
    dg[1] += earlier + of.write[0];

    double sum = 0, dA_log = 0;
    const bool raw = call.g && call.raw_gate != core::RawGate::none;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        const int r = 2 * lane + i;
        if (r >= at.rows()) continue;
        double dx = static_cast<double>((i == 0 ? dg[0] + of.spans[0] : dg[1] + of.spans[1]) + through);
        if (raw) [[unlikely]]
            dx = raw_gate_gradient(call, at.row(call.g, hv, r), hv, dx, dA_log);
        if (call.g && grad.dg) store(grad.dg, at.row(grad.dg, hv, r), static_cast<float>(dx));
        sum += dx;
    }
    if (!saved.shares) return;
    sum = sum_of_warp(sum);
    dA_log = sum_of_warp(dA_log);
    if (lane != 0) return;
    saved.shares[(saved.first_slot + at.slot) * saved.heads + hv] = sum;
    saved.shares[(saved.all_slots + saved.first_slot + at.slot) * saved.heads + hv] = dA_log;
}

// Row r, from the gradient of the β that rows are multiplied by.
__device__ inline void unfold_beta(const ChunkGradients& pass, const ChunkPlace& at, int hv, int r, float sum) {
    const auto& [call, sequences, saved, grad] = pass;
    if (r >= at.rows()) return;
    double dbeta = static_cast<double>(sum);
    if (call.raw_beta != core::RawBeta::none) [[unlikely]]
        dbeta = beta_adjoint(call, load(call.beta, at.row(call.beta, hv, r)), dbeta);
    store(grad.dbeta, at.row(grad.dbeta, hv, r), static_cast<float>(dbeta));
}

}  // namespace softdelta::cuda
