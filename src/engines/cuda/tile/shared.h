// Tiles in shared memory, rows of `columns` elements of 16 bits, or of f32. A row is cut into units of 16 bytes. Unit u
// of row r lies at place u ^ (r % 8): so 8 rows of one unit, and 8 units of one row, are in different banks. With
// panel_rows, columns are cut into panels of 8 units that lie one after the other, as products of warpgroups want them:
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

template <class T>
inline constexpr int unit_elements = 16 / static_cast<int>(sizeof(T));

// What a lane holds of 16 rows and 16 columns, as an operand or as results: words of two 16-bit elements, or f32
// numbers in the same order.
template <class T>
inline constexpr int operand_words = 2 * sizeof(T);
template <class T>
using Operand = std::uint32_t[operand_words<T>];
// Of these, the i-th pair of neighbours: of 8 columns rows r and r + 8, then of the others.
template <class T>
__device__ inline float2 pair_of(const Operand<T>& words, int i) {
    if constexpr (sizeof(T) == 2)
        return ptx::unpack(words[i], T());
    else
        return {__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1])};
}

template <class T>
__device__ inline void set_pair(Operand<T>& words, int i, float x, float y) {
    if constexpr (sizeof(T) == 2)
        words[i] = ptx::pack(x, y, T());
    else
        words[2 * i] = __float_as_uint(x), words[2 * i + 1] = __float_as_uint(y);
}

// x [16, 16] += left [16, 16] · right [16, 16].
template <class T>
__device__ inline void multiply(float (&x)[4], float (&y)[4], const Operand<T>& left, const Operand<T>& right) {
    ptx::multiply(x, left, right[0], right[1], T());
    ptx::multiply(y, left, right[2], right[3], T());
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

// f32 numbers: what is said above, but for units: those of one row, of 8 rows or of every other one of them, in pairs,
// are in different banks, so that products read single numbers.
template <int columns, int panel_rows>
struct Tile<float, columns, panel_rows> {
    static_assert(columns % 64 == 0 && panel_rows % 8 == 0);
    static constexpr int units = columns / 4, row_bytes = columns * 4, panel_bytes = panel_rows * 128;

    std::uint32_t base;

    __host__ __device__ static constexpr int bytes(int rows = panel_rows) { return rows * row_bytes; }
    __device__ std::uint32_t unit(int row, int u) const {
        const int place = u ^ ((row & 2) << 1 | ((row ^ (row >> 2)) & 1) << 1 | ((row >> 2) & 1));
        if constexpr (panel_rows > 0)
            return base + static_cast<std::uint32_t>(u / 8 * panel_bytes + row * 128 + ((place & 7) << 4));
        return base + static_cast<std::uint32_t>(row * row_bytes + (place << 4));
    }
    __device__ float& at(int row, int column) const {
        return *reinterpret_cast<float*>(shared_at(unit(row, column / 4) + 4u * static_cast<unsigned>(column % 4)));
    }

    __device__ void load_left(std::uint32_t (&out)[8], int row, int k, int lane) const {
        load_pairs(row + lane / 4, 16 * k + 2 * (lane % 4), out[0], out[1], out[4], out[5]);
        load_pairs(row + lane / 4 + 8, 16 * k + 2 * (lane % 4), out[2], out[3], out[6], out[7]);
    }
    // Of both halves of the product's columns, the first half of the depth and the second.
    __device__ void load_right(std::uint32_t (&out)[8], int row, int k, int lane) const {
        load_pairs(row + lane / 4, 16 * k + 2 * (lane % 4), out[0], out[1], out[2], out[3]);
        load_pairs(row + lane / 4 + 8, 16 * k + 2 * (lane % 4), out[4], out[5], out[6], out[7]);
    }
    __device__ void load_right_mn_major(std::uint32_t (&out)[8], int row, int n, int lane) const {
        unrolled<2, 2, 2>([&](int half, int k, int i) {
            out[4 * half + 2 * k + i] =
                __float_as_uint(at(row + 8 * k + 2 * (lane % 4) + i, 16 * n + 8 * half + lane / 4));
        });
    }
    __device__ void load_transposed_result(std::uint32_t (&out)[8], int row, int column, int lane) const {
        unrolled<2, 2, 2>([&](int eight, int half, int i) {
            out[4 * eight + 2 * half + i] =
                __float_as_uint(at(row + 8 * eight + 2 * (lane % 4) + i, column + 8 * half + lane / 4));
        });
    }

    // Of a right operand, the eight columns of the product from `first` on, and depth [8·k, 8·k + 8): of rows here from
    // first on, or of columns.
    __device__ void load_eight_rows(std::uint32_t (&out)[2], int first, int k, int lane) const {
        const uint2 both = *reinterpret_cast<const uint2*>(&at(first + lane / 4, 8 * k + 2 * (lane % 4)));
        out[0] = both.x, out[1] = both.y;
    }
    __device__ void load_eight_columns(std::uint32_t (&out)[2], int first, int k, int lane) const {
        unrolled<2>([&](int i) { out[i] = __float_as_uint(at(8 * k + 2 * (lane % 4) + i, first + lane / 4)); });
    }

  private:
    __device__ void load_pairs(int row, int column, std::uint32_t& a, std::uint32_t& b, std::uint32_t& c,
                               std::uint32_t& d) const {
        const uint2 first = *reinterpret_cast<const uint2*>(&at(row, column)),
                    second = *reinterpret_cast<const uint2*>(&at(row, column + 8));
        a = first.x, b = first.y, c = second.x, d = second.y;
    }
};

// Two neighbours of a row, the first in an even column.
template <class T, int columns, int panel_rows>
__device__ inline void* pair_at(const Tile<T, columns, panel_rows>& tile, int row, int column) {
    constexpr int unit = unit_elements<T>;
    return shared_at(tile.unit(row, column / unit) + static_cast<unsigned>(column % unit) * unsigned{sizeof(T)});
}
template <class T, int columns, int panel_rows>
__device__ inline float2 load_pair(const Tile<T, columns, panel_rows>& tile, int row, int column) {
    if constexpr (sizeof(T) == 4)
        return *static_cast<const float2*>(pair_at(tile, row, column));
    else
        return ptx::unpack(*static_cast<const std::uint32_t*>(pair_at(tile, row, column)), T());
}
template <class T, int columns, int panel_rows>
__device__ inline void store_pair(const Tile<T, columns, panel_rows>& tile, int row, int column, float x, float y) {
    if constexpr (sizeof(T) == 4)
        *static_cast<float2*>(pair_at(tile, row, column)) = {x, y};
    else
        *static_cast<std::uint32_t*>(pair_at(tile, row, column)) = ptx::pack(x, y, T());
}

// Products of f32 numbers by matrix units of tf32: a number is its first 11 bits, rounded, and what is left, of which
// 11 bits are read. Small terms have sums of their own, for matrix units cut sums off.
template <int count>
__device__ inline void split_words(const std::uint32_t* x, std::uint32_t (&high)[count], std::uint32_t (&low)[count]) {
    unrolled<count>([&](int i) {
        high[i] = (x[i] + 0x1000u) & 0xffffe000u;
        low[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(high[i]));
    });
}
template <>
__device__ inline void multiply<float>(float (&x)[4], float (&y)[4], const Operand<float>& left,
                                       const Operand<float>& right) {
    float small[2][4] = {};
    unrolled<2>([&](int k) {
        std::uint32_t a[2][4], b[2][2][2];  // high, low
        split_words(left + 4 * k, a[0], a[1]);
        unrolled<2>([&](int i) { split_words(right + 4 * i + 2 * k, b[0][i], b[1][i]); });
        unrolled<2, 2>([&](int part, int i) { ptx::multiply_tf32(small[i], a[1 - part], b[part][i]); });
        ptx::multiply_tf32(x, a[0], b[0][0]);
        ptx::multiply_tf32(y, a[0], b[0][1]);
    });
    unrolled<4>([&](int e) { x[e] += small[0][e], y[e] += small[1][e]; });
}

// x [16, 8·N] += left [16, 16·depths] · right of f32 numbers; load(out, n, k) brings eight columns from 8·n on and
// eight of the depth, takes(n, depth) says which sixteens of it are not 0. Small terms have sums of their own; columns
// go by fours, so that as many products run beside each other.
template <int N, int depths, class Load, class Takes>
__device__ inline void add_split(float (&x)[N][4], const Operand<float>* left, const Load& load, const Takes& takes) {
    unrolled<N / 4>([&](int four) {
        float small[4][4] = {};
        unrolled<depths, 2>([&](int depth, int half) {
            if (!takes(4 * four, depth) && !takes(4 * four + 3, depth)) return;
            std::uint32_t a[2][4], b[2][4][2];  // high, low
            std::uint32_t of_left[4];
            unrolled<4>([&](int i) {
                of_left[i] = left[depth][4 * half + i];
                ptx::forget(of_left[i]);  // as places
            });
            split_words(of_left, a[0], a[1]);
            unrolled<4>([&](int i) {
                std::uint32_t words[2];
                load(words, 4 * four + i, 2 * depth + half);
                split_words(words, b[0][i], b[1][i]);
            });
            unrolled<2, 4>([&](int part, int i) {
                if (takes(4 * four + i, depth)) ptx::multiply_tf32(small[i], a[1 - part], b[part][i]);
            });
            unrolled<4>([&](int i) {
                if (takes(4 * four + i, depth)) ptx::multiply_tf32(x[4 * four + i], a[0], b[0][i]);
            });
        });
        unrolled<4, 4>([&](int i, int e) { x[4 * four + i][e] += small[i][e]; });
    });
}

// x [16, 8·N] += left [16, 16] · rows [16·depth, 16·depth + 16) of right, its columns from 16·first on.
template <class T, int N, class Right>
__device__ inline void add_product(float (&x)[N][4], const Operand<T>& left, const Right& right, int depth, int first,
                                   int lane) {
    unrolled<N / 2>([&](int n) {
        Operand<T> b;
        right.load_right_mn_major(b, 16 * depth, first + n, lane);
        multiply<T>(x[2 * n], x[2 * n + 1], left, b);
    });
}
// x [16, 8·N] += left [16, 16·depths] · rightᵀ, right [8·N, 16·depths]; triangular: it is a lower triangle.
template <class T, int N, int depths, class Right>
__device__ inline void add_transposed(float (&x)[N][4], const std::uint32_t (&left)[depths][operand_words<T>],
                                      const Right& right, bool triangular, int lane) {
    if constexpr (sizeof(T) == 4) {
        ptx::forget(lane);  // places are made anew: kept for a loop, they take more registers than there are
        add_split<N, depths>(
            x, left, [&](std::uint32_t(&out)[2], int n, int k) { right.load_eight_rows(out, 8 * n, k, lane); },
            [&](int n, int depth) { return !triangular || n / 2 >= depth; });
    } else {
        unrolled<depths, N / 2>([&](int depth, int n) {
            if (triangular && n < depth) return;
            Operand<T> b;
            right.load_right(b, 16 * n, depth, lane);
            multiply<T>(x[2 * n], x[2 * n + 1], left[depth], b);
        });
    }
}
// The same with right as it lies, [16·depths, 8·N].
template <class T, int N, int depths, class Right>
__device__ inline void add_columns(float (&x)[N][4], const std::uint32_t (&left)[depths][operand_words<T>],
                                   const Right& right, bool triangular, int lane) {
    if constexpr (sizeof(T) == 4) {
        ptx::forget(lane);
        add_split<N, depths>(
            x, left, [&](std::uint32_t(&out)[2], int n, int k) { right.load_eight_columns(out, 8 * n, k, lane); },
            [&](int n, int depth) { return !triangular || n / 2 <= depth; });
    } else {
        unrolled<depths, N / 2>([&](int depth, int n) {
            if (triangular && n > depth) return;
            Operand<T> b;
            right.load_right_mn_major(b, 16 * depth, n, lane);
            multiply<T>(x[2 * n], x[2 * n + 1], left[depth], b);
        });
    }
}
// The same as add_product(), and y of another left operand: they share what is loaded of right.
template <class T, int N, class Right>
__device__ inline void add_two_products(float (&x)[N][4], const Operand<T>& left, float (&y)[N][4],
                                        const Operand<T>& other, const Right& right, int depth, int first, int lane) {
    unrolled<N / 2>([&](int n) {
        Operand<T> b;
        right.load_right_mn_major(b, 16 * depth, first + n, lane);
        multiply<T>(x[2 * n], x[2 * n + 1], left, b);
        multiply<T>(y[2 * n], y[2 * n + 1], other, b);
    });
}

// Σ of the products of two units' elements.
template <class T>
__device__ inline float dot(const uint4& x, const uint4& y) {
    const std::uint32_t left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
    float sum = 0;
    unrolled<4>([&](int i) {
        if constexpr (sizeof(T) == 4) {
            sum = fmaf(__uint_as_float(left[i]), __uint_as_float(right[i]), sum);
        } else {
            const float2 a = ptx::unpack(left[i], T()), b = ptx::unpack(right[i], T());
            sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
        }
    });
    return sum;
}

// Accumulators [16, 8·n] as left operands of the next product.
template <class T, int n>
__device__ inline void to_left(std::uint32_t (&out)[n / 2][operand_words<T>], const float (&x)[n][4]) {
    unrolled<n / 2>([&](int i) {
        if constexpr (sizeof(T) == 4) {
            unrolled<8>([&](int e) { out[i][e] = __float_as_uint(x[2 * i + e / 4][e % 4]); });
        } else {
            out[i][0] = ptx::pack(x[2 * i][0], x[2 * i][1], T());
            out[i][1] = ptx::pack(x[2 * i][2], x[2 * i][3], T());
            out[i][2] = ptx::pack(x[2 * i + 1][0], x[2 * i + 1][1], T());
            out[i][3] = ptx::pack(x[2 * i + 1][2], x[2 * i + 1][3], T());
        }
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
