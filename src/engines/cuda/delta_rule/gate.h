// Gates and β of a token from what the caller gave.
#pragma once

#include "engines/cuda/delta_rule/call.h"
#include "engines/cuda/tile/ptx.h"
#include "engines/cuda/tile/unroll.h"

namespace softdelta::cuda {

__device__ inline float sigmoid(float x) {
    const float e = expf(-fabsf(x));  // no exponential of a positive number
    return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}

__device__ inline float softplus(float x) {
    return fmaxf(x, 0.0F) + log1pf(expf(-fabsf(x)));
}

constexpr float log2_e = 1.44269504F;

// e^x where 16 bits are kept of what it multiplies.
__device__ inline float fast_exp(float x) {
    return ptx::exp2(x * log2_e);
}

// σ(x) and log(1 + e^x) to within a few ulps, by short exponentials and logarithms.
__device__ inline float fast_sigmoid(float x) {
    const float e = fast_exp(-fabsf(x));
    return __fdividef(x >= 0 ? 1.0F : e, 1 + e);
}
__device__ inline float fast_softplus(float x) {
    const float e = fast_exp(-fabsf(x));
    return fmaxf(x, 0.0F) + (e < 0.01F ? e * (1 - e * (0.5F - e * (1.0F / 3))) : __logf(1 + e));
}

// σ(x) and log(1 + e^x) in f64.
__device__ inline double exact_sigmoid(double x) {
    const double e = exp(-fabs(x));
    return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}
__device__ inline double exact_softplus(double x) {
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

// What all tokens of a value head share. Gates that its channels share are made in f64: e^g multiplies a state at every
// token, and its errors with it.
struct HeadGate {
    float rate = 1;                   // e^A_log
    float constant = 0;               // g_gamma
    double exact_rate = 1, bias = 0;  // of a gate that all channels share

    __device__ HeadGate(const DeltaCall& c, int hv) {
        if (c.raw.A_log) {
            const float A_log = load(c.raw.A_log, hv * c.raw.A_log.stride[0]);
            rate = expf(A_log);
            exact_rate = exp(static_cast<double>(A_log));
        }
        if (c.g_gamma) constant = load(c.g_gamma, hv * c.g_gamma.stride[0]);
        if (c.raw.bias && c.gate != core::Gate::channel)
            bias = static_cast<double>(load(c.raw.bias, hv * c.raw.bias.stride[0]));
    }

    // From what the caller gave for a token; dt: the bias of its channel.
    __device__ double gate(const DeltaCall& c, float given, double dt) const {
        if (!c.g) return static_cast<double>(constant);
        if (c.raw_gate == core::RawGate::none) return static_cast<double>(given);
        const double x = static_cast<double>(given) + dt;
        if (c.raw_gate == core::RawGate::softplus) return -exact_rate * exact_softplus(x);
        return c.lower_bound * exact_sigmoid(exact_rate * x);
    }
    __device__ double gate(const DeltaCall& c, float given) const { return gate(c, given, bias); }

    // Of channel m: the bias of its gate.
    __device__ double bias_of(const DeltaCall& c, int hv, int m) const {
        if (!c.raw.bias || c.gate != core::Gate::channel) return bias;
        return static_cast<double>(load(c.raw.bias, (Index(hv) * c.key_size + m) * c.raw.bias.stride[0]));
    }
    // e^g. 0·e^g is 0, however large g: e^700 times any other number of f32 is beyond f32.
    __device__ static double decay(double g) { return exp(g > 700 ? 700.0 : g); }

    // The adjoint, from dg to dx; adds the part of dA_log. A derivative that has vanished beats the infinite argument
    // that it belongs to.
    __device__ double adjoint(const DeltaCall& c, float given, double dt, double dg, double& dA_log) const {
        const auto product = [](double derivative, double x) { return derivative == 0 ? 0 : derivative * x; };
        if (c.raw_gate == core::RawGate::none) return dg;
        const double x = static_cast<double>(given) + dt;
        if (c.raw_gate == core::RawGate::softplus) {
            dA_log += product(dg, -exact_rate * exact_softplus(x));
            return -exact_rate * exact_sigmoid(x) * dg;
        }
        const double y = exact_rate * x;
        const double dx = dg * c.lower_bound * exact_sigmoid(y) * exact_sigmoid(-y) * exact_rate;
        dA_log += product(dx, x);
        return dx;
    }
};

// dg of tokens from the last of a chunk backwards, of a channel or of all together; beforehand dg is rowsum(S∘dS) at
// its end. Terms of a token: written is q∘dq − k∘dk, erased p∘dp.
struct GateSweep {
    double dg, sum = 0, dA_log = 0;

    // The gradient of what the caller gave.
    __device__ double take(const DeltaCall& c, const HeadGate& head, float given, double dt, double written,
                           double erased) {
        const bool before_decay = c.erase == core::Erase::from_previous_state;
        dg += before_decay ? written : written + erased;
        double dx = dg;
        if (c.g) {
            if (exp(head.gate(c, given, dt)) == 0) dg = 0;  // the state is gone, and what rounding left of it
            dx = head.adjoint(c, given, dt, dg, dA_log);
        }
        sum += dx;
        if (before_decay) dg += erased;
        return dx;
    }
};

// Gates of token t, channels [first, first + n), of which `size` exist; one for gates that a head's channels share.
template <int n>
__device__ inline void make_gates(const DeltaCall& c, const HeadGate& head, Index batch, Index t, int hv, int first,
                                  int size, float (&g)[n]) {
    const View& from = c.g;
    if (!from) {
        unrolled<n>([&](int m) { g[m] = head.constant; });
        return;
    }
    const Index offset = batch * from.stride[0] + t * from.stride[1] + hv * from.stride[2];
    load_row(from, offset, from.stride[3], first, size, g);
    if (c.raw_gate == core::RawGate::none) return;
    if (c.raw.bias) {
        float bias[n];
        load_row(c.raw.bias, hv * (c.gate == core::Gate::channel ? c.key_size : 1) * c.raw.bias.stride[0],
                 c.raw.bias.stride[0], first, size, bias);
        unrolled<n>([&](int m) { g[m] += bias[m]; });
    }
    const bool bounded = c.raw_gate == core::RawGate::lower_bound;
    unrolled<n>([&](int m) {
        g[m] = bounded ? static_cast<float>(c.lower_bound) * sigmoid(head.rate * g[m]) : -head.rate * softplus(g[m]);
    });
}

__device__ inline float make_beta(const DeltaCall& c, float given) {
    if (c.raw_beta == core::RawBeta::none) return given;
    return (c.raw_beta == core::RawBeta::logits ? 1.0F : 2.0F) * sigmoid(given);
}
__device__ inline double exact_beta(const DeltaCall& c, float given) {
    if (c.raw_beta == core::RawBeta::none) return static_cast<double>(given);
    return (c.raw_beta == core::RawBeta::logits ? 1 : 2) * exact_sigmoid(static_cast<double>(given));
}
// From the gradient of β to that of what the caller gave.
__device__ inline double beta_adjoint(const DeltaCall& c, float given, double dbeta) {
    if (c.raw_beta == core::RawBeta::none) return dbeta;
    return dbeta * (exact_beta(c, given) * exact_sigmoid(-static_cast<double>(given)));
}
__device__ inline float make_beta(const DeltaCall& c, Index batch, Index t, int hv) {
    if (!c.beta) return 1;
    return make_beta(c, load(c.beta, batch * c.beta.stride[0] + t * c.beta.stride[1] + hv * c.beta.stride[2]));
}

}  // namespace softdelta::cuda
