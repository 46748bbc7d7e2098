// Products of f32 precision by matrix instructions of bf16: a number is a sum of bf16 planes of falling size.
//
//     f32   x = hi + mid + lo     three planes of 8 bits hold the 24 of f32, and f16
//     bf16  x = hi                one plane is exact
//
// A product of planes leaves out what is smaller than the last bits: x·y ≈ hi·hi + (hi·mid + mid·hi) + (mid·mid +
// hi·lo + lo·hi). Matrix instructions cut sums off instead of rounding them, so small terms are summed apart from
// hi·hi.
#pragma once

#include "engines/cuda/device/view.h"
#include "engines/cuda/tile/registers.h"

namespace softdelta::cuda {

using Plane = __nv_bfloat16;

// Two numbers as planes; of each plane the first number in the lower half.
template <int planes>
__device__ inline void split(float x, float y, std::uint32_t (&out)[planes]) {
    const auto cut = [](float value) {  // towards zero: the largest numbers do not become infinite
        const std::uint32_t high = reinterpret_cast<const std::uint32_t&>(value) & 0xffff0000u;
        return isnan(value) ? value : reinterpret_cast<const float&>(high);
    };
#pragma unroll
    for (int p = 0; p < planes; ++p) {
        if (p == planes - 1) {
            out[p] = ptx::pack(x, y, Plane());
            return;
        }
        const float hx = cut(x), hy = cut(y);
        out[p] = ptx::pack(hx, hy, Plane());
        x = isfinite(hx) ? x - hx : 0.0F;
        y = isfinite(hy) ? y - hy : 0.0F;
    }
}

// A tile [rows, columns] in shared memory, one plane after the other.
template <int planes, int rows, int columns>
struct PlaneTile {
    using One = Tile<Plane, columns>;
    static constexpr int plane_bytes = One::bytes(rows), bytes = planes * plane_bytes;

    std::uint32_t base;

    __device__ One operator[](int plane) const { return {base + static_cast<std::uint32_t>(plane * plane_bytes)}; }
};

// A sum of products: hi·hi, and what is smaller.
template <int planes>
struct PlaneSum {
    float high[4] = {}, low[4] = {};

    __device__ void add(const std::uint32_t (&a)[planes][4], const std::uint32_t (&b0)[planes],
                        const std::uint32_t (&b1)[planes]) {
#pragma unroll
        for (int total = planes - 1; total > 0; --total)
#pragma unroll
            for (int p = 0; p <= total; ++p) ptx::multiply(low, a[p], b0[total - p], b1[total - p], Plane());
        ptx::multiply(high, a[0], b0[0], b1[0], Plane());
    }
    __device__ float operator[](int i) const {
        return planes == 1 ? high[i] : high[i] + low[i];
    }
};

// Left operands [16, 16] of all planes, for rows [row, row + 16).
template <int planes, int rows, int columns>
__device__ inline void load_left(std::uint32_t (&out)[planes][4], const PlaneTile<planes, rows, columns>& tile, int row,
                                 int k, int lane) {
    unrolled<planes>([&](int p) { tile[p].load_left(out[p], row, k, lane); });
}

// Right operands of all planes, from load(plane, those of the plane).
template <int planes, class Load>
__device__ inline void load_right(std::uint32_t (&out)[4][planes], const Load& load) {
    unrolled<planes>([&](int p) {
        std::uint32_t four[4];
        load(p, four);
        unrolled<4>([&](int m) { out[m][p] = four[m]; });
    });
}

// x as left operands of all planes.
template <int planes, int n>
__device__ inline void to_planes(std::uint32_t (&out)[n / 16][planes][4], Acc<16, n>& x) {
    x.each_pair([&](float e, float next, int half, int column) {
        std::uint32_t both[planes];
        split<planes>(e, next, both);
        unrolled<planes>([&](int p) { out[column / 16][p][2 * (column / 8 % 2) + half] = both[p]; });
    });
}

// x [16, n] = rows [row, row + 16) of `left` times all rows of `right`, transposed, over the first `channels` columns.
template <int planes, int rows, int n, int columns>
__device__ inline void multiply_transposed(Acc<16, n>& x, const PlaneTile<planes, rows, columns>& left, int row,
                                           const PlaneTile<planes, n, columns>& right, int channels, int lane) {
    PlaneSum<planes> sum[n / 8];
    for (int depth = 0; depth < columns / 16 && 16 * depth < channels; ++depth) {
        std::uint32_t a[planes][4];
        load_left(a, left, row, depth, lane);
        unrolled<n / 16>([&](int i) {
            std::uint32_t b[4][planes];
            load_right(b, [&](int p, std::uint32_t(&four)[4]) { right[p].load_right(four, 16 * i, depth, lane); });
            sum[2 * i].add(a, b[0], b[1]);
            sum[2 * i + 1].add(a, b[2], b[3]);
        });
    }
    x.each([&](float& e, int half, int column) { e = sum[column / 8][2 * half + column % 2]; });
}

// sum [16, columns] = factor·sum + weights [16, n] · rows of `tile` [n, columns], over the first `channels` columns.
// factor: of rows r and r + 8 of the lane.
template <int planes, int n, int columns>
__device__ inline void add_weighted(Acc<16, columns>& sum, const float (&factor)[2],
                                    const std::uint32_t (&weights)[n / 16][planes][4],
                                    const PlaneTile<planes, n, columns>& tile, int channels, int lane) {
#pragma unroll
    for (int i = 0; i < columns / 16; ++i) {
        if (16 * i >= channels) continue;
        PlaneSum<planes> part[2];
        unrolled<n / 16>([&](int depth) {
            std::uint32_t b[4][planes];
            load_right(b,
                       [&](int p, std::uint32_t(&four)[4]) { tile[p].load_right_mn_major(four, 16 * depth, i, lane); });
            part[0].add(weights[depth], b[0], b[1]);
            part[1].add(weights[depth], b[2], b[3]);
        });
        unrolled<2, 4>([&](int half, int m) {
            float& to = sum.x[2 * i + half][m];
            to = fmaf(to, factor[m / 2], part[half][m]);
        });
    }
}

}  // namespace softdelta::cuda
