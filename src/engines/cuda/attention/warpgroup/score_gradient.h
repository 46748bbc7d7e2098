// What a block of keys stores of ds: tiles, which may be dbias, or sums over queries.
#pragma once

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/warpgroup/boxes.h"
#include "engines/cuda/attention/warpgroup/tiles.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda::warpgroup {

__device__ inline bool sums_queries(const Gradients& grad) {
    return grad.dbias && grad.bias_queries == 1;
}

template <class T, class Tile>
class ScoreGradient {
  public:
    __device__ ScoreGradient(const Gradients& grad, const Boxes& boxes, int sequence, int first)
        : grad_(grad), boxes_(boxes), sequence_(sequence), first_(first) {}

    // A tile of ds, in shared memory in place of the bias: a warp has read it where it now writes. By a warpgroup, of
    // its 64 keys; the copy engine stores what all warps have made: `made` counts them.
    template <int n>
    __device__ void store(const Tile& tile, std::uint32_t made, int head, int at, int warpgroup, int warp, int lane,
                          const std::uint32_t (&ds)[n][4]) const {
        unrolled<n>([&](int i) { tile.store_transposed_result(ds[i], 16 * i, 64 * warpgroup + 16 * warp, lane); });
        ptx::publish_to_products();  // and to the copy engine, which reads it or brings the next tile there
        if (boxes_.given) {
            ptx::arrive_as_warp(made, lane);
            return;
        }
        ptx::barrier(2 + warpgroup, warpgroup_threads);
        const int u = 8 * warpgroup + lane % 8;
        const Index key = first_ + 8 * u;
        T* to = row(head) + key;
#pragma unroll
        for (int r = lane / 8 + 4 * warp; r < 16 * n; r += 16)
            if (at + r < grad_.ds.queries)
                store_units(to + (at + r) * grad_.ds.view.stride[2], key,
                            *reinterpret_cast<const uint4*>(shared_at(tile.unit(r, u))));
    }
    // That tile of both warpgroups, by one thread.
    __device__ void store_boxes(const Tile& tile, int head, int at) const {
        unrolled<2>([&](int group) {
            store_box(boxes_, tile.base + static_cast<std::uint32_t>(group * Tile::panel_bytes), first_ + 64 * group,
                      at, coordinate(grad_.ds.view, 1, head - grad_.ds.first_head),
                      coordinate(grad_.ds.view, 0, sequence_ - grad_.ds.first_sequence));
        });
    }
    // Queries [begin, end) of the block's keys: no tile has them. By so many threads.
    __device__ void clear(int head, Index begin, Index end, int thread, int threads) const {
        const Index key = first_ + 8 * (thread % 16);
        for (Index i = begin + thread / 16; i < end; i += threads / 16)
            store_units(row(head) + i * grad_.ds.view.stride[2] + key, key, uint4{});
    }
    // Of the lane's two keys, its part of the sums.
    __device__ void store_sum(int head, int row, int lane, double (&sum)[2]) const {
        const Index* stride = grad_.dbias.stride;
        unrolled<2>([&](int half) {
            sum[half] = sum_of_lanes<4>(sum[half]);
            const Index key = first_ + row + lane / 4 + 8 * half;
            if (lane % 4 == 0 && key < grad_.bias_keys)
                cuda::store(grad_.dbias, sequence_ * stride[0] + head * stride[1] + key * stride[3],
                            static_cast<float>(sum[half]));
        });
    }

  private:
    __device__ T* row(int head) const {
        const Index* stride = grad_.ds.view.stride;
        return static_cast<T*>(grad_.ds.view.data) + (sequence_ - grad_.ds.first_sequence) * stride[0] +
               (head - grad_.ds.first_head) * stride[1];
    }
    // Eight keys, as many as there are.
    __device__ void store_units(T* to, Index key, const uint4& eight) const {
        if (key + 8 <= grad_.ds.keys) {
            __stcs(reinterpret_cast<uint4*>(to), eight);
            return;
        }
        const std::uint32_t two[4] = {eight.x, eight.y, eight.z, eight.w};
        unrolled<8>([&](int e) {
            if (key + e < grad_.ds.keys)
                reinterpret_cast<std::uint16_t*>(to)[e] = static_cast<std::uint16_t>(two[e / 2] >> (16 * (e % 2)));
        });
    }

    const Gradients& grad_;
    const Boxes& boxes_;
    int sequence_, first_;
};

}  // namespace softdelta::cuda::warpgroup
