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

// The same of 16 columns, to memory.
__device__ inline void keep_sum_of_rows(const float (&x)[4], int lane, float* columns) {
    const float sum = sum_of_rows(x[0], x[1], x[2], x[3], lane);
    if ((lane & 4) == 0) columns[8 * (lane / 16) + lane / 8 % 2 + 2 * (lane % 4)] = sum;
}

// The sums of 16 columns, of two tiles of 8 whose rows are multiplied by `factor`.
__device__ inline void sum_columns(const float (&first)[4], const float (&second)[4], const float (&factor)[2],
                                   int lane, float* columns) {
    float x[4];
    unrolled<4>([&](int i) {
        const float(&of)[4] = i < 2 ? first : second;
        x[i] = fmaf(factor[1], of[2 + i % 2], factor[0] * of[i % 2]);
    });
    keep_sum_of_rows(x, lane, columns);
}

// Of t, a warp's block of 16 rows by `blocks` blocks of 16 columns, the first of them number `first`:
//     pairs[s] = Σ_(i ≥ s) r_i(s), i > s where `exclusive`, and r_i(s) = Σ_(j < s) t_ij over these columns
// by a product of t, as two planes (split: as f32 numbers), and a matrix of ones and zeros. And sums of whole columns,
// for the gates of blocks before this one.
template <int blocks, bool split = false>
__device__ inline void sum_spans(const float (&t)[2 * blocks][4], int block, int first, bool exclusive, int lane,
                                 float* pairs, float* columns) {
    using Plane = __nv_bfloat16;
    const int r = lane / 4, c = 2 * (lane % 4);
    float of_rows[2][4] = {}, sums[4];
    unrolled<blocks>([&](int depth) {
        const int at = first + depth;
        if constexpr (split) {
            Operand<float> numbers, ones;
            unrolled<2, 4>([&](int n, int e) {
                numbers[4 * n + e] = __float_as_uint(t[2 * depth + n][e]);
                const int s = 8 * n + r, j = c + e % 2 + e / 2 * 8;
                ones[4 * n + e] = at < block || j < s ? 0x3f800000u : 0u;
            });
            return multiply<float>(of_rows[0], of_rows[1], numbers, ones);
        }
        std::uint32_t planes[2][4];
        to_left_planes(t + 2 * depth, planes);
        unrolled<2>([&](int n) {
            constexpr std::uint32_t one = 0x3f80;
            const auto ones = [&](int j) {
                const int s = 8 * n + r;
                return (at < block || j < s ? one : 0) | (at < block || j + 1 < s ? one << 16 : 0);
            };
            const std::uint32_t low = ones(c), high = ones(c + 8);
            unrolled<2>([&](int p) { ptx::multiply(of_rows[n], planes[p], low, high, Plane()); });
        });
    });
    unrolled<4>([&](int i) {
        const int s = 8 * (i / 2) + c + i % 2;
        const auto spans = [&](int row) { return exclusive ? row > s : row >= s; };
        sums[i] = (spans(r) ? of_rows[i / 2][i % 2] : 0.0F) + (spans(r + 8) ? of_rows[i / 2][2 + i % 2] : 0.0F);
    });
    keep_sum_of_rows(sums, lane, pairs);
    unrolled<blocks>([&](int n) {
        float x[4];
        unrolled<4>([&](int i) { x[i] = t[2 * n + i / 2][i % 2] + t[2 * n + i / 2][2 + i % 2]; });
        keep_sum_of_rows(x, lane, columns + 16 * n);
    });
}

// Of t, the block on the diagonal, where the lane's rows have `before` in all columns before the block:
//     pairs[s] = Σ_(i ≥ s) r_i(s), i > s where `exclusive`, and r_i(s) = before_i + Σ_(j < s) t_ij
// by a product of t, as two planes, and a matrix of ones and zeros.
__device__ inline void sum_diagonal_spans(const float (&t)[2][4], const float (&before)[2], bool exclusive, int lane,
                                          float* pairs) {
    using Plane = __nv_bfloat16;
    const int r = lane / 4, c = 2 * (lane % 4);
    std::uint32_t planes[2][4];
    to_left_planes(t, planes);
    float sums[4];
    unrolled<2>([&](int n) {
        constexpr std::uint32_t one = 0x3f80;
        const int s = 8 * n + r;
        const auto ones = [&](int j) { return (j < s ? one : 0) | (j + 1 < s ? one << 16 : 0); };
        const std::uint32_t low = ones(c), high = ones(c + 8);
        float of_rows[4] = {before[0], before[0], before[1], before[1]};
        unrolled<2>([&](int p) { ptx::multiply(of_rows, planes[p], low, high, Plane()); });
        unrolled<2>([&](int i) {
            const int column = 8 * n + c + i;
            const auto spans = [&](int row) { return exclusive ? row > column : row >= column; };
            sums[2 * n + i] = (spans(r) ? of_rows[i] : 0.0F) + (spans(r + 8) ? of_rows[2 + i] : 0.0F);
        });
    });
    keep_sum_of_rows(sums, lane, pairs);
}

// Σ x∘y over the 16 bytes that each lane has of both, added to what diagonal_sum() reads: of products of rows (a row
// for four neighbouring lanes) those of a row with itself.
template <class T>
__device__ inline void add_dot(const uint4& x, const uint4& y, float (&sums)[4]) {
    const std::uint32_t first[4] = {x.x, 0, x.y, 0}, second[4] = {x.z, 0, x.w, 0};
    ptx::multiply(sums, first, y.x, y.y, T());
    ptx::multiply(sums, second, y.z, y.w, T());
}
// Whether the lane has the sum of its row, lane / 4, and that sum, or 0.
__device__ inline bool has_diagonal_sum(int lane) {
    return lane / 4 / 2 == lane % 4;
}
__device__ inline float diagonal_sum(const float (&sums)[4], int lane) {
    return !has_diagonal_sum(lane) ? 0.0F : lane / 4 % 2 == 0 ? sums[0] : sums[1];
}

}  // namespace softdelta::cuda
