// What the backward pass needs of a query row before its tile steps: maximum and lse of its softmax, delta =
// rowsum(do∘o) − dlse, and the gradients of its sink and of a bias that is one number for all its keys.
#pragma once

#include <cmath>

#include "engines/cpu/kernels/attention/blocks.h"
#include "engines/cpu/kernels/attention/scores.h"
#include "engines/cpu/kernels/attention/top_k.h"
#include "engines/cpu/kernels/isa_unit.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr Index prepared_rows = backward_blocks::unit_rows;  // of one call

// A saved lse is rounded to f32, and its rounding error is the relative error of every probability: at 1024 half an
// ulp, 6e-5. A larger one, as of a row that is masked by a finite number, is computed again.
inline constexpr float largest_saved_lse = 1024;

// Scratch of prepare(): a forward pass over rows whose lse is not given, and its result.
struct Prepared {
    std::byte* forward;
    float *o, *maximum, *sum;  // [prepared_rows, row_length(Dv)], [prepared_rows]
    float *row, *other;        // one row of o and of do, or all addends of a row

    static Prepared take(const AttentionHead& head, Scratch& memory) {
        const Index length = round_up(head.value_size, W);
        Prepared m;
        m.forward = memory.take<std::byte>(static_cast<Index>(attention_forward.scratch(head, prepared_rows)));
        m.o = memory.take<float>(prepared_rows * length);
        m.maximum = memory.take<float>(prepared_rows);
        m.sum = memory.take<float>(prepared_rows);
        m.row = memory.take<float>(max(length, round_up(head.top_w >= 0 ? head.keys : 0, W)));
        m.other = memory.take<float>(length);
        return m;
    }
};

inline std::size_t prepare_scratch(const AttentionHead& head) {
    Scratch memory(nullptr);
    Prepared::take(head, memory);
    return memory.used();
}

SOFTDELTA_INLINE float dot(const float* a, const float* b, Index n) {
    F total = splat(0.0F);
    for (Index i = 0; i < n; i += W) total = fma(load(a + i), load(b + i), total);
    return sum(total);
}

// Whether row r can be taken from what a forward pass saved.
inline bool is_saved(const AttentionHead& head, const AttentionOutput& saved, Index r) {
    return saved.o.data != nullptr && saved.lse.data != nullptr && saved.lse.dtype == DType::f32 &&
           std::abs(head_value(head, saved.lse, r)) <= largest_saved_lse;
}

inline void prepare(const AttentionHead& head, const AttentionOutput& saved, const Plane& dlse, Index begin, Index end,
                    std::byte* scratch, const AttentionGradient& gradient) {
    Scratch memory(scratch);
    const Prepared at = Prepared::take(head, memory);
    const Index length = round_up(head.value_size, W);
    if (head.top_w >= 0)
        for (Index r = begin; r < end; ++r) find_top_k(head, r, at.row, gradient.bound + r, gradient.last_tie + r);
    Range again{end, begin};  // rows of the forward pass
    for (Index r = begin; r < end; ++r) {
        gradient.maximum[r] = gradient.delta[r] = 0;
        gradient.lse[r] = infinity;
        const bool alive = sees_any_key(head, r) && sink_of(head, r) != INFINITY;
        if (!alive) {  // probabilities 2^(−∞): where fma rounds twice, a large score less 0 would be ∞ before it
            gradient.maximum[r] = -lowest;
            continue;
        }
        gradient.lse[r] = 0;
        if (gradient.row_bias == nullptr && is_saved(head, saved, r)) continue;
        again = {min(again.begin, r), r + 1};
    }
    if (!again.empty())
        attention_forward.run_partial(head, again.begin, again.end, 0, head.keys, at.forward,
                                      {at.o, at.maximum, at.sum});
    for (Index r = begin; r < end; ++r) {
        if (const Index ahead = r + 2 * packing_distance; ahead < end) {
            prefetch_row(query_row(head, gradient.d_o, ahead), head.value_size);
            if (saved.o.data != nullptr) prefetch_row(query_row(head, saved.o, ahead), head.value_size);
        }
        const float d_lse = dlse.data == nullptr ? 0.0F : head_value(head, dlse, r);
        if (gradient.row_bias != nullptr) gradient.row_bias[r] = 0;
        if (gradient.lse[r] == infinity) {  // lse is the sink, if there is one
            const bool sink = sink_of(head, r) != -INFINITY;
            if (gradient.sink_share != nullptr) gradient.sink_share[r] = sink ? 1.0F : 0.0F;
            if (sink) gradient.delta[r] = -d_lse;
            continue;
        }
        float* o = at.row;
        load_row(query_row(head, gradient.d_o, r), head.value_size, at.other);
        float share = 0;
        if (gradient.row_bias == nullptr && is_saved(head, saved, r)) {
            load_row(query_row(head, saved.o, r), head.value_size, o);
            gradient.lse[r] = log2_e * head_value(head, saved.lse, r);
            gradient.delta[r] = dot(o, at.other, length);
            if (gradient.sink_share != nullptr)
                share = std::exp2(log2_e * static_cast<float>(sink_of(head, r)) - gradient.lse[r]);
        } else {
            const Index i = r - again.begin;
            const RowSoftmax softmax = end_softmax(head, r, at.maximum[i], at.sum[i]);
            const auto keys = static_cast<float>(softmax.keys);
            share = static_cast<float>(softmax.sink);
            gradient.maximum[r] = at.maximum[i];
            gradient.lse[r] = log2_e * static_cast<float>(softmax.lse_over_maximum);
            gradient.delta[r] = dot(at.o + i * length, at.other, length) / at.sum[i] * keys;
            if (gradient.row_bias != nullptr) gradient.row_bias[r] = share * gradient.delta[r] + keys * d_lse;
        }
        if (gradient.sink_share != nullptr) gradient.sink_share[r] = share;
        gradient.delta[r] -= d_lse;
    }
}

// What row r adds to the gradient of its head's sink, and of a bias that is one number for all its keys:
//     Σ_j p_j (dp_j − delta) = share of the keys·dlse + share of the sink·rowsum(do∘o)
// Without dlse rowsum(do∘o) is delta; without a sink the keys' share is 1 and the sum is dlse.
inline RowGradient row_gradient(const AttentionHead& head, const Plane& dlse, const AttentionGradient& gradient,
                                Index r) {
    const float share = gradient.sink_share == nullptr ? 0.0F : gradient.sink_share[r];
    const float sink = share == 0.0F ? 0.0F : share * gradient.delta[r];
    if (gradient.lse[r] == infinity) return {-sink, 0};  // no keys
    const float slope = head.bias_slope.data == nullptr ? 1.0F : head_value(head, head.bias_slope, r);
    if (gradient.row_bias != nullptr) return {-sink, slope * gradient.row_bias[r]};
    return {-sink, slope * (head.sink.data == nullptr && dlse.data != nullptr ? head_value(head, dlse, r) : sink)};
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
