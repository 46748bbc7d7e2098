// The online softmax of a lane's two rows of scores.
#pragma once

#include "engines/cuda/attention/warpgroup/tiles.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda::warpgroup {

// Weights must fit T. Those of f16 and f32 are at most 2^slack: top follows the maxima. Those of bf16 may be as large
// as any f32: once top is known, and near 0, it follows the sums, which are there anyway. A row that climbs by more
// than 2^100 from a tile to the next may overflow: then it is not finite, and another kernel makes it.
template <class T>
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // the lane's part of a sum
    bool follows_sums = false;

    // Scores become weights 2^(c·(x − top)) of the sums so far; `factor` is what older sums shrink by. biased: scores
    // may be huge beside their differences.
    template <bool biased, int N>
    __device__ void take(Acc<64, N>& x, float c, float (&factor)[2]) {
        float base[2];
        factor[0] = factor[1] = 1;
        if (follows_sums) {
            raise_by_sums(c, factor);
            base[0] = top[0], base[1] = top[1];
        } else {
            raise_by_maxima(x, c, factor);
            base[0] = top[0] == -INFINITY ? 0.0F : top[0];
            base[1] = top[1] == -INFINITY ? 0.0F : top[1];
            // c times a huge bias has lost the difference: subtracted first.
            constexpr float huge = 1024;
            if (biased && __any_sync(0xffffffffu, fabsf(base[0]) > huge || fabsf(base[1]) > huge)) {
                x.each([&](float& e, int half, int) { e = (e - base[half]) * c; });
                base[0] = base[1] = 0, c = 1;
            }
        }
        base[0] = base[0] * c - weight_exponent<T>;
        base[1] = base[1] * c - weight_exponent<T>;
        x.exp2(c, base);
        x.add_row_sums(sum);
    }

    __device__ float row_sum(int half) const { return sum_of_lanes<4>(weight_scale<T> * sum[half]); }

  private:
    // top changes only when a weight would exceed 2^slack, or a sum 2^24: so older sums seldom shrink.
    template <int N>
    __device__ void raise_by_maxima(const Acc<64, N>& x, float c, float (&factor)[2]) {
        constexpr float slack = type_of<T> == DType::f16 ? 5 : type_of<T> == DType::f32 ? 1 : 8;
        static_assert(type_of<T> != DType::f16 || slack + weight_exponent<T> < 16, "2^16 is beyond f16");
        float most[2];
        x.row_max(most);
        if (!__any_sync(0xffffffffu, (most[0] - top[0]) * c > slack || (most[1] - top[1]) * c > slack)) return;
        for_rows([&](int half) {
            most[half] = maximum_of_lanes<4>(most[half]);
            if ((most[half] - top[half]) * c > slack) raise(half, most[half], c, factor);
        });
        choose_what_to_follow(c);
    }
    __device__ void raise_by_sums(float c, float (&factor)[2]) {
        constexpr float large = 1 << 24;
        if (!__any_sync(0xffffffffu, sum[0] > large || sum[1] > large)) return;
        for_rows([&](int half) {
            const float all = sum_of_lanes<4>(sum[half]);
            if (all > large) raise(half, top[half] + log2f(all) / c, c, factor);
        });
        choose_what_to_follow(c);
    }
    __device__ void raise(int half, float to, float c, float (&factor)[2]) {
        factor[half] = ptx::exp2((top[half] - to) * c);
        top[half] = to;
        sum[half] *= factor[half];
    }
    __device__ void choose_what_to_follow(float c) {
        constexpr float small = 64;
        const bool far = !(fabsf(top[0]) * c <= small && fabsf(top[1]) * c <= small);
        follows_sums = type_of<T> == DType::bf16 && !__any_sync(0xffffffffu, far);
    }
};

}  // namespace softdelta::cuda::warpgroup
