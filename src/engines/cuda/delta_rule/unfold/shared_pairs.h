// The gradients of a chunk's pairs of tokens (shared_gate.cu): P and Q, and what they add to the gates between the
// tokens.
#pragma once

#include "engines/cuda/delta_rule/unfold/shared_copies.h"
#include "engines/cuda/delta_rule/unfold/spans.h"

namespace softdelta::cuda {

template <class T, int D, bool own_p, bool warpgroups>
class PairGradients : protected UnfoldCopies<T, D, own_p, warpgroups> {
  public:
    using Base = UnfoldCopies<T, D, own_p, warpgroups>;
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
        if constexpr (warpgroups) {
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
        const int back = of_score ? 0 : call_.erase_shift();
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
        sum_spans<2>(y, block_, 2 * column_half, !of_score && call_.erase_shift() == 1, lane_,
                     small_.pairs[which][column_half] + 16 * block_, small_.columns[which][block_] + 32 * column_half);
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
