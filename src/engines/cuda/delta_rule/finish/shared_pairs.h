// The gradients of a chunk's pairs of tokens (shared.cu): P and Q, and what they add to the gates between the tokens.
#pragma once

#include "engines/cuda/delta_rule/finish/shared_copies.h"

namespace softdelta::cuda {

template <class T, int D, bool own_p, bool grouped>
class PairGradients : protected FinishCopies<T, D, own_p, grouped> {
  public:
    using Base = FinishCopies<T, D, own_p, grouped>;
    using Plane = __nv_bfloat16;
    using Base::block_;
    using Base::C;
    using Base::call_;
    using Base::d_o;
    using Base::d_r;
    using Base::erases_;
    using Base::factors;
    using Base::k;
    using Base::keep_row_sums;
    using Base::lane_;
    using Base::p;
    using Base::pairs;
    using Base::q;
    using Base::row;
    using Base::shift;
    using Base::small_;
    using Base::thread_;
    using Base::u;
    using typename Base::Rows;
    using typename Base::Square;

    using Base::Base;

    // Rows of the warp's block, columns of one half, up to the diagonal: x [16, 32] = left · Uᵀ, y = keys · kᵀ
    __device__ void multiply_rows(const Rows& left, const Rows& keys, int half, float (&x)[C / 16][4],
                                  float (&y)[C / 16][4]) const {
#pragma unroll
        for (int n = 0; n < C / 16; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] = y[n][i] = 0;
        if constexpr (grouped) {
            ptx::begin_products(x, y);
#pragma unroll
            for (int depth = 0; depth < D / 16; ++depth) {
                ptx::warpgroup_multiply(x, left.rows_operand(depth), u().rows_operand(depth, 32 * half), true, T());
                ptx::warpgroup_multiply(y, keys.rows_operand(depth), k().rows_operand(depth, 32 * half), true, T());
            }
            ptx::commit_products();
            ptx::wait_for_products<0>(x);
            ptx::keep_registers(y);
            return;
        }
        if (2 * half > block_) return;
#pragma unroll 2
        for (int depth = 0; depth < D / 16; ++depth) {
            std::uint32_t a[4], c[4], b[4];
            left.load_left(a, 16 * block_, depth, lane_);
            keys.load_left(c, 16 * block_, depth, lane_);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if (2 * half + n > block_) break;
                u().load_right(b, 32 * half + 16 * n, depth, lane_);
                ptx::multiply(x[2 * n], a, b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], a, b[2], b[3], T());
                k().load_right(b, 32 * half + 16 * n, depth, lane_);
                ptx::multiply(y[2 * n], c, b[0], b[1], T());
                ptx::multiply(y[2 * n + 1], c, b[2], b[3], T());
            }
        }
    }

    // The block's rows of P or Q, one half of their columns; and what they add to the gates that they span.
    __device__ void make_pairs(int which, int column_half) const {
        const bool of_score = which == 0;
        float x[C / 16][4], y[C / 16][4];
        multiply_rows(of_score ? d_o() : d_r(), of_score ? q() : p(), column_half, x, y);
        const double* G = factors().sums + 1;
        const int back = of_score ? 0 : shift();
        float own[2], to_anchor[2], beta[2];
        double from[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            from[half] = G[row(half) - back];
            own[half] = of_score ? call_.scale : -1.0F;
            beta[half] = of_score ? 1.0F : factors().beta[row(half)];
            to_anchor[half] = own[half] * expf(static_cast<float>(from[half] - factors().sums[16 * block_]));
        }
        const Square to = pairs(which);
#pragma unroll
        for (int n = 0; n < C / 16; ++n) {
            const int tile = C / 16 * column_half + n;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int half = e / 2, i = row(half), j = 8 * tile + 2 * (lane_ % 4) + e % 2;
                if (tile / 2 > block_)
                    x[n][e] = 0;
                else if (tile / 2 < block_)
                    x[n][e] *= to_anchor[half] * small_.anchors[block_][j];
                else
                    x[n][e] = (of_score ? j <= i : j < i)
                                  ? x[n][e] * own[half] * expf(static_cast<float>(from[half] - G[j]))
                                  : 0.0F;
                y[n][e] *= x[n][e] * beta[half];
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(row(half), tile) + 4 * (lane_ % 4))) =
                    ptx::pack(x[n][2 * half], x[n][2 * half + 1], T());
        }
        sum_spans(which, column_half, !of_score && shift() == 1, y);
    }

    // pairs[s] = Σ_(i ≥ s) r_i(s), i > s where erasing comes before the decay, and r_i(s) = Σ_(j < s) t_ij over the
    // columns of this half: t times a matrix of ones and zeros, with t as two planes. And sums of whole columns, for
    // the gates of blocks before this one.
    __device__ void sum_spans(int which, int column_half, bool exclusive, const float (&t)[C / 16][4]) const {
        const int r = lane_ / 4, c = 2 * (lane_ % 4);
        float of_rows[2][4] = {}, sums[4], columns[8];
#pragma unroll
        for (int depth = 0; depth < 2; ++depth) {
            const int at = 2 * column_half + depth;  // a block of columns
            std::uint32_t planes[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&of)[4] = t[2 * depth + i / 2];
                const float x = of[i % 2 * 2], y = of[i % 2 * 2 + 1];
                planes[0][i] = ptx::pack(x, y, Plane());
                const float2 high = ptx::unpack(planes[0][i], Plane());
                planes[1][i] = ptx::pack(x - high.x, y - high.y, Plane());
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                constexpr std::uint32_t one = 0x3f80;
                const auto ones = [&](int j) {
                    const int s = 8 * n + r;
                    return (at < block_ || j < s ? one : 0) | (at < block_ || j + 1 < s ? one << 16 : 0);
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
#pragma unroll
        for (int i = 0; i < 8; ++i) columns[i] = t[i / 2][i % 2] + t[i / 2][2 + i % 2];
        const int column = 8 * (lane_ / 16) + lane_ / 8 % 2 + c;  // what sum_of_rows() leaves the lane
        const float pairs = sum_of_rows(sums[0], sums[1], sums[2], sums[3]),
                    first = sum_of_rows(columns[0], columns[1], columns[2], columns[3]),
                    second = sum_of_rows(columns[4], columns[5], columns[6], columns[7]);
        if ((lane_ & 4) != 0) return;
        small_.pairs[which][column_half][16 * block_ + column] = pairs;
        small_.columns[which][block_][32 * column_half + column] = first;
        small_.columns[which][block_][32 * column_half + 16 + column] = second;
    }
    // Sums over the eight lanes that have the same columns; of four, a lane keeps that of 2·(lane / 16) + lane / 8 % 2.
    __device__ float sum_of_rows(float a, float b, float c, float d) const {
        const bool high = (lane_ & 16) != 0, second = (lane_ & 8) != 0;
        const float x = (high ? c : a) + __shfl_xor_sync(0xffffffffu, high ? a : c, 16),
                    y = (high ? d : b) + __shfl_xor_sync(0xffffffffu, high ? b : d, 16),
                    sum = (second ? y : x) + __shfl_xor_sync(0xffffffffu, second ? x : y, 8);
        return sum + __shfl_xor_sync(0xffffffffu, sum, 4);
    }
    // spans[s]: the block of row s and those after it.
    __device__ void add_later_blocks() const {
        const int r = thread_ / 8, part = thread_ % 8;
        float sum = part < (erases_ ? 4 : 2) ? small_.pairs[part / 2][part % 2][r] : 0.0F;
        for (int which = 0; which < (erases_ ? 2 : 1); ++which)
            for (int block = r / 16 + 1; block < 4; ++block)
                for (int j = part; j < r; j += 8) sum += small_.columns[which][block][j];
        sum = sum_of_lanes<8>(sum);
        if (part == 0) small_.spans[r] = sum;
    }
};

}  // namespace softdelta::cuda
