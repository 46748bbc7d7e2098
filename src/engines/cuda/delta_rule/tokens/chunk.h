// A chunk token by token in f64, from memory: gates that rise, Inf and NaN. The state S from its start to its end, or
// dS from its end to its start. Rare, and slow.
#pragma once

#include "engines/cuda/delta_rule/chunk.h"
#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

// A lane's part of Sᵀ as accumulators lie: value columns `column` and column + 8, channels 8·n + 2·(lane % 4) + {0, 1}.
template <int K>
using WideState = double[K / 8][4];

// A token of a value head, as f64, and what its key head has of it. The norms are of the token that it is at.
template <int K>
struct TokenReader {
    const DeltaCall& call;
    const DeltaSequence& s;
    const int hv, lane;
    const HeadGate head{call, hv};
    const View& p = call.own_p ? call.p : call.k;
    const bool erases = call.erase != core::Erase::nothing;
    const bool before_decay = call.erase == core::Erase::from_previous_state;
    Index token = 0;
    Index q_row = 0, k_row = 0, p_row = 0;
    double q_norm = 1, k_norm = 1, p_norm = 1;

    __device__ void go_to(Index t) {
        token = t;
        const int h = call.key_head(hv);
        q_row = at(call.q, h), k_row = at(call.k, h), p_row = at(p, h);
        q_norm = norm(call.q, q_row), k_norm = norm(call.k, k_row), p_norm = norm(p, p_row);
    }
    __device__ Index at(const View& v, int of) const {
        return s.batch * v.stride[0] + token * v.stride[1] + of * v.stride[2];
    }
    // use(channel, n, e) for the lane's channels: elements e and 2 + e of accumulator n.
    template <class Use>
    __device__ void each_channel(const Use& use) const {
        for (int n = 0; n < K / 8; ++n)
            for (int e = 0; e < 2; ++e) use(8 * n + 2 * (lane % 4) + e, n, e);
    }
    __device__ double element(const View& v, Index row, int m) const {
        return m < call.key_size ? static_cast<double>(load(v, row + m * v.stride[3])) : 0.0;
    }
    __device__ double value(const View& v, int column) const {
        return static_cast<double>(load(v, at(v, hv) + column * v.stride[3]));
    }
    __device__ double beta() const {
        return call.beta && erases ? exact_beta(call, load(call.beta, at(call.beta, hv))) : 1.0;
    }
    // e^g of channel m.
    __device__ double decay(int m) const {
        double g = 0;
        if (call.gate == core::Gate::channel && call.g)
            g = head.gate(call, load(call.g, at(call.g, hv) + m * call.g.stride[3]), head.bias_of(call, hv, m));
        else if (call.gate != core::Gate::none)
            g = head.gate(call, call.g ? load(call.g, at(call.g, hv)) : 0.0F);
        return HeadGate::decay(g);
    }
    // The lane's part of a state, by e^g.
    __device__ void decay_state(WideState<K>& state) const {
        if (call.gate == core::Gate::none) return;
        each_channel([&](int m, int n, int e) {
            if (m >= call.key_size) return;
            const double factor = decay(m);
            state[n][e] *= factor;
            state[n][2 + e] *= factor;
        });
    }

  private:
    __device__ double norm(const View& v, Index row) const {
        if (!call.l2norm) return 1.0;
        double sum = 0;
        each_channel([&](int m, int, int) { sum += element(v, row, m) * element(v, row, m); });
        return 1 / sqrt(sum_of_lanes<4>(sum) + 1e-6);
    }
};

template <int K>
__device__ __attribute__((noinline)) void take_tokens(const DeltaCall* pointer, DeltaSequence s, int hv, Index first,
                                                      int tokens, int column, int lane, const View* o,
                                                      WideState<K>& state) {
    const DeltaCall& call = *pointer;
    TokenReader<K> t{call, s, hv, lane};
    const bool inside[2] = {column < call.value_size, column + 8 < call.value_size};
    const auto product = [&](const View& v, Index row, double(&out)[2]) {
        out[0] = out[1] = 0;
        t.each_channel([&](int m, int n, int e) {
            const double x = t.element(v, row, m);
            out[0] = fma(x, state[n][e], out[0]);
            out[1] = fma(x, state[n][2 + e], out[1]);
        });
        out[0] = sum_of_lanes<4>(out[0]);
        out[1] = sum_of_lanes<4>(out[1]);
    };
    for (int i = 0; i < tokens; ++i) {
        t.go_to(s.begin + first + i);
        double erased[2] = {0, 0}, written[2], read[2];
        if (t.before_decay) product(t.p, t.p_row, erased);
        t.decay_state(state);
        if (t.erases && !t.before_decay) product(t.p, t.p_row, erased);
        const double beta = t.beta();
        for (int e = 0; e < 2; ++e) {
            const double v = inside[e] ? t.value(call.v, column + 8 * e) : 0.0;
            written[e] = t.erases ? beta * (v - t.p_norm * erased[e]) : v;
        }
        t.each_channel([&](int m, int n, int e) {
            const double k = t.k_norm * t.element(call.k, t.k_row, m);
            state[n][e] = fma(k, written[0], state[n][e]);
            state[n][2 + e] = fma(k, written[1], state[n][2 + e]);
        });
        if (!*o) continue;
        product(call.q, t.q_row, read);
        for (int e = 0; e < 2; ++e)
            if (lane % 4 == 0 && inside[e])
                store(*o, t.at(*o, hv) + (column + 8 * e) * o->stride[3],
                      static_cast<float>(static_cast<double>(call.scale) * t.q_norm * read[e]));
    }
}

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
        if (t.before_decay) t.decay_state(state);
        if (t.erases)
            t.each_channel([&](int m, int n, int e) {
                if (m >= call.key_size) return;
                const double p = t.element(t.p, t.p_row, m);
                for (int j = 0; j < 2; ++j) state[n][2 * j + e] = fma(-p, dwritten[j], state[n][2 * j + e]);
            });
        if (!t.before_decay) t.decay_state(state);
    }
}

}  // namespace softdelta::cuda
