// Products in registers. Acc<rows, cols> is a warp's 16 rows, or a warpgroup's 64 of which each warp has 16.
//
// A lane holds, of rows lane / 4 (half 0) and lane / 4 + 8 (half 1) of its warp, columns 8·n + 2·(lane % 4) + {0, 1}.
// `column` below is without the lane's own part: own_column(lane) + column is the tile's.
#pragma once

#include "engines/cuda/tile/lanes.h"
#include "engines/cuda/tile/shared.h"

namespace softdelta::cuda {

__device__ inline int own_column(int lane) {
    return 2 * (lane % 4);
}

// use(half) for the lane's two rows.
template <class Use>
__device__ inline void for_rows(const Use& use) {
    unrolled<2>([&](int half) { use(half); });
}

// Acc<16, cols> of 16-bit numbers: the left operand of the next product.
template <class T, int cols>
struct Left {
    std::uint32_t x[cols / 16][4];

    __device__ std::uint32_t& pair(int half, int column) { return x[column / 16][2 * (column / 8 % 2) + half]; }
};

template <int rows, int cols>
struct Acc {
    static_assert((rows == 16 || rows == 64) && cols % 8 == 0);

    float x[cols / 8][4];

    // use(element, half, column).
    template <class Use>
    __device__ void each(const Use& use) {
        unrolled<cols / 8, 4>([&](int n, int m) { use(x[n][m], m / 2, 8 * n + m % 2); });
    }
    // use(element, element of the next column, half, column).
    template <class Use>
    __device__ void each_pair(const Use& use) {
        unrolled<cols / 8, 2>([&](int n, int half) { use(x[n][2 * half], x[n][2 * half + 1], half, 8 * n); });
    }
    // As each_pair(), with the two numbers that a tile of T has there: load(four, n) brings columns [16·n, 16·n + 16).
    template <class T, class Load, class Use>
    __device__ void each_pair_with(const Load& load, const Use& use) {
        unrolled<cols / 16>([&](int n) {
            std::uint32_t four[4] = {};
            load(four, n);
            unrolled<4>([&](int c) {
                float* const two = x[2 * n + c / 2] + 2 * (c % 2);
                use(two[0], two[1], ptx::unpack(four[c], T()), c % 2, 16 * n + 8 * (c / 2));
            });
        });
    }

    __device__ void scale_rows(const float (&factor)[2]) {
        each([&](float& e, int half, int) { e *= factor[half]; });
    }
    __device__ void scale(float factor) {
        each([&](float& e, int, int) { e *= factor; });
    }
    // 2^(c·x − base).
    __device__ void exp2(float c, const float (&base)[2]) {
        each([&](float& e, int half, int) { e = ptx::exp2(fmaf(e, c, -base[half])); });
    }
    // What lies outside of columns [begin, end) of its row.
    __device__ void hide(const int (&begin)[2], const int (&end)[2], int lane, float hidden) {
        const int own = own_column(lane);
        const int from[2] = {begin[0] - own, begin[1] - own}, to[2] = {end[0] - own, end[1] - own};
        each([&](float& e, int half, int column) {
            if (column < from[half] || column >= to[half]) e = hidden;
        });
    }

    // Of the lane's columns alone. Four maxima of a row side by side: a longer chain waits for itself.
    __device__ void row_max(float (&top)[2]) const {
        float tops[2][4];
        unrolled<cols / 8, 4>([&](int n, int m) {
            float& of = tops[m / 2][2 * (n % 2) + m % 2];
            of = n < 2 ? x[n][m] : fmaxf(of, x[n][m]);
        });
        unrolled<2>([&](int half) {
            top[half] = fmaxf(fmaxf(tops[half][0], tops[half][1]), fmaxf(tops[half][2], tops[half][3]));
        });
    }
    __device__ void add_row_sums(float (&sum)[2]) {
        each([&](float& e, int half, int) { sum[half] += e; });
    }
    __device__ bool row_is_finite(int half) const {
        bool finite = true;
        unrolled<cols / 8>([&](int n) { finite = finite && isfinite(x[n][2 * half]) && isfinite(x[n][2 * half + 1]); });
        return finite;
    }

    template <class T>
    __device__ void pack(Left<T, cols>& left) const {
        to_left<T, cols / 8>(left.x, x);
    }
};

// use(element of a, its neighbour, element of b, its neighbour, half, column).
template <int rows, int cols, class Use>
__device__ inline void each_pair_of(Acc<rows, cols>& a, Acc<rows, cols>& b, const Use& use) {
    unrolled<cols / 8, 2>([&](int n, int half) {
        use(a.x[n][2 * half], a.x[n][2 * half + 1], b.x[n][2 * half], b.x[n][2 * half + 1], half, 8 * n);
    });
}

// Products of a warpgroup, in the background: ptx::begin_products() before the first of a group, and
// ptx::commit_products() after the last. A product has at most 128 columns.
//
// acc = rows [row, row + 64) of left times all rows of right, transposed.
template <class T, int left_rows, int depth, int n>
__device__ inline void multiply_transposed(Acc<64, n>& acc, const Tile<T, depth, left_rows>& left, int row,
                                           const Tile<T, depth, n>& right) {
    unrolled<depth / 16>(
        [&](int k) { ptx::warpgroup_multiply(acc.x, left.rows_operand(k, row), right.rows_operand(k), k > 0, T()); });
}
// add(columns [first, first + width) of acc, first), as many as one product has.
template <int cols, class Add>
__device__ inline void for_each_part(Acc<64, cols>& acc, const Add& add) {
    constexpr int width = cols > 128 ? 128 : cols;
#pragma unroll
    for (int first = 0; first < cols; first += width)
        add(*reinterpret_cast<float(*)[width / 8][4]>(&acc.x[first / 8]), first);
}
// acc += left · right; left in registers, or rows [row, row + 64) of a tile.
template <class T, int depth, int cols>
__device__ inline void add_product(Acc<64, cols>& acc, const Left<T, depth>& left, const Tile<T, cols, depth>& right) {
    unrolled<depth / 16>([&](int k) {
        for_each_part(acc, [&](auto& part, int first) {
            ptx::warpgroup_multiply_mn_major(part, left.x[k], right.mn_major_operand(k, first), true, T());
        });
    });
}
template <class T, int left_rows, int depth, int cols>
__device__ inline void add_product(Acc<64, cols>& acc, const Tile<T, depth, left_rows>& left, int row,
                                   const Tile<T, cols, depth>& right) {
    unrolled<depth / 16>([&](int k) {
        for_each_part(acc, [&](auto& part, int first) {
            ptx::warpgroup_multiply_mn_major(part, left.rows_operand(k, row), right.mn_major_operand(k, first), true,
                                             T());
        });
    });
}

// The same of plain sums x [64, 8·N]: x = left · rightᵀ, or left · columns of right from `column` on; with `add` +=.
template <class T, int N, int depths, class Right>
__device__ inline void begin_transposed(float (&x)[N][4], const std::uint32_t (&left)[depths][4], const Right& right,
                                        bool add = false) {
    unrolled<depths>([&](int k) { ptx::warpgroup_multiply(x, left[k], right.rows_operand(k), add || k > 0, T()); });
}
template <class T, int N, class Left, class Right>
__device__ inline void begin_transposed(float (&x)[N][4], const Left& left, const Right& right) {
    unrolled<Left::units / 2>(
        [&](int k) { ptx::warpgroup_multiply(x, left.rows_operand(k), right.rows_operand(k), k > 0, T()); });
}
template <class T, int N, int depths, class Right>
__device__ inline void begin_product(float (&x)[N][4], const std::uint32_t (&left)[depths][4], const Right& right,
                                     bool add, int column = 0) {
    unrolled<depths>([&](int k) {
        ptx::warpgroup_multiply_mn_major(x, left[k], right.mn_major_operand(k, column), add || k > 0, T());
    });
}
template <class T, int N, class Left, class Right>
__device__ inline void begin_product(float (&x)[N][4], const Left& left, const Right& right, bool add, int column = 0) {
    unrolled<Left::units / 2>([&](int k) {
        ptx::warpgroup_multiply_mn_major(x, left.rows_operand(k), right.mn_major_operand(k, column), add || k > 0, T());
    });
}

// Products of plain sums by a warp at once, or by a warpgroup in the background: a group each, until wait(). right may
// be a lower triangle.
template <class T, bool warpgroups>
struct Products {
    int lane;

    // x [.., 8·N] = left · rightᵀ, with `add` +=
    template <int N, int depths, class Right>
    __device__ void begin_transposed(float (&x)[N][4], std::uint32_t (&left)[depths][operand_words<T>],
                                     const Right& right, bool add, bool triangular) const {
        if constexpr (warpgroups) {
            ptx::begin_products(left, x);
            cuda::begin_transposed<T>(x, left, right, add);
            ptx::commit_products();
        } else {
            if (!add) clear(x);
            add_transposed<T>(x, left, right, triangular, lane);
        }
    }
    // x = left · right, with `add` +=
    template <int N, int depths, class Right>
    __device__ void begin(float (&x)[N][4], std::uint32_t (&left)[depths][operand_words<T>], const Right& right,
                          bool add, bool triangular) const {
        if constexpr (warpgroups) {
            ptx::begin_products(left, x);
            begin_product<T>(x, left, right, add);
            ptx::commit_products();
        } else {
            if (!add) clear(x);
            add_columns<T>(x, left, right, triangular, lane);
        }
    }
    // Until so many groups run.
    template <int running, int N>
    __device__ static void wait(float (&x)[N][4]) {
        if constexpr (warpgroups) ptx::wait_for_products<running>(x);
    }
};

}  // namespace softdelta::cuda
