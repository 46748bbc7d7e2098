// A chunk token by token in f64, from memory: gates that rise, Inf and NaN. Rare, and slow.
#pragma once

#include "engines/cuda/delta_rule/chunk/folded.h"
#include "engines/cuda/delta_rule/gate.h"

namespace softdelta::cuda {

// A lane's part of Sᵀ as accumulators lie: value columns `column` and column + 8, channels 8·n + 2·(lane % 4) + {0, 1}.
template <int K>
using WideState = double[K / 8][4];

template <int K>
__device__ __attribute__((noinline)) void take_tokens(const DeltaCall* pointer, DeltaSequence s, int hv, Index first,
                                                      int tokens, int column, int lane, const View* o,
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
    for (int i = 0; i < tokens; ++i) {
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
        const auto product = [&](const View& v, Index row, double(&out)[2]) {
            out[0] = out[1] = 0;
            for (int n = 0; n < K / 8; ++n)
                for (int e = 0; e < 2; ++e) {
                    const double x = element(v, row, channel(n, e));
                    out[0] = fma(x, state[n][e], out[0]);
                    out[1] = fma(x, state[n][2 + e], out[1]);
                }
            out[0] = quad_sum(out[0]);
            out[1] = quad_sum(out[1]);
        };
        const auto decay = [&] {
            for (int n = 0; n < K / 8; ++n)
                for (int e = 0; e < 2; ++e) {
                    const int m = channel(n, e);
                    if (m >= call.key_size) continue;
                    double g = 0;
                    if (call.gate == core::Gate::channel && call.g) {
                        const double dt = call.dt_bias
                                              ? static_cast<double>(load(call.dt_bias, (Index(hv) * call.key_size + m) *
                                                                                           call.dt_bias.stride[0]))
                                              : 0.0;
                        g = head.gate(call, load(call.g, at(call.g, hv) + m * call.g.stride[3]), dt);
                    } else {
                        g = head.gate(call, call.g ? load(call.g, at(call.g, hv)) : 0.0F);
                    }
                    const double factor = exp(g > 700 ? 700.0 : g);  // 0·e^g is 0, however large g
                    state[n][e] *= factor;
                    state[n][2 + e] *= factor;
                }
        };
        double erased[2] = {0, 0}, written[2], read[2];
        if (before_decay) product(p, p_row, erased);
        if (call.gate != core::Gate::none) decay();
        if (erases && !before_decay) product(p, p_row, erased);
        const double beta = call.beta && erases ? exact_beta(call, load(call.beta, at(call.beta, hv))) : 1.0;
        for (int e = 0; e < 2; ++e) {
            const double v =
                inside[e] ? static_cast<double>(load(call.v, at(call.v, hv) + (column + 8 * e) * call.v.stride[3]))
                          : 0.0;
            written[e] = erases ? beta * (v - p_norm * erased[e]) : v;
        }
        for (int n = 0; n < K / 8; ++n)
            for (int e = 0; e < 2; ++e) {
                const double k = k_norm * element(call.k, k_row, channel(n, e));
                state[n][e] = fma(k, written[0], state[n][e]);
                state[n][2 + e] = fma(k, written[1], state[n][2 + e]);
            }
        if (!*o) continue;
        product(call.q, q_row, read);
        for (int e = 0; e < 2; ++e)
            if (lane % 4 == 0 && inside[e])
                store(*o, at(*o, hv) + (column + 8 * e) * o->stride[3],
                      static_cast<float>(static_cast<double>(call.scale) * q_norm * read[e]));
    }
}

}  // namespace softdelta::cuda
