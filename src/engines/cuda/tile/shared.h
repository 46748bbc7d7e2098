// Tiles of 16-bit elements in shared memory, rows of `columns` elements. A row is cut into units of 16 bytes. Unit u of
// row r lies at place u ^ (r % 8): so 8 rows of one unit, and 8 units of one row, are in different banks. With
// panel_rows, columns are cut into panels of 64 that lie one after the other, as products of warpgroups want them:
//
//     panel 0          panel 1
//     row 0  8 units   row 0  8 units      a row of a panel is 128 bytes; base is a multiple of 1024
//     row 1            row 1
#pragma once

#include "engines/cuda/tile/ptx.h"
#include "engines/cuda/tile/unroll.h"

namespace softdelta::cuda {

__device__ inline char* shared_at(std::uint32_t address) {
    return ptx::shared_memory() + (address - ptx::shared_address(ptx::shared_memory()));
}

template <class T, int columns, int panel_rows = 0>
struct Tile {
    static_assert(sizeof(T) == 2 && columns % 64 == 0 && panel_rows % 8 == 0);
    static constexpr int units = columns / 8, row_bytes = columns * 2, panel_bytes = panel_rows * 128;

    std::uint32_t base;  // address in shared memory

    __host__ __device__ static constexpr int bytes(int rows = panel_rows) { return rows * row_bytes; }
    __device__ std::uint32_t unit(int row, int u) const {
        if constexpr (panel_rows > 0)
            return base + static_cast<std::uint32_t>(u / 8 * panel_bytes + row * 128 + (((u ^ row) & 7) << 4));
        return base + static_cast<std::uint32_t>(row * row_bytes + ((u ^ (row & 7)) << 4));
    }

    // Left operand, or results of a product: rows [row, row + 16), columns [16·k, 16·k + 16).
    __device__ void load_left(std::uint32_t (&out)[4], int row, int k, int lane) const {
        ptx::load_matrices(out, unit(row + (lane & 15), 2 * k + (lane >> 4)));
    }
    // Right operand, transposed (K runs in memory): columns of the product are rows [row, row + 16) here, its depth
    // columns [16·k, 16·k + 16). out[0..1] serve the first 8 columns, out[2..3] the others.
    __device__ void load_right(std::uint32_t (&out)[4], int row, int k, int lane) const {
        ptx::load_matrices(out, unit(row + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)));
    }
    // Right operand as it lies (N runs): depth rows [row, row + 16), columns of the product [16·n, 16·n + 16).
    __device__ void load_right_mn_major(std::uint32_t (&out)[4], int row, int n, int lane) const {
        ptx::load_matrices_transposed(out, unit(row + (lane & 15), 2 * n + (lane >> 4)));
    }
    // The transpose as results of products lie: its rows are columns [column, column + 16) here, its columns rows
    // [row, row + 16). out[0..1]: the first 8 columns, rows r and r + 8; out[2..3]: the others.
    __device__ void load_transposed_result(std::uint32_t (&out)[4], int row, int column, int lane) const {
        ptx::load_matrices_transposed(out, transposed_unit(row, column, lane));
    }
    __device__ void store_transposed_result(const std::uint32_t (&x)[4], int row, int column, int lane) const {
        ptx::store_matrices_transposed(transposed_unit(row, column, lane), x);
    }

    // The way back of load_left(), on sm_90 and newer.
    __device__ void store_left(const std::uint32_t (&x)[4], int row, int k, int lane) const {
        ptx::store_matrices(unit(row + (lane & 15), 2 * k + (lane >> 4)), x);
    }

    // Operands of a warpgroup's product. rows_operand is load_right, or of 64 rows load_left: rows from `row` on, a
    // multiple of 8, and columns [16·k, 16·k + 16). mn_major_operand is load_right_mn_major: rows [16·k, 16·k + 16) and
    // columns from `column` on, a multiple of 64, or 32.
    __device__ std::uint64_t rows_operand(int k, int row = 0) const {
        return ptx::shared_operand(base + static_cast<std::uint32_t>(row * 128), 0, k / 4 * panel_bytes + k % 4 * 32);
    }
    __device__ std::uint64_t mn_major_operand(int k, int column = 0) const {
        return ptx::shared_operand(base, panel_bytes, column / 64 * panel_bytes + column % 64 * 2 + k * 2048);
    }

  private:
    __device__ std::uint32_t transposed_unit(int row, int column, int lane) const {
        return unit(row + (lane & 7) + ((lane >> 4) << 3), column / 8 + ((lane >> 3) & 1));
    }
};

// x [16, 8·N] += left [16, 16] · rows [16·depth, 16·depth + 16) of right, its columns from 16·first on.
template <class T, int N, class Right>
__device__ inline void add_product(float (&x)[N][4], const std::uint32_t (&left)[4], const Right& right, int depth,
                                   int first, int lane) {
    unrolled<N / 2>([&](int n) {
        std::uint32_t b[4];
        right.load_right_mn_major(b, 16 * depth, first + n, lane);
        ptx::multiply(x[2 * n], left, b[0], b[1], T());
        ptx::multiply(x[2 * n + 1], left, b[2], b[3], T());
    });
}
// x [16, 8·N] += left [16, 16·depths] · rightᵀ, right [8·N, 16·depths]; triangular: it is a lower triangle.
template <class T, int N, int depths, class Right>
__device__ inline void add_transposed(float (&x)[N][4], const std::uint32_t (&left)[depths][4], const Right& right,
                                      bool triangular, int lane) {
    unrolled<depths, N / 2>([&](int depth, int n) {
        if (triangular && n < depth) return;
        std::uint32_t b[4];
        right.load_right(b, 16 * n, depth, lane);
        ptx::multiply(x[2 * n], left[depth], b[0], b[1], T());
        ptx::multiply(x[2 * n + 1], left[depth], b[2], b[3], T());
    });
}
// The same as add_product(), and y of another left operand: they share what is loaded of right.
template <class T, int N, class Right>
__device__ inline void add_two_products(float (&x)[N][4], const std::uint32_t (&left)[4], float (&y)[N][4],
                                        const std::uint32_t (&other)[4], const Right& right, int depth, int first,
                                        int lane) {
    unrolled<N / 2>([&](int n) {
        std::uint32_t b[4];
        right.load_right_mn_major(b, 16 * depth, first + n, lane);
        ptx::multiply(x[2 * n], left, b[0], b[1], T());
        ptx::multiply(x[2 * n + 1], left, b[2], b[3], T());
        ptx::multiply(y[2 * n], other, b[0], b[1], T());
        ptx::multiply(y[2 * n + 1], other, b[2], b[3], T());
    });
}

// Σ of the products of two units' elements.
template <class T>
__device__ inline float dot(const uint4& x, const uint4& y) {
    const std::uint32_t left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
    float sum = 0;
    unrolled<4>([&](int i) {
        const float2 a = ptx::unpack(left[i], T()), b = ptx::unpack(right[i], T());
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
    });
    return sum;
}

// Accumulators [16, 8·n] as left operands of the next product.
template <class T, int n>
__device__ inline void to_left(std::uint32_t (&out)[n / 2][4], const float (&x)[n][4]) {
    unrolled<n / 2>([&](int i) {
        out[i][0] = ptx::pack(x[2 * i][0], x[2 * i][1], T());
        out[i][1] = ptx::pack(x[2 * i][2], x[2 * i][3], T());
        out[i][2] = ptx::pack(x[2 * i + 1][0], x[2 * i + 1][1], T());
        out[i][3] = ptx::pack(x[2 * i + 1][2], x[2 * i + 1][3], T());
    });
}

// The same to rows [row, row + 16) of a tile, on sm_90 and newer.
template <class T, int n, class Rows>
__device__ inline void store_results(const Rows& tile, const float (&x)[n][4], int row, int lane, int first = 0) {
    std::uint32_t packed[n / 2][4];
    to_left<T>(packed, x);
    unrolled<n / 2>([&](int k) { tile.store_left(packed[k], row, first + k, lane); });
}

template <int n>
__device__ inline void clear(float (&x)[n][4]) {
    unrolled<n, 4>([&](int i, int e) { x[i][e] = 0; });
}

// Numbers as two bf16 planes, 16 bits: rounded, and what is left. Of two numbers, and of accumulators [16, 16] as left
// operands.
__device__ inline void to_planes(float x, float y, std::uint32_t (&out)[2]) {
    using Plane = __nv_bfloat16;
    out[0] = ptx::pack(x, y, Plane());
    const float2 high = ptx::unpack(out[0], Plane());
    out[1] = ptx::pack(x - high.x, y - high.y, Plane());
}
__device__ inline void to_left_planes(const float (*x)[4], std::uint32_t (&out)[2][4]) {
    unrolled<4>([&](int i) {
        std::uint32_t both[2];
        to_planes(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1], both);
        out[0][i] = both[0];
        out[1][i] = both[1];
    });
}

}  // namespace softdelta::cuda
