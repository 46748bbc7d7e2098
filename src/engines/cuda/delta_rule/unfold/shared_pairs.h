// The gradients of a chunk's pairs of tokens (shared_gate.cu): P and Q, and what they add to the gates between the
// tokens.
#pragma once

#include "engines/cuda/delta_rule/unfold/shared_tiles.h"
#include "engines/cuda/delta_rule/unfold/spans.h"

namespace softdelta::cuda {

template <class Tiles>
struct PairGradients {
    using T = typename Tiles::Element;
    using Rows = typename Tiles::Rows;
    static constexpr int C = chunk_rows, D = Tiles::size;

    const Tiles& my;

    // Rows of the warp's block, columns of one half, up to the diagonal: x [16, 32] = left · Uᵀ, y = keys · kᵀ
    __device__ void multiply_rows(const Rows& left, const Rows& keys, int half, float (&x)[C / 16][4],
                                  float (&y)[C / 16][4]) const {
        unrolled<C / 16, 4>([&](int n, int i) { x[n][i] = y[n][i] = 0; });
        if constexpr (Tiles::by_warpgroups) {
            ptx::begin_products(x, y);
            unrolled<D / 16>([&](int depth) {
                ptx::warpgroup_multiply(x, left.rows_operand(depth), my.u().rows_operand(depth, 32 * half), true, T());
                ptx::warpgroup_multiply(y, keys.rows_operand(depth), my.k().rows_operand(depth, 32 * half), true, T());
            });
            ptx::commit_products();
            ptx::wait_for_products<0>(x);
            ptx::keep_registers(y);
            return;
        }
        multiply_lower(left, my.u(), half, x);
        multiply_lower(keys, my.k(), half, y);
    }
    // By a warp: x += left · rightᵀ
    template <class Left, class Right>
    __device__ void multiply_lower(const Left& left, const Right& right, int half, float (&x)[C / 16][4]) const {
        if (2 * half > my.block) return;
#pragma unroll 2
        for (int depth = 0; depth < Left::units / static_cast<int>(sizeof(T)); ++depth) {
            Operand<T> a, b;
            left.load_left(a, 16 * my.block, depth, my.lane);
            unrolled_while<2>([&](int n) {
                if (2 * half + n > my.block) return false;
                right.load_right(b, 32 * half + 16 * n, depth, my.lane);
                multiply<T>(x[2 * n], x[2 * n + 1], a, b);
                return true;
            });
        }
    }

    // The block's rows of P or Q, one half of their columns; and what they add to the gates that they span.
    __device__ void make(int which, int column_half) const {
        const bool of_score = which == 0;
        float x[C / 16][4], y[C / 16][4];
        multiply_rows(of_score ? my.d_o() : my.d_r(), of_score ? my.q() : my.p(), column_half, x, y);
        finish(which, column_half, x, y);
    }
    // From products of dO or dR with U, and of keys.
    __device__ void finish(int which, int column_half, float (&x)[C / 16][4], float (&y)[C / 16][4]) const {
        const bool of_score = which == 0;
        const double* G = my.factors().sums + 1;
        const int back = of_score ? 0 : my.call.erase_shift();
        float own[2], to_anchor[2], beta[2];
        double from[2];
        unrolled<2>([&](int half) {
            from[half] = G[my.row(half) - back];
            own[half] = of_score ? my.call.scale : -1.0F;
            beta[half] = of_score ? 1.0F : my.factors().beta[my.row(half)];
            to_anchor[half] = own[half] * expf(static_cast<float>(from[half] - my.factors().sums[16 * my.block]));
        });
        const auto to = my.pairs(which);
        unrolled<C / 16>([&](int n) {
            const int tile = C / 16 * column_half + n;
            unrolled<4>([&](int e) {
                const int half = e / 2, i = my.row(half), j = 8 * tile + 2 * (my.lane % 4) + e % 2;
                if (tile / 2 > my.block)
                    x[n][e] = 0;
                else if (tile / 2 < my.block)
                    x[n][e] *= to_anchor[half] * my.small.anchors[my.block][j];
                else
                    x[n][e] = (of_score ? j <= i : j < i)
                                  ? x[n][e] * own[half] * expf(static_cast<float>(from[half] - G[j]))
                                  : 0.0F;
                y[n][e] *= x[n][e] * beta[half];
            });
            unrolled<2>([&](int half) {
                store_pair(to, my.row(half), 8 * tile + 2 * (my.lane % 4), x[n][2 * half], x[n][2 * half + 1]);
            });
        });
        sum_spans<2, sizeof(T) == 4>(y, my.block, 2 * column_half, !of_score && my.call.erase_shift() == 1, my.lane,
                                     my.small.pairs[which][column_half] + 16 * my.block,
                                     my.small.columns[which][my.block] + 32 * column_half);
    }

    // spans[s]: the block of row s and those after it.
    __device__ void add_later_blocks() const {
        const int r = my.thread / 8, part = my.thread % 8;
        float sum = part < (my.erases ? 4 : 2) ? my.small.pairs[part / 2][part % 2][r] : 0.0F;
        for (int which = 0; which < (my.erases ? 2 : 1); ++which)
            for (int block = r / 16 + 1; block < 4; ++block)
                for (int j = part; j < r; j += 8) sum += my.small.columns[which][block][j];
        sum = sum_of_lanes<8>(sum);
        if (part == 0) my.small.spans[r] = sum;
    }
};

}  // namespace softdelta::cuda
