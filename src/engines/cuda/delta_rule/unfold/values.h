// rowsum(dR∘v) of a chunk, the part of dβ in β∘v. Some neighbouring threads share a row. Each has some units of v,
// which it loads before dR is there.
#pragma once

#include "engines/cuda/delta_rule/saved.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

template <class T, class Rows, int threads = 8>
class RowValues {
  public:
    // from: the row of v that the threads share, of so many channels; part: which of them this one is.
    __device__ RowValues(const T* from, int channels, int part) : part_(part) {
        unrolled<count>([&](int i) {
            const int unit = part + threads * i;
            v_[i] = {0, 0, 0, 0};
            if (unit_elements<T> * unit < channels)
                v_[i] = *reinterpret_cast<const uint4*>(from + unit_elements<T> * unit);
        });
    }

    __device__ float dot_row(const Rows& d_r, int row) const {
        float sum = 0;
        unrolled<count>([&](int i) { sum += dot_unit(d_r, row, threads * i, v_[i]); });
        return sum_of_lanes<threads>(sum);
    }
    // The thread's part of it in channels [64·part, 64·part + 64), which are all of a tile.
    __device__ float dot_part(const KeyTile<T, 64>& d_r, int row, int part) const {
        constexpr int each = 64 / unit_elements<T> / threads;
        float sum = 0;
        unrolled<count>([&](int i) { sum += i / each == part ? dot_unit(d_r, row, i % each * threads, v_[i]) : 0.0F; });
        return sum;
    }

  private:
    static constexpr int count = Rows::units / threads;

    template <class Tile>
    __device__ float dot_unit(const Tile& tile, int row, int first, const uint4& v) const {
        return dot<T>(*reinterpret_cast<const uint4*>(shared_at(tile.unit(row, part_ + first))), v);
    }

    int part_;
    uint4 v_[count];
};

}  // namespace softdelta::cuda
