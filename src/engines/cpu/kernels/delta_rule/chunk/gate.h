// Gates and β of the tokens of a chunk from what the caller gave (docs/math.md, "Preparation").
#pragma once

#include "engines/cpu/kernels/delta_rule/head.h"
#include "engines/cpu/kernels/gemm/pack.h"

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

// Head h, token i of a tensor; elements `step` apart.
inline Row row_at(const DeltaRows& t, Index h, Index i, Index step) {
    const Index at = (h * t.head + i * t.row) * static_cast<Index>(core::size_of(t.dtype));
    return {static_cast<std::byte*>(t.data) + at, t.dtype, step};
}

// The elements from a column on.
inline Row row_from(const DeltaRows& t, Index h, Index i, Index column) {
    const Row row = row_at(t, h, i, t.column);
    const Index bytes = column * t.column * static_cast<Index>(core::size_of(t.dtype));
    return {static_cast<const std::byte*>(row.data) + bytes, row.dtype, row.step};
}

// A number of head h; `absent` when not given.
inline float number_at(const DeltaRows& t, Index h, float absent) {
    alignas(64) float x[W] = {absent};
    if (t.data != nullptr) load_row(row_at(t, h, 0, 1), 1, x);
    return x[0];
}

// e^A_log, which is bounded: ∞·softplus(x) would be NaN where the other factor is 0.
inline double gate_rate(const DeltaHeads& heads, Index h) {
    const auto A_log = static_cast<double>(number_at(heads.A_log, h, 0));
    return __builtin_exp(A_log > 600 ? 600 : A_log);
}

// Tokens [begin, begin + n) of a head, a value head unless said otherwise.
struct Tokens {
    Index head, begin, n;
};

// Rows of a head lie far apart, each in a page of its own: while one is read or written, later ones are asked for.
inline constexpr Index prefetch_distance = 6;

inline void prefetch_token_row(const DeltaRows& t, const Tokens& at, Index i, Index columns) {
    if (t.data != nullptr && t.column == 1 && i < at.n) prefetch_row(row_at(t, at.head, at.begin + i, 1), columns);
}

// The first rows of a tensor, and in a loop over rows i the one to come.
inline void prefetch_first_rows(const DeltaRows& t, const Tokens& at, Index columns) {
    for (Index i = 0; i < prefetch_distance; ++i) prefetch_token_row(t, at, i, columns);
}
inline void prefetch_row_ahead(const DeltaRows& t, const Tokens& at, Index i, Index columns) {
    prefetch_token_row(t, at, i + prefetch_distance, columns);
}

// x [n], whole vectors, from what was given to gates x + rest; rest is left alone where the gates were given. bias: [n]
// They are bounded before they are cut in two parts: what a large number leaves of the first one is large as well.
inline void make_gates(const DeltaHeads& heads, double rate, const float* bias, Index n, float* x, float* rest) {
    const D bound(heads.lower_bound), speed(rate), lowest(static_cast<double>(lowest_gate));
    const auto bounded = [&](D g) { return select(g < lowest, lowest, g); };
    for (Index i = 0; i < n; i += W) {
        float* own_rest = rest == nullptr ? nullptr : rest + i;
        if (heads.raw_gate == core::RawGate::softplus)
            in_double(
                x + i, bias + i, [&](D y) { return bounded(D(0.0) - speed * softplus(y)); }, x + i, own_rest);
        if (heads.raw_gate == core::RawGate::lower_bound)
            in_double(
                x + i, bias + i, [&](D y) { return bounded(bound * sigmoid(speed * y)); }, x + i, own_rest);
        const F g = load(x + i);
        store(x + i, select(g < splat(lowest_gate), splat(lowest_gate), g));
    }
}

// Gates of the tokens: shared by the channels out[n]; channel gates rows of K, `row` apart. Raw ones are out + rest,
// unless rest is null. Whole vectors are written; beyond K they are 0, beyond n they mean nothing. bias: [K], a vector
// at least, for a moment.
inline void load_gates(const DeltaHeads& heads, const Tokens& at, Index row, float* bias, float* out,
                       float* rest = nullptr) {
    const bool raw = heads.raw_gate != core::RawGate::none;
    const double rate = raw ? gate_rate(heads, at.head) : 1;
    const bool channel = heads.has_channel_gate();
    const Index channels = channel ? heads.key_size : 1;
    for (Index m = 0; m < round_up(channels, W); ++m) bias[m] = 0;
    if (heads.dt_bias.data != nullptr)
        load_row(row_at(heads.dt_bias, at.head, 0, heads.dt_bias.column), channels, bias);
    if (channel) {
        for (Index i = 0; i < at.n; ++i) {
            float* g = out + i * row;
            float* g_rest = rest == nullptr ? nullptr : rest + i * row;
            load_row(row_at(heads.g, at.head, at.begin + i, heads.g.column), channels, g);
            make_gates(heads, rate, bias, channels, g, g_rest);
            for (Index m = channels; m < round_up(channels, W); ++m) {
                g[m] = 0;
                if (rest != nullptr) g_rest[m] = 0;
            }
        }
    } else if (heads.g.data != nullptr) {
        load_row(row_at(heads.g, at.head, at.begin, heads.g.row), at.n, out);
        for (Index m = 1; m < W; ++m) bias[m] = bias[0];
        for (Index i = 0; i < at.n; i += W)
            make_gates(heads, rate, bias, W, out + i, rest == nullptr ? nullptr : rest + i);
    } else {
        const float gamma = number_at(heads.g_gamma, at.head, 0);
        for (Index i = 0; i < at.n; ++i) out[i] = gamma < lowest_gate ? lowest_gate : gamma;
    }
}

// Whether G rises by no more than highest_rise between any two tokens, so that the chunk form is accurate. A gate that
// is NaN or ∞ says no where there is one for each channel: about an anchor it would reach earlier tokens. Gates that
// the channels share never do, and such a one is passed over, so that earlier tokens are computed as they are without
// it.
inline bool is_steady(const DeltaHeads& heads, const float* g, Index row, Index n) {
    if (!heads.has_channel_gate()) {
        float above_lowest = 0, highest = 0;
        for (Index i = 0; i < n; ++i) {
            if (!(g[i] < __builtin_inff())) continue;
            above_lowest = (above_lowest > 0 ? above_lowest : 0) + g[i];
            highest = above_lowest > highest ? above_lowest : highest;
        }
        return highest <= highest_rise;
    }
    Mask falls = splat(0.0F) <= splat(0.0F);
    for (Index i = 0; i < n; ++i)
        for (Index m = 0; m < heads.key_size; m += W) falls = falls & (load(g + i * row + m) <= splat(0.0F));
    if (all(falls)) return true;
    Mask steady = splat(0.0F) <= splat(0.0F);
    for (Index m = 0; m < heads.key_size; m += W) {
        F above_lowest = splat(0.0F);
        for (Index i = 0; i < n; ++i) {
            const F x = load(g + i * row + m);
            above_lowest = max(above_lowest, splat(0.0F)) + x;
            steady = steady & (above_lowest <= splat(highest_rise));
        }
    }
    return all(steady);
}

// β of the tokens: out[n], whole vectors; 1 when not given.
inline void load_beta(const DeltaHeads& heads, const Tokens& at, float* out) {
    if (heads.beta.data == nullptr) {
        for (Index i = 0; i < at.n; i += W) store(out + i, splat(1.0F));
        return;
    }
    load_row(row_at(heads.beta, at.head, at.begin, heads.beta.row), at.n, out);
    if (heads.raw_beta == core::RawBeta::none) return;
    alignas(64) const float zero[W] = {};
    const D most(heads.raw_beta == core::RawBeta::logits ? 1.0 : 2.0);
    for (Index i = 0; i < at.n; i += W)
        in_double(
            out + i, zero, [&](D x) { return most * sigmoid(x); }, out + i, nullptr);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
