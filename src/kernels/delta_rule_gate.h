// Gates and β of the tokens of a chunk from what the caller gave (docs/math.md, "Preparation").
#pragma once

#include "kernels/delta_rule.h"
#include "kernels/pack.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// e^−750 is 0. Without the bound one gate of −1e30 would cost the later sums all their digits.
inline constexpr float lowest_gate = -750;

// Chunks in which G rises by more go token by token: e^rise multiplies the rounding errors of what erasing cancels.
inline constexpr float highest_rise = 1;

SOFTDELTA_INLINE F sigmoid(F x) {
    const F e = exp(splat(0.0F) - xsimd::abs(x));
    return xsimd::select(x < splat(0.0F), e, splat(1.0F)) / (splat(1.0F) + e);
}

// max(x, 0) + log(1 + e^−|x|); log(1 + u) = 2 atanh(u / (2 + u)), a series whose square is at most 1/9.
SOFTDELTA_INLINE F softplus(F x) {
    const F u = exp(splat(0.0F) - xsimd::abs(x));
    const F s = u / (splat(2.0F) + u);
    const F y = s * s;
    F series = splat(2.0F / 15);
    for (const float coefficient : {2.0F / 13, 2.0F / 11, 2.0F / 9, 2.0F / 7, 2.0F / 5, 2.0F / 3, 2.0F})
        series = fma(series, y, splat(coefficient));
    return fma(s, series, xsimd::select(x < splat(0.0F), splat(0.0F), x));
}

// Head h, token i of a tensor; elements `step` apart.
inline Row row_at(const DeltaRows& t, Index h, Index i, Index step) {
    const Index at = (h * t.head + i * t.row) * static_cast<Index>(core::size_of(t.dtype));
    return {static_cast<std::byte*>(t.data) + at, t.dtype, step};
}

// A number of head h; `absent` when not given.
inline float number_at(const DeltaRows& t, Index h, float absent) {
    alignas(64) float x[W] = {absent};
    if (t.data != nullptr) load_row(row_at(t, h, 0, 1), 1, x);
    return x[0];
}

// Tokens [begin, begin + n) of a head, a value head unless said otherwise.
struct Tokens {
    Index head, begin, n;
};

// x [n], whole vectors of them, from what was given to gates.
inline void make_gates(const DeltaHeads& head, float rate, const float* bias, Index bias_step, float* x, Index n) {
    for (Index i = 0; i < n; i += W) {
        F g = load(x + i);
        if (head.raw_gate != core::RawGate::none) {
            g = g + (bias_step == 0 ? splat(bias[0]) : load(bias + i));
            if (head.raw_gate == core::RawGate::softplus)
                g = splat(-rate) * softplus(g);
            else
                g = splat(head.lower_bound) * sigmoid(splat(rate) * g);
        }
        store(x + i, xsimd::select(g < splat(lowest_gate), splat(lowest_gate), g));
    }
}

// Gates of the tokens: shared by the channels out[n]; channel gates rows of K, `row` apart. Whole vectors are written;
// beyond K they are 0, beyond n they mean nothing. bias: K|1 floats and up to a vector more, for a moment.
inline void load_gates(const DeltaHeads& head, const Tokens& at, Index row, float* bias, float* out) {
    const float rate = maximum(exp(splat(number_at(head.A_log, at.head, 0))));
    const bool channel = head.has_channel_gate();
    const Index channels = channel ? head.key_size : 1;
    for (Index m = 0; m < round_up(channels, W); ++m) bias[m] = 0;
    if (head.dt_bias.data != nullptr) load_row(row_at(head.dt_bias, at.head, 0, head.dt_bias.column), channels, bias);
    if (channel) {
        for (Index i = 0; i < at.n; ++i) {
            load_row(row_at(head.g, at.head, at.begin + i, head.g.column), channels, out + i * row);
            make_gates(head, rate, bias, 1, out + i * row, channels);
            for (Index m = channels; m < round_up(channels, W); ++m) out[i * row + m] = 0;
        }
    } else if (head.g.data != nullptr) {
        load_row(row_at(head.g, at.head, at.begin, head.g.row), at.n, out);
        make_gates(head, rate, bias, 0, out, at.n);
    } else {
        const float gamma = number_at(head.g_gamma, at.head, 0);
        for (Index i = 0; i < at.n; ++i) out[i] = gamma < lowest_gate ? lowest_gate : gamma;
    }
}

// Whether G rises by no more than highest_rise between any two tokens.
inline bool is_steady(const float* g, Index row, Index n, Index channels) {
    F rise = splat(0.0F);
    if (channels == 1) {
        float above_lowest = 0, highest = 0;
        for (Index i = 0; i < n; ++i) {
            above_lowest = (above_lowest > 0 ? above_lowest : 0) + g[i];
            highest = above_lowest > highest ? above_lowest : highest;
        }
        return highest <= highest_rise;
    }
    F largest = splat(0.0F);
    for (Index i = 0; i < n; ++i)
        for (Index m = 0; m < channels; m += W) largest = xsimd::max(largest, load(g + i * row + m));
    if (maximum(largest) <= 0) return true;
    for (Index m = 0; m < channels; m += W) {
        F above_lowest = splat(0.0F);
        for (Index i = 0; i < n; ++i) {
            above_lowest = xsimd::max(above_lowest, splat(0.0F)) + load(g + i * row + m);
            rise = xsimd::max(rise, above_lowest);
        }
    }
    return maximum(rise) <= highest_rise;
}

// β of the tokens: out[n], whole vectors; 1 when not given.
inline void load_beta(const DeltaHeads& head, const Tokens& at, float* out) {
    if (head.beta.data == nullptr) {
        for (Index i = 0; i < at.n; i += W) store(out + i, splat(1.0F));
        return;
    }
    load_row(row_at(head.beta, at.head, at.begin, head.beta.row), at.n, out);
    if (head.raw_beta == core::RawBeta::none) return;
    const F most = splat(head.raw_beta == core::RawBeta::logits ? 1.0F : 2.0F);
    for (Index i = 0; i < at.n; i += W) store(out + i, most * sigmoid(load(out + i)));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
