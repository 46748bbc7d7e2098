// dS over a chunk token by token in f64, from its end to its start (tokens/chunk.h is the way forward).
#pragma once

#include "engines/cuda/delta_rule/tokens/chunk.h"

namespace softdelta::cuda {

// A lane's part of dSᵀ as accumulators lie; dS += q doᵀ, dw = dSᵀ k, dS ← e^g∘(dS − p (β dw)ᵀ).
template <int K>
__device__ __attribute__((noinline)) void take_tokens_back(const DeltaCall* pointer, const View* d_o, DeltaSequence s,
                                                           int hv, Index first, int tokens, int column, int lane,
                                                           WideState<K>& state) {
    const DeltaCall& call = *pointer;
    TokenReader<K> t{call, s, hv, lane};
    const bool inside[2] = {column < call.value_size, column + 8 < call.value_size};
    for (int i = tokens; i-- > 0;) {
        t.go_to(s.begin + first + i);
        double read[2], dwritten[2] = {0, 0};
        for (int e = 0; e < 2; ++e)
            read[e] =
                inside[e] && *d_o ? static_cast<double>(call.scale) * t.q_norm * t.value(*d_o, column + 8 * e) : 0.0;
        t.each_channel([&](int m, int n, int e) {
            const double q = t.element(call.q, t.q_row, m), k = t.element(call.k, t.k_row, m);
            for (int j = 0; j < 2; ++j) {
                state[n][2 * j + e] = fma(q, read[j], state[n][2 * j + e]);
                dwritten[j] = fma(k, state[n][2 * j + e], dwritten[j]);
            }
        });
        const double beta = t.beta();
        for (double& x : dwritten) x = sum_of_lanes<4>(x) * t.k_norm * beta * t.p_norm;
        t.each_channel([&](int m, int n, int e) {
            if (m >= call.key_size) return;
            const double factor = t.decay(m), p_m = t.element(t.p, t.p_row, m);
            for (int j = 0; j < 2; ++j) {
                double& x = state[n][2 * j + e];
                if (!t.erases)
                    x *= factor;
                else
                    x = t.before_decay ? fma(-p_m, dwritten[j], factor * x) : factor * fma(-p_m, dwritten[j], x);
            }
        });
    }
}

}  // namespace softdelta::cuda
