// A lane's part of Sᵀ as accumulators lie, to and from tensors: value columns `column` and column + 8, channels
// 8·n + 2·(lane % 4) + {0, 1}. Loops, not inlined: they run at the ends of a scan, and unrolled for every type they
// would be most of its code.
#pragma once

#include "engines/cuda/device/view.h"

namespace softdelta::cuda {

template <int K>
using LaneState = float[K / 8][4];

template <int K, class Visit>
__device__ void for_each_of_lane(int key_size, int value_size, int column, int lane, LaneState<K>& state,
                                 Visit&& visit) {
#pragma unroll 1
    for (int u = 0; u < K / 2; ++u) {
        const int m = u / 4 * 8 + 2 * (lane % 4) + u % 2, j = column + 8 * (u / 2 % 2);
        visit(state[u / 4][u % 4], m, j, m < key_size && j < value_size);
    }
}

template <int K>
__device__ __attribute__((noinline)) void load_lane_state(const View* v, Index offset, Index row, Index column_step,
                                                          int key_size, int value_size, int column, int lane,
                                                          LaneState<K>& state) {
    for_each_of_lane<K>(key_size, value_size, column, lane, state, [&](float& x, int m, int j, bool inside) {
        x = *v && inside ? load(*v, offset + m * row + j * column_step) : 0.0F;
    });
}

template <int K>
__device__ __attribute__((noinline)) void store_lane_state(const View* v, Index offset, Index row, Index column_step,
                                                           int key_size, int value_size, int column, int lane,
                                                           LaneState<K>& state) {
    for_each_of_lane<K>(key_size, value_size, column, lane, state, [&](float x, int m, int j, bool inside) {
        if (inside) store(*v, offset + m * row + j * column_step, x);
    });
}

}  // namespace softdelta::cuda
