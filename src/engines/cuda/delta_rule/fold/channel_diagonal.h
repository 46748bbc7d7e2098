// A block of 16 rows of a chunk against itself, of gates for each channel: the sums over some channels of
//
//     scores   q_i k_j e^(L_i − L_j), j ≤ i        erase   k_i k_j e^(L_i − L_j), j < i
//
// by a warp on matrix products. L: sums of the block's gates up to a row, divided by ln 2.
#pragma once

#include "engines/cuda/delta_rule/chunk.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {
// Where the block's gates together are above −60, decays are taken from the middle, and no exponent is above 30.
constexpr float mildest_total = 60 * 1.44269504F;

template <class T, int K, int sum_row>
struct DiagonalBlock {
    using Keys = KeyTile<T, K>;
    using Block = float[2][4];  // 16 rows and columns, as accumulators lie

    Keys q, k;
    const float *sums, *totals;  // of the block, rows sum_row apart
    int block, lane;

    // Channels [16·first, 16·last), of a total above −mildest_total each.
    __device__ void multiply(int first, int last, Block& scores, Block& erase) const {
        Block of_q = {}, of_k = {};
        float own[2] = {};  // rows with themselves: nothing decays, and nothing is rounded
#pragma unroll 1
        for (int depth = first; depth < last; ++depth) {
            std::uint32_t q_left[4], k_left[4], right[4];
            q.load_left(q_left, 16 * block, depth, lane);
            k.load_left(k_left, 16 * block, depth, lane);
            float2 L[4];
            load_sums(depth, L);
            unrolled<4>([&](int i) {
                const float2 total = *reinterpret_cast<const float2*>(totals + channel(depth, i));
                const float x = L[i].x - 0.5F * total.x, y = L[i].y - 0.5F * total.y;
                const float2 decay = {ptx::exp2(x), ptx::exp2(y)}, rise = {ptx::exp2(-x), ptx::exp2(-y)};
                const float2 of_q_pair = ptx::unpack(q_left[i], T()), of_k_pair = ptx::unpack(k_left[i], T());
                own[i % 2] += of_q_pair.x * of_k_pair.x + of_q_pair.y * of_k_pair.y;
                q_left[i] = ptx::pack(of_q_pair.x * decay.x, of_q_pair.y * decay.y, T());
                k_left[i] = ptx::pack(of_k_pair.x * decay.x, of_k_pair.y * decay.y, T());
                right[i] = ptx::pack(of_k_pair.x * rise.x, of_k_pair.y * rise.y, T());
            });
            multiply_block(of_q, q_left, right, true);
            multiply_block(of_k, k_left, right, true);
        }
        for (float& x : own) x = sum_of_lanes<4>(x);
        take_triangles([&](int n, int e, int apart) { return apart == 0 ? own[e / 2] : of_q[n][e]; },
                       [&](int n, int e, int) { return of_k[n][e]; }, scores, erase);
    }

    // By halves, where no exponent is positive: rows i of the second, j of the first, a the last row of the first:
    // (q e^(L_i − L_a)) (k e^(L_a − L_j))ᵀ, and each half likewise, down to single rows.
    __device__ void multiply_by_halves(int first, int last, Block& scores, Block& erase) const {
        constexpr int levels = 4;  // halves of 8, 4, 2, 1 rows
        Block of_q[levels + 1] = {}, of_k[levels] = {};
#pragma unroll 1
        for (int depth = first; depth < last; ++depth) {
            std::uint32_t q_left[4], k_left[4];
            q.load_left(q_left, 16 * block, depth, lane);
            k.load_left(k_left, 16 * block, depth, lane);
            multiply_block(of_q[levels], q_left, k_left, true);
            float2 L[4], q_pair[4], k_pair[4];
            load_sums(depth, L);
            unrolled<4>([&](int i) {
                q_pair[i] = ptx::unpack(q_left[i], T());
                k_pair[i] = ptx::unpack(k_left[i], T());
            });
            unrolled<levels>([&](int level) {
                const int half = 8 >> level;
                unrolled<4>([&](int i) {
                    const int last_row = row(i) / (2 * half) * (2 * half) + half - 1;
                    const float2 from = *reinterpret_cast<const float2*>(sums + last_row * sum_row + channel(depth, i));
                    const float x = ptx::exp2(-fabsf(L[i].x - from.x)), y = ptx::exp2(-fabsf(L[i].y - from.y));
                    q_left[i] = ptx::pack(q_pair[i].x * x, q_pair[i].y * y, T());
                    k_left[i] = ptx::pack(k_pair[i].x * x, k_pair[i].y * y, T());
                });
                multiply_block(of_q[level], q_left, k_left, level > 0);
                multiply_block(of_k[level], k_left, k_left, level > 0);
            });
        }
        const auto of_pair = [](const Block* of, int n, int e, int apart) {
            return apart >= 8 ? of[0][n][e] : apart >= 4 ? of[1][n][e] : apart >= 2 ? of[2][n][e] : of[3][n][e];
        };
        take_triangles(
            [&](int n, int e, int apart) { return apart == 0 ? of_q[levels][n][e] : of_pair(of_q, n, e, apart); },
            [&](int n, int e, int apart) { return of_pair(of_k, n, e, apart); }, scores, erase);
    }

  private:
    // Of a left operand's registers.
    __device__ int row(int i) const {
        return lane / 4 + 8 * (i % 2);
    }
    __device__ int channel(int depth, int i) const {
        return 16 * depth + 2 * (lane % 4) + 8 * (i / 2);
    }
    __device__ void load_sums(int depth, float2 (&L)[4]) const {
        unrolled<4>(
            [&](int i) { L[i] = *reinterpret_cast<const float2*>(sums + row(i) * sum_row + channel(depth, i)); });
    }
    // Left operands of rows serve as right ones: rows as columns of the product.
    __device__ static void multiply_block(Block& d, const std::uint32_t (&left)[4], const std::uint32_t (&right)[4],
                                          bool both) {
        ptx::multiply(d[0], left, right[0], right[2], T());
        if (both) ptx::multiply(d[1], left, right[1], right[3], T());
    }
    // score(n, e, i ^ j), key(n, e, i ^ j)
    template <class Score, class Key>
    __device__ void take_triangles(const Score& score, const Key& key, Block& scores, Block& erase) const {
        unrolled<2, 4>([&](int n, int e) {
            const int i = lane / 4 + 8 * (e / 2), j = 8 * n + 2 * (lane % 4) + e % 2;
            scores[n][e] = j > i ? 0.0F : score(n, e, i ^ j);
            erase[n][e] = j >= i ? 0.0F : key(n, e, i ^ j);
        });
    }
};

}  // namespace softdelta::cuda
