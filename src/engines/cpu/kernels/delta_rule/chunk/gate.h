// Gates and β of the tokens of a chunk from what the caller gave (docs/math.md, "Preparation").
#pragma once

#include "engines/cpu/kernels/delta_rule/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// e^−750 is 0, in f64 too. Without the bound one gate of −1e30 would cost the later sums all their digits.
inline constexpr float lowest_gate = -750;

// Chunks in which G rises by more go token by token: e^rise multiplies the rounding errors of what erasing cancels.
inline constexpr float highest_rise = 1;

// first + rest ← function(x + bias), W of them; rest may be null.
template <class Function>
SOFTDELTA_INLINE void in_double(const float* x, const float* bias, const Function& function, float* first,
                                float* rest) {
    alignas(64) double wide[W];
    for (Index i = 0; i < W; ++i) wide[i] = static_cast<double>(x[i]) + static_cast<double>(bias[i]);
    for (Index i = 0; i < W; i += double_width) function(D::load_aligned(wide + i)).store_aligned(wide + i);
    for (Index i = 0; i < W; ++i) {
        first[i] = static_cast<float>(wide[i]);
        if (rest != nullptr) rest[i] = static_cast<float>(wide[i] - static_cast<double>(first[i]));
    }
}

// e^A_log, which is bounded: ∞·softplus(x) would be NaN where the other factor is 0.
inline double gate_rate(const DeltaHeads& heads, Index h) {
    const auto A_log = static_cast<double>(parameter_of(heads.A_log, h, 0));
    return __builtin_exp(A_log > 600 ? 600 : A_log);
}

// x [n], whole vectors, from what was given to gates x + rest; rest is left alone where the gates were given. bias: [n]
// They are bounded before they are cut in two parts: what a large number leaves of the first one is large as well.
// Gives where no gate is positive or NaN.
inline Mask make_gates(const DeltaHeads& heads, double rate, const float* bias, Index n, float* x, float* rest) {
    const D bound(heads.lower_bound), speed(rate), lowest(static_cast<double>(lowest_gate));
    const auto bounded = [&](D g) { return select(g < lowest, lowest, g); };
    Mask falls = splat(0.0F) <= splat(0.0F);
    for (Index i = 0; i < n; i += W) {
        float* own_rest = rest == nullptr ? nullptr : rest + i;
        if (heads.raw_gate == core::RawGate::softplus)
            in_double(
                x + i, bias + i, [&](D y) { return bounded(D(0.0) - speed * softplus(y)); }, x + i, own_rest);
        if (heads.raw_gate == core::RawGate::lower_bound)
            in_double(
                x + i, bias + i, [&](D y) { return bounded(bound * sigmoid(speed * y)); }, x + i, own_rest);
        F g = load(x + i);
        g = select(g < splat(lowest_gate), splat(lowest_gate), g);
        store(x + i, g);
        falls = falls & (g <= splat(0.0F));
    }
    return falls;
}

// Gates of the tokens: shared by the channels out[n]; channel gates rows of K, `row` apart. Raw ones are out + rest,
// unless rest is null. Whole vectors are written; beyond K they are 0, beyond n they mean nothing. bias: [K], a vector
// at least, for a moment. Gives whether no gate is positive or NaN; it may say no where only elements beyond K or n
// are.
inline bool load_gates(const DeltaHeads& heads, const Tokens& at, Index row, float* bias, float* out,
                       float* rest = nullptr) {
    const bool raw = heads.raw_gate != core::RawGate::none;
    const double rate = raw ? gate_rate(heads, at.head) : 1;
    const bool channel = heads.has_channel_gate();
    const Index channels = channel ? heads.key_size : 1;
    load_parameters(heads.gate_bias, at.head, channels, bias);
    Mask falls = splat(0.0F) <= splat(0.0F);
    if (channel) {
        for (Index i = 0; i < at.n; ++i) {
            float* g = out + i * row;
            float* g_rest = rest == nullptr ? nullptr : rest + i * row;
            load_token(heads.g, at, i, channels, g);
            if (!heads.g.has(at.begin + i)) {
                for (Index m = 0; rest != nullptr && m < channels; m += W) store(g_rest + m, splat(0.0F));
            } else {
                falls = falls & make_gates(heads, rate, bias, channels, g, g_rest);
            }
            for (Index m = channels; m < round_up(channels, W); ++m) {
                g[m] = 0;
                if (rest != nullptr) g_rest[m] = 0;
            }
        }
    } else if (heads.g.data != nullptr) {
        load_numbers(heads.g, at, out);
        for (Index m = 1; m < W; ++m) bias[m] = bias[0];
        for (Index i = 0; i < at.n; i += W)
            falls = falls & make_gates(heads, rate, bias, W, out + i, rest == nullptr ? nullptr : rest + i);
        for (Index i = 0; heads.g.steps > 1 && i < at.n; ++i) {
            if (heads.g.has(at.begin + i)) continue;
            out[i] = 0;
            if (rest != nullptr) rest[i] = 0;
        }
    } else {
        const float gamma = parameter_of(heads.g_gamma, at.head, 0);
        for (Index i = 0; i < at.n; ++i)
            out[i] = !heads.g.has(at.begin + i) ? 0 : gamma < lowest_gate ? lowest_gate : gamma;
        return gamma <= 0;
    }
    return all(falls);
}

// The first tokens, between any two of which G rises by no more than highest_rise, so that the chunk form is accurate.
// A gate that is NaN or ∞ ends them where there is one for each channel: about an anchor it would reach earlier tokens.
// Gates that the channels share never do, and such a one is passed over.
inline Index count_steady(const DeltaHeads& heads, const float* g, Index row, Index n) {
    if (!heads.has_channel_gate()) {
        float above_lowest = 0;
        for (Index i = 0; i < n; ++i) {
            if (!(g[i] < __builtin_inff())) continue;
            above_lowest = (above_lowest > 0 ? above_lowest : 0) + g[i];
            if (above_lowest > highest_rise) return i;
        }
        return n;
    }
    for (Index m = 0; m < heads.key_size; m += W) {
        F above_lowest = splat(0.0F);
        for (Index i = 0; i < n; ++i) {
            above_lowest = max(above_lowest, splat(0.0F)) + load(g + i * row + m);
            if (!all(above_lowest <= splat(highest_rise))) n = i;
        }
    }
    return n;
}

// β of the tokens: out[n], whole vectors; 1 when not given.
inline void load_beta(const DeltaHeads& heads, const Tokens& at, float* out) {
    if (heads.beta.data == nullptr) {
        for (Index i = 0; i < at.n; i += W) store(out + i, splat(1.0F));
        return;
    }
    load_numbers(heads.beta, at, out);
    if (heads.raw_beta == core::RawBeta::none) return;
    alignas(64) const float zero[W] = {};
    const D most(heads.raw_beta == core::RawBeta::logits ? 1.0 : 2.0);
    for (Index i = 0; i < at.n; i += W)
        in_double(
            out + i, zero, [&](D x) { return most * sigmoid(x); }, out + i, nullptr);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
