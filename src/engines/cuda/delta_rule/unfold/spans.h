// What a chunk's pairs of tokens add to the gates between them, for gates that all channels share.
#pragma once

#include "engines/cuda/delta_rule/chunk.h"

namespace softdelta::cuda {

// Sums over the eight lanes that have the same columns; of four, a lane keeps that of 2·(lane / 16) + lane / 8 % 2.
__device__ inline float sum_of_rows(float a, float b, float c, float d, int lane) {
    const bool high = (lane & 16) != 0, second = (lane & 8) != 0;
    const float x = (high ? c : a) + __shfl_xor_sync(0xffffffffu, high ? a : c, 16),
                y = (high ? d : b) + __shfl_xor_sync(0xffffffffu, high ? b : d, 16),
                sum = (second ? y : x) + __shfl_xor_sync(0xffffffffu, second ? x : y, 8);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 4);
}

// Of t, a warp's block of 16 rows by `blocks` blocks of 16 columns, the first of them number `first`:
//     pairs[s] = Σ_(i ≥ s) r_i(s), i > s where `exclusive`, and r_i(s) = Σ_(j < s) t_ij over these columns
// by a product of t, as two planes, and a matrix of ones and zeros. And sums of whole columns, for the gates of blocks
// before this one.
template <int blocks>
__device__ inline void sum_spans(const float (&t)[2 * blocks][4], int block, int first, bool exclusive, int lane,
                                 float* pairs, float* columns) {
    using Plane = __nv_bfloat16;
    const int r = lane / 4, c = 2 * (lane % 4);
    float of_rows[2][4] = {}, sums[4];
#pragma unroll
    for (int depth = 0; depth < blocks; ++depth) {
        const int at = first + depth;
        std::uint32_t planes[2][4];
        to_left_planes(t + 2 * depth, planes);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            constexpr std::uint32_t one = 0x3f80;
            const auto ones = [&](int j) {
                const int s = 8 * n + r;
                return (at < block || j < s ? one : 0) | (at < block || j + 1 < s ? one << 16 : 0);
            };
            const std::uint32_t low = ones(c), high = ones(c + 8);
#pragma unroll
            for (int p = 0; p < 2; ++p) ptx::multiply(of_rows[n], planes[p], low, high, Plane());
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int s = 8 * (i / 2) + c + i % 2;
        const auto spans = [&](int row) { return exclusive ? row > s : row >= s; };
        sums[i] = (spans(r) ? of_rows[i / 2][i % 2] : 0.0F) + (spans(r + 8) ? of_rows[i / 2][2 + i % 2] : 0.0F);
    }
    const int column = 8 * (lane / 16) + lane / 8 % 2 + c;  // what sum_of_rows() leaves the lane
    const bool keeps = (lane & 4) == 0;
    const float sum = sum_of_rows(sums[0], sums[1], sums[2], sums[3], lane);
    if (keeps) pairs[column] = sum;
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&of)[4] = t[2 * n + i / 2];
            x[i] = of[i % 2] + of[2 + i % 2];
        }
        const float whole = sum_of_rows(x[0], x[1], x[2], x[3], lane);
        if (keeps) columns[16 * n + column] = whole;
    }
}

}  // namespace softdelta::cuda
