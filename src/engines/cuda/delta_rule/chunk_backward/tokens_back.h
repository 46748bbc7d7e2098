// dS over a chunk token by token in f64, from its end to its start (chunk/tokens.h is the way forward).
#pragma once

#include "engines/cuda/delta_rule/chunk/tokens.h"

namespace softdelta::cuda {

// A lane's part of dSᵀ as accumulators lie; dS += q doᵀ, dw = dSᵀ k, dS ← e^g∘(dS − p (β dw)ᵀ).
template <int K>
__device__ __attribute__((noinline)) void take_tokens_back(const DeltaCall* pointer, const View* d_o, DeltaSequence s,
                                                           int hv, Index first, int tokens, int column, int lane,
                                                           WideState<K>& state) {
    const DeltaCall& call = *pointer;
    const HeadGate head(call, hv);
    const bool erases = call.erase != core::Erase::nothing;
    const bool before_decay = call.erase == core::Erase::from_previous_state;
    const bool inside[2] = {column < call.value_size, column + 8 < call.value_size};
    const auto quad_sum = [](double x) {
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        return x + __shfl_xor_sync(0xffffffffu, x, 2);
    };
    const auto channel = [&](int n, int e) { return 8 * n + 2 * (lane % 4) + e; };
    for (int i = tokens; i-- > 0;) {
        const Index t = s.begin + first + i;
        const auto at = [&](const View& v, int of) {
            return s.batch * v.stride[0] + t * v.stride[1] + of * v.stride[2];
        };
        const auto element = [&](const View& v, Index row, int m) {
            return m < call.key_size ? static_cast<double>(load(v, row + m * v.stride[3])) : 0.0;
        };
        const auto norm = [&](const View& v, Index row) {
            if (!call.l2norm) return 1.0;
            double sum = 0;
            for (int n = 0; n < K / 8; ++n)
                for (int e = 0; e < 2; ++e) sum += element(v, row, channel(n, e)) * element(v, row, channel(n, e));
            return 1 / sqrt(quad_sum(sum) + 1e-6);
        };
        const View& p = call.own_p ? call.p : call.k;
        const int h = call.key_head(hv);
        const Index q_row = at(call.q, h), k_row = at(call.k, h), p_row = at(p, h);
        const double q_norm = norm(call.q, q_row), k_norm = norm(call.k, k_row), p_norm = norm(p, p_row);
        double read[2], dwritten[2] = {0, 0};
        for (int e = 0; e < 2; ++e)
            read[e] = inside[e] && *d_o
                          ? static_cast<double>(call.scale) * q_norm *
                                static_cast<double>(load(*d_o, at(*d_o, hv) + (column + 8 * e) * d_o->stride[3]))
                          : 0.0;
        for (int n = 0; n < K / 8; ++n)
            for (int e = 0; e < 2; ++e) {
                const double q = element(call.q, q_row, channel(n, e)), k = element(call.k, k_row, channel(n, e));
                for (int j = 0; j < 2; ++j) {
                    state[n][2 * j + e] = fma(q, read[j], state[n][2 * j + e]);
                    dwritten[j] = fma(k, state[n][2 * j + e], dwritten[j]);
                }
            }
        const double beta = call.beta && erases ? exact_beta(call, load(call.beta, at(call.beta, hv))) : 1.0;
        for (double& x : dwritten) x = quad_sum(x) * k_norm * beta * p_norm;
        for (int n = 0; n < K / 8; ++n)
            for (int e = 0; e < 2; ++e) {
                const int m = channel(n, e);
                if (m >= call.key_size) continue;
                double g = 0;
                if (call.gate == core::Gate::channel && call.g) {
                    const double dt = call.dt_bias
                                          ? static_cast<double>(load(
                                                call.dt_bias, (Index(hv) * call.key_size + m) * call.dt_bias.stride[0]))
                                          : 0.0;
                    g = head.gate(call, load(call.g, at(call.g, hv) + m * call.g.stride[3]), dt);
                } else if (call.gate != core::Gate::none) {
                    g = head.gate(call, call.g ? load(call.g, at(call.g, hv)) : 0.0F);
                }
                const double factor = exp(g > 700 ? 700.0 : g), p_m = element(p, p_row, m);
                for (int j = 0; j < 2; ++j) {
                    double& x = state[n][2 * j + e];
                    if (!erases)
                        x *= factor;
                    else
                        x = before_decay ? fma(-p_m, dwritten[j], factor * x) : factor * fma(-p_m, dwritten[j], x);
                }
            }
    }
}

}  // namespace softdelta::cuda
