// X = (I + L)⁻¹ of a chunk, [64, 64], by four warps with 16 rows each, which L and X never leave as accumulators:
//
//     D_I = (I + L_II)⁻¹                                   substitution in f32, a lane for each column
//     W_IM = −D_I L_IM                                     M < I
//     X_II = D_I,   X_IJ = Σ_{J ≤ M < I} W_IM X_MJ         when warp M has its rows, the warps after it go on
//
// Products on bf16 matrix units, of two planes for each number: 16 bits; of f32 operands, of split numbers.
#pragma once

#include <type_traits>

#include "engines/cuda/delta_rule/chunk.h"

namespace softdelta::cuda {
struct InverseMemory {
    static constexpr int block_bytes = 16 * 128;
    alignas(128) char planes[2][3][block_bytes];  // of X, rows of the first three warps; f32: both as one
    char last[block_bytes];
};

template <class T>
class WarpInverse {
    using Plane = __nv_bfloat16;
    static constexpr bool split = sizeof(T) == 4;
    using Words = std::conditional_t<split, Operand<float>, std::uint32_t[2][4]>;  // of a left operand

  public:
    InverseMemory& memory;
    int warp, lane;

    // L: what is on or above the diagonal is 0. wait(): a barrier of the four warps.
    template <class Wait>
    __device__ void run(const float (&L)[8][4], float (&X)[8][4], const Wait& wait) const {
        float D[2][4], x[3][2][4];
        Words W[3];
        invert_diagonal(L, D);
        multiply_row(L, D, W);
        unrolled<3, 2, 4>([&](int J, int n, int e) { x[J][n][e] = 0; });
        unrolled<3>([&](int M) {
            if (warp == M) {
                unrolled<2>([&](int J) {
                    if (J < M) store_block(M, J, x[J]);
                });
                store_block(M, M, D);
            }
            wait();
            if (warp <= M) return;
            unrolled<3>([&](int J) {
                if (J > M) return;
                if constexpr (split) {
                    Operand<float> right;
                    numbers().load_right_mn_major(right, 16 * M, J, lane);
                    multiply<float>(x[J][0], x[J][1], W[M], right);
                } else {
                    std::uint32_t right[2][4];
                    unrolled<2>([&](int p) { plane(p).load_right_mn_major(right[p], 16 * M, J, lane); });
                    unrolled<2>([&](int n) {
                        add_product(x[J][n], W[M], right[0][2 * n], right[0][2 * n + 1], right[1][2 * n],
                                    right[1][2 * n + 1]);
                    });
                }
            });
        });
        unrolled<8, 4>([&](int n, int e) {
            X[n][e] = n / 2 == warp ? D[n % 2][e] : 0.0F;
            if (n < 6 && n / 2 < warp) X[n][e] = x[n / 2 % 3][n % 2][e];
        });
    }

  private:
    static constexpr int row = 20;  // floats of a block's row; rows in different banks

    // Its own rows of the planes are the warp's scratch until it has them.
    __device__ float* scratch() const {
        return reinterpret_cast<float*>(warp == 3 ? memory.last
                                                  : memory.planes[0][0] + (split ? 2 : 1) * warp * memory.block_bytes);
    }
    __device__ Tile<float, 64> numbers() const { return {ptx::shared_address(memory.planes)}; }
    __device__ Tile<Plane, 64> plane(int p) const { return {ptx::shared_address(memory.planes[p])}; }

    // Column j of the inverse of the warp's block: x_i = δ_ij − Σ_{l<i} L_il x_l
    __device__ void invert_diagonal(const float (&L)[8][4], float (&D)[2][4]) const {
        float* block = scratch();
        float* place = block + lane / 4 * row + 2 * (lane % 4);
        unrolled<8>([&](int n) {
            if (n / 2 != warp) return;
            *reinterpret_cast<float2*>(place + 8 * (n % 2)) = {L[n][0], L[n][1]};
            *reinterpret_cast<float2*>(place + 8 * (n % 2) + 8 * row) = {L[n][2], L[n][3]};
        });
        __syncwarp();
        float x[16] = {};
        const int j = lane % 16;
        unrolled<16>([&](int i) {
            float sums[2] = {i == j ? 1.0F : 0.0F, 0};
            unrolled<4>([&](int four_of) {
                const int l = 4 * four_of;
                if (l >= i) return;
                const float4 four = *reinterpret_cast<const float4*>(block + i * row + l);
                const float of[4] = {four.x, four.y, four.z, four.w};
                unrolled<4>([&](int e) {
                    if (l + e < i) sums[(l + e) % 2] = fmaf(-of[e], x[l + e], sums[(l + e) % 2]);
                });
            });
            x[i] = sums[0] + sums[1];
        });
        __syncwarp();
        if (lane < 16) {
            unrolled<16>([&](int i) { block[i * row + j] = x[i]; });
        }
        __syncwarp();
        unrolled<2>([&](int n) {
            const float2 low = *reinterpret_cast<const float2*>(place + 8 * n),
                         high = *reinterpret_cast<const float2*>(place + 8 * n + 8 * row);
            D[n][0] = low.x, D[n][1] = low.y, D[n][2] = high.x, D[n][3] = high.y;
        });
        __syncwarp();
    }

    __device__ static void add_product(float (&d)[4], const std::uint32_t (&a)[2][4], std::uint32_t b0,
                                       std::uint32_t b1, std::uint32_t low_b0, std::uint32_t low_b1) {
        ptx::multiply(d, a[0], low_b0, low_b1, Plane());
        ptx::multiply(d, a[1], b0, b1, Plane());
        ptx::multiply(d, a[0], b0, b1, Plane());
    }

    // W of the blocks before the diagonal, as left operands.
    __device__ void multiply_row(const float (&L)[8][4], const float (&D)[2][4], Words (&W)[3]) const {
        Words left;
        to_words(D, left);
        unrolled<3>([&](int M) {
            if (M >= warp) return;
            float product[2][4] = {};
            if constexpr (split) {
                Operand<float> b;
                unrolled<2, 2>([&](int n, int half) {
                    transpose(-L[2 * M + n][2 * half], -L[2 * M + n][2 * half + 1], b + 4 * n + 2 * half);
                });
                multiply<float>(product[0], product[1], left, b);
            } else {
                unrolled<2>([&](int n) {
                    std::uint32_t b[2][2];  // half of the depth, plane
                    unrolled<2>([&](int half) {
                        to_planes(-L[2 * M + n][2 * half], -L[2 * M + n][2 * half + 1], b[half]);
                        unrolled<2>([&](int p) { b[half][p] = ptx::transpose(b[half][p]); });
                    });
                    add_product(product[n], left, b[0][0], b[1][0], b[0][1], b[1][1]);
                });
            }
            to_words(product, W[M]);
        });
    }

    __device__ static void to_words(const float (&x)[2][4], Words& out) {
        if constexpr (split)
            unrolled<2, 4>([&](int n, int e) { out[4 * n + e] = __float_as_uint(x[n][e]); });
        else
            to_left_planes(x, out);
    }
    // Of a matrix [8, 8] of f32 numbers, as accumulators lie, the transpose: by halves of numbers.
    __device__ static void transpose(float x, float y, std::uint32_t* out) {
        const std::uint32_t first = __float_as_uint(x), second = __float_as_uint(y);
        const std::uint32_t low = ptx::transpose((first & 0xffffu) | second << 16),
                            high = ptx::transpose(first >> 16 | (second & 0xffff0000u));
        out[0] = (low & 0xffffu) | high << 16;
        out[1] = low >> 16 | (high & 0xffff0000u);
    }

    __device__ void store_block(int I, int J, const float (&x)[2][4]) const {
        unrolled<2, 2>([&](int n, int half) {
            if constexpr (split)
                return store_pair(numbers(), 16 * I + lane / 4 + 8 * half, 16 * J + 8 * n + 2 * (lane % 4),
                                  x[n][2 * half], x[n][2 * half + 1]);
            std::uint32_t both[2];
            to_planes(x[n][2 * half], x[n][2 * half + 1], both);
            unrolled<2>([&](int p) {
                *reinterpret_cast<std::uint32_t*>(
                    shared_at(plane(p).unit(16 * I + lane / 4 + 8 * half, 2 * J + n) + 4 * (lane % 4))) = both[p];
            });
        });
    }
};

}  // namespace softdelta::cuda
