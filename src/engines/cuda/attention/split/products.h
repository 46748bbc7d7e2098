// Products of split operands by a warpgroup, at once. What is small is multiplied first or summed apart, because matrix
// instructions cut sums off. A tile has n rows as their high parts, and then the low ones.
#pragma once

#include "engines/cuda/attention/addends.h"
#include "engines/cuda/attention/split/split.h"
#include "engines/cuda/tile/lanes.h"
#include "engines/cuda/tile/registers.h"

namespace softdelta::cuda {

// x [64, n] = scale · left rightᵀ.
template <int columns, int n>
__device__ inline void multiply_split(Acc<64, n>& x, const SplitTile<columns>& left,
                                      const Tile<__half, columns, 2 * n>& right, float scale) {
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
    unrolled<eights, 4>([&](int i, int m) { x.x[i][m] = (both[i][m] + (both[i + eights][m] + low[i][m])) * scale; });
}

// What makes scores of products: the lane's addends, which are on their way before the products are there, and the cap.
template <int n>
struct SplitScores {
    float added[n / 8][4];

    // Own rows [row, row + 8] and streamed ones from `column` on, both the lane's: queries and keys, or with by_key the
    // other way round.
    template <bool by_key>
    __device__ void fetch(const AttentionCall& call, const AttentionSequence& s, int head, Index row, Index column) {
        const auto each = [&](const auto& use) {  // use(addend, own, streamed, whether both are there)
            unrolled<n / 8, 4>([&](int at, int m) {
                const Index own = row + 8 * (m / 2), streamed = column + 8 * at + m % 2;
                use(added[at][m], own, streamed,
                    own < (by_key ? s.k_count : s.q_count) && streamed < (by_key ? s.q_count : s.k_count));
            });
        };
        const auto load = [&](const View& view, int group, const auto* data, const auto& use) {
            const Index* stride = view.stride;
            const Index of_own = stride[by_key ? 3 : 2], of_streamed = stride[by_key ? 2 : 3];
            data += s.mask_batch * stride[0] + head / group * stride[1] + row * of_own + column * of_streamed;
            each([&](float& e, Index own, Index streamed, bool there) {
                if (there) use(e, data[(own - row) * of_own + (streamed - column) * of_streamed]);
            });
        };
        each([](float& e, Index, Index, bool) { e = 0; });
        if (call.bias)
            with_type(call.bias, [&](const auto* data) {
                load(call.bias, call.bias_group, data, [](float& e, auto x) { e = to_float(x); });
            });
        if (call.bias_slopes || call.alibi_slopes) {
            const float slope = bias_slope(call, head), alibi = alibi_slope(call, head);
            const Index shift = by_key ? s.q_count - s.k_count : s.k_count - s.q_count;
            each([&](float& e, Index own, Index streamed, bool) {
                e = sloped(e, slope, alibi, own + shift - streamed);
            });
        }
        if (call.mask)
            load(call.mask, call.mask_group, static_cast<const std::uint8_t*>(call.mask.data),
                 [](float& e, std::uint8_t seen) { e = seen == 0 ? -INFINITY : e; });
    }
    // slope: the cap's derivative.
    __device__ void take(Acc<64, n>& x, float softcap, float (&slope)[n / 8][4]) const {
        unrolled<n / 8, 4>([&](int at, int m) {
            float& e = x.x[at][m];
            slope[at][m] = 1;
            if (softcap != 0) {  // cap·tanh(x / cap) without a call, for which registers would be moved
                const float u = e / softcap, less = expm1f(-2 * fabsf(u)), over = 1 / (2 + less);
                e = copysignf(softcap * -less * over, u);
                slope[at][m] = 4 * (1 + less) * over * over;
            }
            e = added[at][m] == -INFINITY ? -INFINITY : e + added[at][m];  // hidden, though its product is no number
        });
    }
};

// Left operands of 64 rows, of which each has been divided by its scale.
template <int n>
struct SplitLeft {
    Left<__half, n> high, low;
    float scale[2];

    // Rows whose numbers are at most 2.
    __device__ void take_weights(Acc<64, n>& x) {
        scale[0] = scale[1] = 0x1p-14F;
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
            scale[half] = reinterpret_cast<const float&>(down);
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

// sum += scale · left right, right's rows as they lie; `width` columns at once.
template <int width, int columns, int n>
__device__ inline void add_split_product(Acc<64, columns>& sum, const SplitLeft<n>& left,
                                         const Tile<__half, columns, 2 * n>& right, float scale) {
    constexpr int depths = n / 16;
    const float scales[2] = {scale * left.scale[0], scale * left.scale[1]};
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
            to = fmaf(part[i][m], scales[m / 2], to);
        });
    });
}

}  // namespace softdelta::cuda
