// Pairs of tokens of one block of 16, for unfold.cu: by halves of 16, 8 or 4 tokens. Token a is the last of the first
// half, i is in the second half, j in the first:
//
//     dq_i += e^(L_i − L_a)∘Σ_j P_ij (k_j e^(L_a − L_j))         e the same of Q
//     dk_j += e^(L_a − L_j)∘Σ_i (P_ij q_i − Q_ij βk_i) e^(L_i − L_a)
//
// on matrix products; neighbours and a token with itself one by one. They span the gates after j up to i: of the second
// half those from i back to its start, of the first those after j.
#pragma once

#include "engines/cuda/delta_rule/unfold/channel_gate/operands.h"

namespace softdelta::cuda {

// Of a block of tokens: keys with their norms (q with scale, too), L; and what comes of them. E is −e.
struct BlockRows {
    BlockTokens q, k, L;
    float minus_beta[2][2];

    __device__ float minus_bk(int n, int i) const { return minus_beta[n][i % 2] * k[n][i]; }
};
struct BlockGradients {
    BlockTokens &dq, &E, &dk;
    BlockTokens dg;
};

template <class T, bool in_parts = false>
struct ChannelPairs {
    ChannelTiles<T, in_parts>& my;

    // From beyond the block, and between its halves of eight.
    __device__ void add_halves(int block, const BlockRows& rows, BlockGradients& d) const {
        BlockTokens f;
        unrolled<2>([&](int half) {
            const float anchor = my.up_to_eight(rows.L, 0, half);
            unrolled<2>([&](int e) {
                f[0][2 * half + e] = ptx::exp2(anchor - rows.L[0][2 * half + e]);
                f[1][2 * half + e] = ptx::exp2(rows.L[1][2 * half + e] - anchor);
            });
        });
        float x[4] = {}, y[4] = {}, z[4] = {};
        std::uint32_t right[4];
        load_halves(block, right);
        const Decayed earlier(rows, 0, f[0]), later(rows, 1, f[1]);
        earlier.multiply_keys(right[0], x);
        earlier.multiply_keys(right[1], y);
        later.multiply_both(right[2], right[3], z);
        // A gate is spanned by what is read from it on, and by what is written before it; by pairs of the halves in its
        // own half.
        float read[4], written[4];
        const auto add = [&](std::uint32_t ones, const float(&of_tokens)[4], int n) {
            add_sums(of_tokens, ones, d.dg[n]);
        };
        const std::uint32_t from_it_on = ones(false), before_it = ones(true);
        unrolled<4>([&](int i) {
            read[i] = fmaf(rows.q[0][i], d.dq[0][i], rows.minus_bk(0, i) * d.E[0][i]);
            written[i] = rows.k[1][i] * d.dk[1][i];
        });
        add(from_it_on, read, 0);
        add(before_it, written, 1);
        unrolled<4>([&](int i) {
            read[i] = fmaf(rows.q[1][i], d.dq[1][i], rows.minus_bk(1, i) * d.E[1][i]);
            written[i] = rows.k[0][i] * d.dk[0][i];
        });
        add(both_ones, read, 0);
        add(both_ones, written, 1);
        unrolled<4>([&](int i) {
            read[i] = fmaf(later.q[i], x[i], fmaf(later.minus_bk[i], y[i], read[i]));
            written[i] = fmaf(earlier.k[i], z[i], written[i]);
            d.dq[1][i] = fmaf(f[1][i], x[i], d.dq[1][i]);
            d.E[1][i] = fmaf(f[1][i], y[i], d.E[1][i]);
            d.dk[0][i] = fmaf(f[0][i], z[i], d.dk[0][i]);
        });
        add(before_it, written, 0);
        add(from_it_on, read, 1);
        add_quarters<4>(block, rows, d);
        my.forget();
        add_quarters<2>(block, rows, d);
        add_neighbours(block, rows, d);
    }

    // Right operands, eight by eight: rows of the second eight tokens with the first, of P and of Q. They serve what
    // the first gives to the second; transposed, what the second gives to the first.
    __device__ void load_halves(int block, std::uint32_t (&out)[4]) const {
        const auto of = my.pairs(my.lane / 8 % 2);
        std::uint32_t of_later[4], of_earlier[4];
        const std::uint32_t at = of.unit(16 * block + 8 + my.lane % 8, 2 * block);
        ptx::load_matrices(of_later, at);
        ptx::load_matrices_transposed(of_earlier, at);
        out[0] = of_later[0], out[1] = of_later[1], out[2] = of_earlier[0], out[3] = of_earlier[1];
    }
    // Each eight with itself: of P, then of Q.
    __device__ std::uint32_t eights(int block) const {
        return my.pairs(my.lane / 16).unit(16 * block + my.lane % 16, 2 * block + my.lane / 8 % 2);
    }
    // Keys of eight tokens with decays, and as left operands.
    struct Decayed {
        float q[4], k[4], minus_bk[4];

        __device__ Decayed(const BlockRows& rows, int n, const float (&f)[4]) {
            unrolled<4>([&](int i) {
                q[i] = rows.q[n][i] * f[i];
                k[i] = rows.k[n][i] * f[i];
                minus_bk[i] = k[i] * rows.minus_beta[n][i % 2];
            });
        }
        __device__ void multiply_keys(std::uint32_t right, float (&to)[4]) const {
            ptx::multiply_eight(to, ptx::pack(k[0], k[1], T()), ptx::pack(k[2], k[3], T()), right, T());
        }
        // q of_q − βk of_k
        __device__ void multiply_both(std::uint32_t of_q, std::uint32_t of_k, float (&to)[4]) const {
            const std::uint32_t left[4] = {ptx::pack(q[0], q[1], T()), ptx::pack(q[2], q[3], T()),
                                           ptx::pack(minus_bk[0], minus_bk[1], T()),
                                           ptx::pack(minus_bk[2], minus_bk[3], T())};
            ptx::multiply(to, left, of_q, of_k, T());
        }
    };

    // Sums over eight tokens by a product with ones and zeros: of a right operand a lane has column lane / 4, a gate,
    // and depths 2·(lane % 4) + {0, 1}, tokens. The gate's token and those after it, or those before.
    using Plane = __nv_bfloat16;
    static constexpr std::uint32_t one = 0x3f80, both_ones = one | one << 16;
    __device__ std::uint32_t ones(bool before) const {
        const int gate = my.lane / 4, token = 2 * (my.lane % 4);
        return ((token < gate) == before ? one : 0) | ((token + 1 < gate) == before ? one << 16 : 0);
    }
    // x goes as two planes, 16 bits.
    __device__ static void add_sums(const float (&x)[4], std::uint32_t ones, float (&to)[4]) {
        std::uint32_t first[2], second[2];
        to_planes(x[0], x[1], first);
        to_planes(x[2], x[3], second);
        ptx::multiply(to, {first[0], second[0], first[1], second[1]}, ones, ones, Plane());
    }

    // Both eights of tokens: halves of 4 or of 2. Lanes have two tokens, so that a whole lane is in a half.
    template <int half_size>
    __device__ void add_quarters(int block, const BlockRows& rows, BlockGradients& d) const {
        constexpr int lanes = half_size / 2;
        const bool second = (my.lane & lanes) != 0;
        // Of a right operand a lane has columns lane / 4 and depths 2·(lane % 4) + {0, 1}.
        const int column = my.lane / 4, depth = 2 * (my.lane % 4);
        const bool same = column / (2 * half_size) == depth / (2 * half_size), low = (column & half_size) == 0;
        const bool of_later = same && !low && !second, of_earlier = same && low && second;
        const float sign = second ? 1.0F : -1.0F;
        std::uint32_t later[4], earlier[4];
        ptx::load_matrices(later, eights(block));
        ptx::load_matrices_transposed(earlier, eights(block));
        unrolled<2>([&](int n) {
            float f[4], x[4] = {}, y[4] = {}, z[4] = {};
            unrolled<2>([&](int half) {
                const int last = (my.lane & ~(2 * lanes - 1)) | (lanes - 1);
                const float anchor = -sign * __shfl_sync(0xffffffffu, rows.L[n][2 * half + 1], last);
                unrolled<2>([&](int e) { f[2 * half + e] = ptx::exp2(fmaf(sign, rows.L[n][2 * half + e], anchor)); });
            });
            const Decayed left(rows, n, f);
            left.multiply_keys(of_later ? later[n] : 0, x);
            left.multiply_keys(of_later ? later[2 + n] : 0, y);
            left.multiply_both(of_earlier ? earlier[n] : 0, of_earlier ? earlier[2 + n] : 0, z);
            unrolled<2>([&](int half) {
                float span[2];
                unrolled<2>([&](int e) {
                    const int i = 2 * half + e;
                    d.dq[n][i] = fmaf(f[i], x[i], d.dq[n][i]);
                    d.E[n][i] = fmaf(f[i], y[i], d.E[n][i]);
                    d.dk[n][i] = fmaf(f[i], z[i], d.dk[n][i]);
                    // x and y are 0 in the first half, z in the second.
                    span[e] = fmaf(left.q[i], x[i], fmaf(left.minus_bk[i], y[i], left.k[i] * z[i]));
                });
                const float both = span[0] + span[1];
                float beyond = 0;  // of the half's other lane
                if constexpr (lanes == 2) {
                    const float other = __shfl_xor_sync(0xffffffffu, both, 1);
                    beyond = second == ((my.lane & 1) == 0) ? other : 0.0F;
                }
                d.dg[n][2 * half] += second ? both + beyond : beyond;
                d.dg[n][2 * half + 1] += (second ? span[1] : span[0]) + beyond;
            });
        });
    }

    // The lane's two tokens of each eight.
    __device__ void add_neighbours(int block, const BlockRows& rows, BlockGradients& d) const {
        unrolled<2>([&](int n) {
            const int column = 16 * block + 8 * n;
            const auto of_row = [&](int which, int e) {
                const int row = column + 2 * (my.lane % 4) + e;
                return ptx::unpack(*reinterpret_cast<const std::uint32_t*>(
                                       shared_at(my.pairs(which).unit(row, column / 8) + 4 * (my.lane % 4))),
                                   T());
            };
            const float own = of_row(0, 0).x, erase = of_row(1, 1).x;
            const float2 next = of_row(0, 1);  // the second with the first, and with itself
            unrolled<2>([&](int half) {
                const int i = 2 * half, j = i + 1;
                const float between = ptx::exp2(rows.L[n][j] - rows.L[n][i]);
                const float dq = between * next.x * rows.k[n][i], E = between * erase * rows.k[n][i];
                d.dq[n][i] = fmaf(own, rows.k[n][i], d.dq[n][i]);
                d.dq[n][j] = fmaf(next.y, rows.k[n][j], d.dq[n][j] + dq);
                d.E[n][j] += E;
                d.dk[n][i] = fmaf(own, rows.q[n][i],
                                  fmaf(between, fmaf(next.x, rows.q[n][j], erase * rows.minus_bk(n, j)), d.dk[n][i]));
                d.dk[n][j] = fmaf(next.y, rows.q[n][j], d.dk[n][j]);
                d.dg[n][j] += fmaf(rows.q[n][j], dq, rows.minus_bk(n, j) * E);
            });
        });
    }
};

}  // namespace softdelta::cuda
