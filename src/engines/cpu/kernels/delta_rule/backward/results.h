// From gradients of a chunk's rows, gates and β to the caller's tensors: through l2norm, the raw gate and β's logits
// (docs/math.md, "Preparation").
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/gate.h"
#include "engines/cpu/kernels/delta_rule/chunk/keys.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Σ a∘b in f64.
inline double dot_in_double(const float* a, const float* b, Index n) {
    D first(0.0), second(0.0);
    for (Index m = 0; m < n; m += W) {
        first = first + load_double(a + m) * load_double(b + m);
        second = second + load_double(a + m + double_width) * load_double(b + m + double_width);
    }
    alignas(64) double sums[double_width];
    (first + second).store_aligned(sums);
    for (Index half = double_width / 2; half > 0; half /= 2)
        for (Index i = 0; i < half; ++i) sums[i] += sums[i + half];
    return sums[0];
}

// y = x r, r = (Σx² + 1e-6)^-1/2:  dx = r (dy − y Σ dy∘y) = r (dy − x r² Σ dy∘x). The difference may vanish: its factor
// is kept in two parts. given: the tensor of x; dy [n, K] is overwritten.
inline void store_key_gradient(const DeltaRows& given, const DeltaRows& t, const Tokens& at, Index K, bool l2norm,
                               float* dy, Index row, float* buffer) {
    if (t.data == nullptr) return;
    const Index columns = round_up(K, W);
    prefetch_first(given, at, K);
    prefetch_first(t, at, K);
    for (Index i = 0; i < at.n; ++i) {
        float* d = dy + i * row;
        prefetch_ahead(given, at, i, K);
        prefetch_ahead(t, at, i, K);
        if (l2norm) {
            load_token(given, at, i, K, buffer);
            const double square = dot_in_double(buffer, buffer, columns) + 1e-6;
            const double along = dot_in_double(buffer, d, columns) / square;
            const auto part = static_cast<float>(along);
            const F first = splat(-part), second = splat(static_cast<float>(static_cast<double>(part) - along));
            const F factor = splat(static_cast<float>(1 / __builtin_sqrt(square)));
            for (Index m = 0; m < columns; m += W) {
                const F x = load(buffer + m);
                store(d + m, factor * fma(x, second, fma(x, first, load(d + m))));
            }
        }
        store_token(d, t, at, i, K);
    }
}

// Sums over the tokens of a value head, in f64: dA_log, dg_gamma, ddt_bias [K|1].
constexpr Index gate_sums(Index channels) {
    return 2 + channels;
}

// dg becomes dx, W of them: times the slope dg/dx of raw gates x + bias. In f64: a slope may be beyond f32 where the
// gate wipes the state, and dg is 0.
inline void multiply_by_gate_slopes(const DeltaHeads& heads, double rate, const float* x, const float* bias,
                                    float* dg) {
    const D speed(rate), scale(heads.lower_bound * rate), none(0.0);
    alignas(64) double slope[W];
    for (Index i = 0; i < W; ++i) slope[i] = static_cast<double>(x[i]) + static_cast<double>(bias[i]);
    for (Index i = 0; i < W; i += double_width) {
        const D y = D::load_aligned(slope + i);
        if (heads.raw_gate == core::RawGate::softplus)
            (none - speed * sigmoid(y)).store_aligned(slope + i);
        else
            (scale * sigmoid(speed * y) * sigmoid(none - speed * y)).store_aligned(slope + i);
    }
    for (Index i = 0; i < W; ++i) dg[i] = static_cast<float>(static_cast<double>(dg[i]) * slope[i]);
}

// The way from the gates of a value head to what was given.
class GateAdjoint {
  public:
    // bias: [K], a vector at least; buffer: as much, and n.
    GateAdjoint(const DeltaHeads& heads, const Tokens& at, float* bias, float* buffer, double* sums)
        : heads_(heads),
          at_(at),
          raw_(heads.raw_gate != core::RawGate::none),
          rate_(gate_rate(heads, at.head)),
          bias_(bias),
          buffer_(buffer),
          A_log_sum_(sums),
          gate_sum_(sums + 1),
          bias_sums_(sums + 2) {
        const Index channels = heads.channels();
        load_parameters(heads.dt_bias, at.head, channels, bias);
    }

    // g, dg: [n], or [n, K] in rows of `row`; dg is overwritten.
    void store_to(const DeltaRows& t, const float* g, float* dg, Index row) {
        if (heads_.has_channel_gate())
            store_channels(t, g, dg, row);
        else
            store_shared(t, g, dg);
    }

  private:
    static F first_lanes(F x, Index count) { return select(iota() < splat(static_cast<float>(count)), x, splat(0.0F)); }

    // W elements: dg becomes dx. A gate that wipes the state sends nothing to A_log, however large it is.
    SOFTDELTA_INLINE F pass(float* dg, const float* g, const float* x, const float* bias, Index n) {
        const F d = first_lanes(load(dg), n);
        store(dg, d);
        multiply_by_gate_slopes(heads_, rate_, x, bias, dg);
        const F dx = load(dg);
        if (heads_.raw_gate == core::RawGate::softplus) return select(d == splat(0.0F), splat(0.0F), d * load(g));
        return select(dx == splat(0.0F), splat(0.0F), dx * (load(x) + load(bias)));
    }

    void store_shared(const DeltaRows& t, const float* g, float* dg) {
        const Index n = at_.n;
        F of_A_log = splat(0.0F), all = splat(0.0F);
        if (raw_) {
            alignas(64) float bias[W];
            store(bias, splat(bias_[0]));
            load_numbers(heads_.g, at_, buffer_);
            for (Index i = 0; i < n; i += W) of_A_log = of_A_log + pass(dg + i, g + i, buffer_ + i, bias, n - i);
        }
        for (Index i = 0; i < n; i += W) all = all + first_lanes(load(dg + i), n - i);
        *A_log_sum_ += static_cast<double>(sum(of_A_log));
        *gate_sum_ += static_cast<double>(sum(all));
        *bias_sums_ += static_cast<double>(sum(all));
        if (t.data != nullptr) store_numbers(dg, t, at_);
    }

    void store_channels(const DeltaRows& t, const float* g, float* dg, Index row) {
        const Index n = at_.n, channels = heads_.key_size;
        if (raw_) {
            F of_A_log = splat(0.0F);
            for (Index i = 0; i < n; ++i) {
                load_token(heads_.g, at_, i, channels, buffer_);
                for (Index m = 0; m < channels; m += W)
                    of_A_log = of_A_log + pass(dg + i * row + m, g + i * row + m, buffer_ + m, bias_ + m, channels - m);
            }
            *A_log_sum_ += static_cast<double>(sum(of_A_log));
            for (Index m = 0; m < channels; m += W) {
                F all = splat(0.0F);
                for (Index i = 0; i < n; ++i) all = all + load(dg + i * row + m);
                store(buffer_, all);
                for (Index j = 0; j < W && m + j < channels; ++j) bias_sums_[m + j] += static_cast<double>(buffer_[j]);
            }
        }
        for (Index i = 0; t.data != nullptr && i < n; ++i) store_token(dg + i * row, t, at_, i, channels);
    }

    const DeltaHeads& heads_;
    Tokens at_;
    bool raw_;
    double rate_;
    float *bias_, *buffer_;
    double *A_log_sum_, *gate_sum_, *bias_sums_;
};

// β = c σ(x): dx = dβ·β·σ(−x), where 1 − σ(x) would lose its digits. buffer: n floats twice, whole vectors.
inline void store_beta_gradient(const DeltaHeads& heads, const DeltaRows& t, const Tokens& at, const float* beta,
                                float* dbeta, float* buffer) {
    if (t.data == nullptr) return;
    if (heads.raw_beta != core::RawBeta::none) {
        load_numbers(heads.beta, at, buffer);
        alignas(64) const float zero[W] = {};
        float* rest = buffer + round_up(at.n, W);
        for (Index i = 0; i < at.n; i += W) {
            in_double(
                buffer + i, zero, [](D x) { return sigmoid(D(0.0) - x); }, rest + i, nullptr);
            store(dbeta + i, load(dbeta + i) * load(beta + i) * load(rest + i));
        }
    }
    store_numbers(dbeta, t, at);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
