// The fold kernels by kind of gate, and what they share.
#pragma once

#include <cuda_runtime_api.h>

#include "engines/cuda/delta_rule/chunk.h"
#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/tile/registers.h"

namespace softdelta::cuda {
inline Blocks fold_blocks(const ChunkForward& of) {
    return {of.sequences.chunks, of.call.heads, of.sequences.rows_of_grid()};
}

void launch_fold_shared(Level level, const ChunkForward& of, cudaStream_t stream);
void launch_fold_channel(const ChunkForward& of, cudaStream_t stream);

constexpr float highest_rise = 1;  // e^rise multiplies the rounding errors of what erasing cancels

// What the caller gave of two tokens of a chunk, for each lane of a warp: on its way while something else is done.
struct GivenTokens {
    float g[2] = {}, beta[2] = {};

    __device__ GivenTokens(const DeltaCall& call, const DeltaSequence& s, Index c, int hv, int lane) {
        unrolled<2>([&](int i) {
            const Index row = c * chunk_rows + 2 * lane + i;
            if (row >= s.count) return;
            if (call.g && call.gate != core::Gate::none) g[i] = load(call.g, s.row(call.g, row, hv));
            beta[i] = call.beta ? load(call.beta, s.row(call.beta, row, hv)) : 1.0F;
        });
    }
};
// Their β to memory, and sums in f64 of the gates up to each of both that are at least `least`.
struct GateSumsOfTokens {
    double first, second;

    __device__ GateSumsOfTokens(const DeltaCall& call, const HeadGate& head, const GivenTokens& given, int rows,
                                int lane, double least, float (&beta)[chunk_rows]) {
        double g[2];
        float betas[2];
        unrolled<2>([&](int i) {
            const int row = 2 * lane + i;
            g[i] = row < rows && call.gate != core::Gate::none ? head.gate(call, given.g[i]) : 0.0;
            betas[i] = row >= rows ? 0.0F : call.beta ? make_beta(call, given.beta[i]) : 1.0F;
            rise_ += static_cast<float>(fmax(g[i], 0.0));
            beta[row] = betas[i];
        });
        nonfinite_ = any_of<2>([&](int i) { return isnan(g[i]) || !isfinite(betas[i]); });
        const double last = fmax(g[1], least);
        second = running_sum_of_lanes<32>(fmax(g[0], least) + last, lane);
        first = second - last;
    }
    // Whether a number of the lane is not finite, or the chunk's gates rise too far.
    __device__ bool nonfinite() const { return nonfinite_ || !(sum_of_warp(rise_) <= highest_rise); }

  private:
    float rise_ = 0;
    bool nonfinite_;
};

// A tile of 16-bit elements, two neighbours of rows r and r + 8 of each accumulator.
template <class T>
__device__ inline void store_packed(const SquareTile<T>& to, int row, int n, int lane, std::uint32_t low,
                                    std::uint32_t high) {
    *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(row + lane / 4, n) + 4 * (lane % 4))) = low;
    *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(row + lane / 4 + 8, n) + 4 * (lane % 4))) = high;
}
// x [16, 64] to rows [row, row + 16).
template <class T>
__device__ inline void store_products(const SquareTile<T>& to, int row, int lane, const float (&x)[chunk_rows / 8][4]) {
    unrolled<chunk_rows / 8, 2>([&](int n, int half) {
        store_pair(to, row + lane / 4 + 8 * half, 8 * n + 2 * (lane % 4), x[n][2 * half], x[n][2 * half + 1]);
    });
}

// x [16, 64] += rows [row, row + 16) of left·rightᵀ, columns up to their last.
template <class T, class Keys>
__device__ inline void add_keys(const Keys& left, const Keys& right, int row, int lane, float (&x)[chunk_rows / 8][4]) {
#pragma unroll 2
    for (int depth = 0; depth < Keys::units / static_cast<int>(sizeof(T)); ++depth) {
        Operand<T> a, b;
        left.load_left(a, row, depth, lane);
        unrolled_while<chunk_rows / 16>([&](int n) {
            if (16 * n > row) return false;
            right.load_right(b, 16 * n, depth, lane);
            multiply<T>(x[2 * n], x[2 * n + 1], a, b);
            return true;
        });
    }
}
template <class T, class Keys>
__device__ inline void multiply_keys(const Keys& left, const Keys& right, int row, int lane,
                                     float (&x)[chunk_rows / 8][4]) {
    clear(x);
    add_keys<T>(left, right, row, lane, x);
}
// The same; by warpgroups all columns, in the background.
template <class T, bool warpgroups, class Keys>
__device__ inline void begin_multiply_keys(const Keys& left, const Keys& right, int row, int lane,
                                           float (&x)[chunk_rows / 8][4]) {
    if constexpr (warpgroups) {
        ptx::begin_products(x);
        begin_transposed<T>(x, left, right);
        ptx::commit_products();
    } else {
        multiply_keys<T>(left, right, row, lane, x);
    }
}

// The decays between rows, up to the diagonal for scores, below it for L: the warp's 16 rows x of products of keys.
// own: factors of the lane's rows; to_anchor: the same, and the decay from the last row before the warp's; anchors:
// from there to earlier columns, with their norms; within(half, j): from a row to column j of the warp's own, with the
// norm. Whether a row holds Inf or NaN: it shows in the row's product with its own key.
template <class Within>
__device__ inline bool decay_between_rows(bool of_q, int warp, int lane, const float (&own)[2],
                                          const float (&to_anchor)[2], const float* anchors, const Within& within,
                                          float (&x)[chunk_rows / 8][4]) {
    const int row = lane / 4, pair = 2 * (lane % 4);
    float diagonal[2][4] = {};
    unrolled<chunk_rows / 8>([&](int n) {
        float2 factor = {0, 0};
        if (n / 2 < warp) factor = *reinterpret_cast<const float2*>(anchors + 8 * n + pair);
        unrolled<4>([&](int e) {
            if (n / 2 == warp) diagonal[n % 2][e] = x[n][e];
            x[n][e] = n / 2 < warp ? x[n][e] * (to_anchor[e / 2] * (e % 2 == 0 ? factor.x : factor.y)) : 0.0F;
        });
    });
    const bool nonfinite = any_of<2, 4>(
        [&](int n, int e) { return row + 8 * (e / 2) == 8 * n + pair + e % 2 && !isfinite(diagonal[n][e]); });
    unrolled<2, 4>([&](int n, int e) {
        const int i = row + 8 * (e / 2), j = 8 * n + pair + e % 2;
        const float decay = within(e / 2, j);
        diagonal[n][e] = j < i || (of_q && j == i) ? diagonal[n][e] * own[e / 2] * decay : 0.0F;
    });
    unrolled<chunk_rows / 8, 4>([&](int n, int e) {
        if (n / 2 == warp) x[n][e] = diagonal[n % 2][e];
    });
    return nonfinite;
}

}  // namespace softdelta::cuda
