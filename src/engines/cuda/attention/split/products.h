// Products of split operands by a warpgroup, at once: what is small is multiplied first or summed apart, because matrix
// units cut sums off. A tile has n rows as their high parts, and then the low ones.
#pragma once

#include "engines/cuda/attention/split/split.h"
#include "engines/cuda/tile/lanes.h"
#include "engines/cuda/tile/registers.h"

namespace softdelta::cuda {

// x [64, n] = unit · left rightᵀ.
template <int columns, int n>
__device__ inline void multiply_split(Acc<64, n>& x, const SplitTile<columns>& left,
                                      const Tile<__half, columns, 2 * n>& right, float unit) {
    constexpr int eights = n / 8;
    float both[2 * eights][4], low[eights][4];
    ptx::begin_products(both, low);
    unrolled<columns / 16>([&](int k) {  // left's high parts by high and low ones of right
        ptx::warpgroup_multiply(both, left.rows_operand(k), right.rows_operand(k), k > 0, __half());
    });
    unrolled<columns / 16>([&](int k) {
        ptx::warpgroup_multiply(low, left.rows_operand(k, split_rows), right.rows_operand(k), k > 0, __half());
    });
    ptx::commit_products();
    ptx::wait_for_products<0>(both);
    ptx::wait_for_products<0>(low);
    unrolled<eights, 4>([&](int i, int m) { x.x[i][m] = (both[i][m] + (both[i + eights][m] + low[i][m])) * unit; });
}

// Left operands of 64 rows, of which each has been divided by its unit.
template <int n>
struct SplitLeft {
    Left<__half, n> high, low;
    float unit[2];

    // Rows whose numbers are at most 2.
    __device__ void take_weights(Acc<64, n>& x) {
        unit[0] = unit[1] = 0x1p-14F;
        constexpr float factor[2] = {0x1p14F, 0x1p14F};
        split(x, factor);
    }
    // Any.
    __device__ void take(Acc<64, n>& x) {
        float most[2] = {}, factor[2];
        x.each([&](float e, int half, int) { most[half] = fmaxf(most[half], fabsf(e)); });
        for_rows([&](int half) {
            constexpr std::uint32_t one = 1u << 23, least = 15 * one;  // of exponents
            most[half] = maximum_of_lanes<4>(most[half]);
            const std::uint32_t size = max(reinterpret_cast<const std::uint32_t&>(most[half]) & 0x7f800000u, least);
            const std::uint32_t up = 268 * one - size, down = size - 14 * one;
            factor[half] = reinterpret_cast<const float&>(up);
            unit[half] = reinterpret_cast<const float&>(down);
        });
        split(x, factor);
    }

  private:
    __device__ void split(Acc<64, n>& x, const float (&factor)[2]) {
        x.each_pair([&](float e, float next, int half, int column) {
            const float a = e * factor[half], b = next * factor[half];
            const std::uint32_t both = ptx::pack(a, b, __half());
            const float2 of = ptx::unpack(both, __half());
            high.pair(half, column) = both;
            low.pair(half, column) = ptx::pack(a - of.x, b - of.y, __half());
        });
    }
};

// sum += unit · left right, right's rows as they lie; `width` columns at once.
template <int width, int columns, int n>
__device__ inline void add_split_product(Acc<64, columns>& sum, const SplitLeft<n>& left,
                                         const Tile<__half, columns, 2 * n>& right, float unit) {
    constexpr int depths = n / 16;
    const float units[2] = {unit * left.unit[0], unit * left.unit[1]};
    unrolled<columns / width>([&](int at) {
        float part[width / 8][4];
        const auto add = [&](const Left<__half, n>& of, int first, bool more) {
            unrolled<depths>([&](int k) {
                ptx::warpgroup_multiply_mn_major(part, of.x[k], right.mn_major_operand(first + k, at * width),
                                                 more || k > 0, __half());
            });
        };
        ptx::begin_products(part);
        add(left.low, 0, false);
        add(left.high, depths, true);
        add(left.high, 0, true);
        ptx::commit_products();
        ptx::wait_for_products<0>(part);
        unrolled<width / 8, 4>([&](int i, int m) {
            float& to = sum.x[at * width / 8 + i][m];
            to = fmaf(part[i][m], units[m / 2], to);
        });
    });
}

}  // namespace softdelta::cuda
