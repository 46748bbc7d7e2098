// A block with 128 rows of a head on cards without warpgroups. It walks over tiles of other rows, which are copied in
// the background while the tiles before them are multiplied. A warp has 16 rows, or 32 where registers hold their sums:
// then what it loads of the other rows serves twice.
#pragma once

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/warpgroup/block.h"
#include "engines/cuda/attention/warpgroup/mask.h"
#include "engines/cuda/attention/warpgroup/scores.h"

namespace softdelta::cuda::warp {

using namespace warpgroup;

inline constexpr int M = warpgroup_rows;
// Of a block whose warps have so many times 16 rows.
template <int blocks>
inline constexpr int threads = M / (16 * blocks) * 32;

// Of the thread, known to be the warp's.
__device__ inline int own_warp() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
}
// Whether x is true for a thread of the block.
template <int blocks>
__device__ inline bool any(bool x) {
    return ptx::any(1, threads<blocks>, x);
}

// Rows [first, first + rows) of a tile, by all threads of the block.
template <int blocks, class T, int columns, int rows>
__device__ inline void bring(const Tile<T, columns, rows>& tile, const Rows& from, Index first) {
    constexpr int each = rows * warpgroup_threads / threads<blocks>;
    const int row = static_cast<int>(threadIdx.x) / warpgroup_threads * each;
    copy_some_rows<each>(tile, row, from, first + row, static_cast<int>(threadIdx.x) % warpgroup_threads);
}

// x [16, n], of each block of 16 rows from `row` on: rows of left times rows of right, transposed.
template <class T, int columns, int left_rows, int n, int blocks>
__device__ inline void multiply_transposed(Acc<64, n> (&x)[blocks], const Tile<T, columns, left_rows>& left, int row,
                                           const Tile<T, columns, n>& right, int lane) {
    unrolled<blocks>([&](int r) { clear(x[r].x); });
#pragma unroll
    for (int depth = 0; depth < columns / 16; ++depth) {
        std::uint32_t a[blocks][4];
        unrolled<blocks>([&](int r) { left.load_left(a[r], row + 16 * r, depth, lane); });
        unrolled<n / 16>([&](int i) {
            std::uint32_t b[4];
            right.load_right(b, 16 * i, depth, lane);
            unrolled<blocks>([&](int r) {
                ptx::multiply(x[r].x[2 * i], a[r], b[0], b[1], T());
                ptx::multiply(x[r].x[2 * i + 1], a[r], b[2], b[3], T());
            });
        });
    }
}
// x += left · right
template <class T, int n, int columns, int blocks>
__device__ inline void add(Acc<64, columns> (&x)[blocks], const Left<T, n> (&left)[blocks],
                           const Tile<T, columns, n>& right, int lane) {
    unrolled<n / 16, columns / 16>([&](int depth, int i) {
        std::uint32_t b[4];
        right.load_right_mn_major(b, 16 * depth, i, lane);
        unrolled<blocks>([&](int r) {
            ptx::multiply(x[r].x[2 * i], left[r].x[depth], b[0], b[1], T());
            ptx::multiply(x[r].x[2 * i + 1], left[r].x[depth], b[2], b[3], T());
        });
    });
}

// The lane's part of what is added to a tile of 16 rows and N columns, straight from memory: it is on its way while
// keys are multiplied. Rows are queries and columns keys, or with by_key the other way round. A mask is a bias of −∞.
// none: nothing is added.
template <class T, int N, bool by_key, bool none>
class BiasPairs {
  public:
    __device__ void fetch(const AttentionCall& call, const AttentionSequence& s, int head, int row, int column,
                          int lane) {
        if constexpr (none) return;
        const auto place = [&](const View& v, int group) {
            return s.mask_batch * v.stride[0] + head / group * v.stride[1];
        };
        const auto* const bias = static_cast<const std::uint16_t*>(call.bias.data) + place(call.bias, call.bias_group);
        const auto* const mask = static_cast<const std::uint8_t*>(call.mask.data) + place(call.mask, call.mask_group);
        const auto one = [&](Index i, Index j) -> std::uint32_t {  // of row i and column j
            const Index query = by_key ? j : i, key = by_key ? i : j;
            if (query >= s.q_count || key >= s.k_count) return 0;
            if (call.mask && mask[query * call.mask.stride[2] + key * call.mask.stride[3]] == 0) return hidden;
            return call.bias ? bias[query * call.bias.stride[2] + key] : 0;
        };
        unrolled<N / 8, 2>([&](int n, int half) {
            const int i = row + lane / 4 + 8 * half, j = column + 8 * n + own_column(lane);
            if (!by_key && !call.mask && j + 1 < s.k_count)
                two_[n][half] = ptx::load_word(bias + i * call.bias.stride[2] + j, i < s.q_count);
            else
                two_[n][half] = one(i, j) | one(i, j + 1) << 16;
        });
    }
    __device__ float2 at(int half, int column) const {
        if constexpr (none)
            return {0, 0};
        else
            return ptx::unpack(two_[column / 8][half], T());
    }

  private:
    static constexpr std::uint32_t hidden = type_of<T> == DType::f16 ? 0xfc00 : 0xff80;  // −∞
    std::uint32_t two_[none ? 1 : N / 8][2];
};

}  // namespace softdelta::cuda::warp
