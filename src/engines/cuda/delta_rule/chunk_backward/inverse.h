// X = (I + L)⁻¹ of a chunk, [64, 64] in f32 in shared memory, by blocks of 16 rows: those on the diagonal by
// substitution, a warp each; then, diagonal by diagonal,
//     X_IJ = −X_II Σ_{J ≤ M < I} L_IM X_MJ
#pragma once

#include "engines/cuda/delta_rule/chunk/folded.h"

namespace softdelta::cuda {

template <int threads>
struct BlockInverse {
    static_assert(threads == 256);
    static constexpr int row = chunk_rows + 4;  // floats; rows in different banks
    static constexpr int square_bytes = chunk_rows * row * 4, sum_row = 20, sums_bytes = 3 * 16 * sum_row * 4;

    const float* L;
    float* X;
    float* sums;

    // All threads of the block; its barriers come first and last.
    __device__ void run(int thread) const {
        __syncthreads();
        const int warp = thread / 32, j = thread % 32;
        if (warp < 4 && j < 16) {  // column j of the inverse of the warp's block: x_i = δ_ij − Σ_{l<i} L_il x_l
            const float* block = L + 16 * warp * (row + 1);
            float* to = X + 16 * warp * (row + 1);
            float x[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float sum = i == j ? 1.0F : 0.0F;
#pragma unroll
                for (int l = 0; l < i; ++l) sum = fmaf(-block[i * row + l], x[l], sum);
                x[i] = sum;
                to[i * row + j] = sum;
            }
        }
        __syncthreads();
        run_diagonal<1>(thread);
        run_diagonal<2>(thread);
        run_diagonal<3>(thread);
    }

  private:
    // Blocks (J + distance, J), each by a team of threads; a thread has some columns of a row.
    template <int distance>
    __device__ void run_diagonal(int thread) const {
        constexpr int team = distance == 1 ? 64 : distance == 2 ? 128 : 256, columns = 256 / team;
        const int J = thread / team, I = J + distance, member = thread % team;
        const int i = member / (team / 16), first = member % (team / 16) * columns;
        const bool works = I < 4;
        float* products = sums + J * 16 * sum_row;
        float y[columns] = {};
        if (works) {
#pragma unroll 8
            for (int m = 16 * J; m < 16 * I; ++m) {
                const float left = L[(16 * I + i) * row + m];
#pragma unroll
                for (int e = 0; e < columns; ++e) y[e] = fmaf(left, X[m * row + 16 * J + first + e], y[e]);
            }
#pragma unroll
            for (int e = 0; e < columns; ++e) products[i * sum_row + first + e] = y[e];
        }
        __syncthreads();
        if (works) {
            float z[columns] = {};
#pragma unroll 4
            for (int m = 0; m <= i; ++m) {
                const float left = -X[(16 * I + i) * row + 16 * I + m];
#pragma unroll
                for (int e = 0; e < columns; ++e) z[e] = fmaf(left, products[m * sum_row + first + e], z[e]);
            }
#pragma unroll
            for (int e = 0; e < columns; ++e) X[(16 * I + i) * row + 16 * J + first + e] = z[e];
        }
        __syncthreads();
    }
};

// X as a tile of 16-bit elements; zeros above the diagonal.
template <class T>
__device__ void pack_inverse(const float* X, int row, const Tile<T, chunk_rows>& to, char* memory, int thread,
                             int threads) {
    for (int u = thread; u < chunk_rows * chunk_rows / 8; u += threads) {
        const int i = u / (chunk_rows / 8), j = u % (chunk_rows / 8) * 8;
        uint4 out = {0, 0, 0, 0};
        if (j / 16 <= i / 16) {
            const float4 low = *reinterpret_cast<const float4*>(X + i * row + j);
            const float4 high = *reinterpret_cast<const float4*>(X + i * row + j + 4);
            out = {ptx::pack(low.x, low.y, T()), ptx::pack(low.z, low.w, T()), ptx::pack(high.x, high.y, T()),
                   ptx::pack(high.z, high.w, T())};
        }
        *reinterpret_cast<uint4*>(memory + (to.unit(i, j / 8) - to.base)) = out;
    }
}

}  // namespace softdelta::cuda
