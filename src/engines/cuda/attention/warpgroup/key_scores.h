// Products of a warp's 16 keys and a tile of N queries made into scores: rows are keys, columns queries.
#pragma once

#include "engines/cuda/attention/warpgroup/query_scores.h"

namespace softdelta::cuda::warpgroup {

template <class T, int M, int N, Between between>
class KeyScores {
    static constexpr bool added = between == Between::added;
    using AddedTile = Added<T, N, M>;
    using BiasTile = typename AddedTile::Bias;

  public:
    // The warp's keys are rows [row, row + 16) of the block's, which begin at `first`.
    __device__ KeyScores(const AttentionCall& call, const AttentionSequence& s, int head, int first, int row, int lane)
        : call_(call), s_(s), head_(head), first_(first), row_(row), lane_(lane) {}

    // A bias that all queries share, of the lane's two keys, in the exponent's unit.
    __device__ void load_bias(float (&out)[2]) const {
        const Index* stride = call_.bias.stride;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Index key = first_ + row_ + lane_ / 4 + 8 * half;
            out[half] = key >= s_.k_count
                            ? 0.0F
                            : log2_e * load(call_.bias, s_.mask_batch * stride[0] +
                                                            head_ / call_.bias_group * stride[1] + key * stride[3]);
        }
    }

    __device__ void take(const BiasTile& bias, std::uint32_t bits, int at, float (&x)[N / 8][4]) const {
        if constexpr (between == Between::cap) {
            if (call_.mask) hide_masked(bits, x);
            return;
        }
        if (!is_scaled(call_, added)) return;
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int m = 0; m < 4; ++m) x[n][m] *= call_.scale;
        if constexpr (added) {
            if (call_.bias_slopes || call_.alibi_slopes)
                add_sloped(bias, Slopes(call_, s_, head_), at, x);
            else if (call_.bias)
                add(bias, x);
            if (call_.mask) hide_masked(bits, x);
        }
    }

  private:
    __device__ void add(const BiasTile& bias, float (&x)[N / 8][4]) const {
#pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            std::uint32_t four[4];
            bias.load_transposed_result(four, 16 * n, row_, lane_);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 two = ptx::unpack(four[e], T());
                float* to = &x[2 * n + e / 2][2 * (e % 2)];
                to[0] = two.x == -INFINITY ? two.x : to[0] + two.x;  // hidden, though its product is no number
                to[1] = two.y == -INFINITY ? two.y : to[1] + two.y;
            }
        }
    }
    __device__ void add_sloped(const BiasTile& bias, const Slopes& slopes, int at, float (&x)[N / 8][4]) const {
#pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            std::uint32_t four[4] = {};
            if (call_.bias) bias.load_transposed_result(four, 16 * n, row_, lane_);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 two = ptx::unpack(four[e], T());
                float* to = &x[2 * n + e / 2][2 * (e % 2)];
                const int i = at + 16 * n + 8 * (e / 2) + 2 * (lane_ % 4);
                const int j = first_ + row_ + lane_ / 4 + 8 * (e % 2);
                to[0] = slopes.add(to[0], two.x, i, j);
                to[1] = slopes.add(to[1], two.y, i + 1, j);
            }
        }
    }
    __device__ void hide_masked(std::uint32_t bits, float (&x)[N / 8][4]) const {
        const int key = row_ + lane_ / 4;
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const std::uint32_t word =
                    AddedTile::load_word(bits, 8 * n + 2 * (lane_ % 4) + e, row_ / 32) >> (key % 32);
                if ((word & 1u) == 0) x[n][e] = -INFINITY;
                if ((word >> 8 & 1u) == 0) x[n][2 + e] = -INFINITY;
            }
    }

    const AttentionCall& call_;
    const AttentionSequence& s_;
    int head_, first_, row_, lane_;
};

}  // namespace softdelta::cuda::warpgroup
