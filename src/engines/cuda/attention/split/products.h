// Products of split operands by a warpgroup, at once: what is small is multiplied first or summed apart, because matrix
// units cut sums off.
#pragma once

#include "engines/cuda/attention/split/split.h"
#include "engines/cuda/tile/registers.h"

namespace softdelta::cuda {

// x = unit · left rightᵀ, of 64 rows each.
template <int columns>
__device__ inline void multiply_split(Acc<64, split_rows>& x, const SplitTile<columns>& left,
                                      const SplitTile<columns>& right, float unit) {
    constexpr int eights = split_rows / 8;
    float both[2 * eights][4], low[eights][4];
    ptx::begin_products(both, low);
    unrolled<columns / 16>([&](int k) {  // left's high rows by high and low ones of right
        ptx::warpgroup_multiply(both, left.rows_operand(k), right.rows_operand(k), k > 0, __half());
    });
    unrolled<columns / 16>([&](int k) {
        ptx::warpgroup_multiply(low, left.rows_operand(k, split_rows), right.rows_operand(k), k > 0, __half());
    });
    ptx::commit_products();
    ptx::wait_for_products<0>(both);
    ptx::wait_for_products<0>(low);
    unrolled<eights, 4>([&](int n, int m) { x.x[n][m] = (both[n][m] + (both[n + eights][m] + low[n][m])) * unit; });
}

// x·unit as left operands.
template <int n>
__device__ inline void split_left(Left<__half, n>& high, Left<__half, n>& low, Acc<64, n>& x, float unit) {
    x.each_pair([&](float e, float next, int half, int column) {
        const float a = e * unit, b = next * unit;
        const std::uint32_t both = ptx::pack(a, b, __half());
        const float2 of = ptx::unpack(both, __half());
        high.pair(half, column) = both;
        low.pair(half, column) = ptx::pack(a - of.x, b - of.y, __half());
    });
}

// sum += unit · left right; left [64, 64], right's rows as they lie.
template <int columns>
__device__ inline void add_split_product(Acc<64, columns>& sum, const Left<__half, split_rows>& high,
                                         const Left<__half, split_rows>& low, const SplitTile<columns>& right,
                                         float unit) {
    constexpr int depths = split_rows / 16;
    Acc<64, columns> part;
    ptx::begin_products(part.x);
    unrolled<depths>([&](int k) {
        ptx::warpgroup_multiply_mn_major(part.x, low.x[k], right.mn_major_operand(k), k > 0, __half());
    });
    unrolled<depths>([&](int k) {
        ptx::warpgroup_multiply_mn_major(part.x, high.x[k], right.mn_major_operand(depths + k), true, __half());
    });
    unrolled<depths>([&](int k) {
        ptx::warpgroup_multiply_mn_major(part.x, high.x[k], right.mn_major_operand(k), true, __half());
    });
    ptx::commit_products();
    ptx::wait_for_products<0>(part.x);
    unrolled<columns / 8, 4>([&](int n, int m) { sum.x[n][m] = fmaf(part.x[n][m], unit, sum.x[n][m]); });
}

}  // namespace softdelta::cuda
