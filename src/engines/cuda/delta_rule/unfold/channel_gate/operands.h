// What the products of unfold.cu begin with: norms, left operands of each block of 16 tokens, and P and Q.
#pragma once

#include "engines/cuda/delta_rule/fold/launch.h"
#include "engines/cuda/delta_rule/unfold/channel_gate/tiles.h"

namespace softdelta::cuda {

template <class T>
class ChannelOperands : public ChannelTiles<T> {
  public:
    using Base = ChannelTiles<T>;
    using Base::C;
    using Base::call_;
    using Base::D;
    using Base::keep;
    using Base::lane_;
    using Base::load_keys;
    using Base::pairs;
    using Base::small_;
    using Base::store_operand;
    using Base::tile;
    using Base::up_to_eight;
    using Base::value_tile;
    using Base::warp_;
    using Base::with_rows;
    using typename Base::Layout;
    using typename Base::Rows;
    static constexpr int read_keys = 0, erase_keys = 1, written_keys = 2;  // operands: q e^L, −βk e^L, k e^R

    using Base::Base;

    // Norms, of 16 rows by a warp.
    __device__ void make_norms() const {
        if (warp_ >= 8) return;
        const Rows keys = tile(warp_ < 4 ? Layout::q : Layout::k);
        float* to = (warp_ < 4 ? small_.q_norm : small_.k_norm) + 16 * (warp_ % 4) + lane_ / 4;
        float first[4] = {}, second[4] = {};
        if (call_.l2norm) {
#pragma unroll 4
            for (int depth = 0; depth < D / 16; ++depth) {
                std::uint32_t rows[4];
                keys.load_left(rows, 16 * (warp_ % 4), depth, lane_);
                add_own_products(rows, rows, first, second);
            }
        }
        const auto norm = [&](float sum) { return call_.l2norm ? 1 / sqrtf(sum + 1e-6F) : 1.0F; };
        if (!has_own_products()) return;
        to[0] = norm(own_product(first));
        to[8] = norm(own_product(second + 2));
    }
    // Products of rows with the same rows lie on the diagonal of what a warp multiplies: rows r of the first eight, of
    // the second eight.
    __device__ static void add_own_products(const std::uint32_t (&x)[4], const std::uint32_t (&y)[4], float (&first)[4],
                                            float (&second)[4]) {
        ptx::multiply(first, x, y[0], y[2], T());
        ptx::multiply(second, x, y[1], y[3], T());
    }
    // Lanes that have those of rows lane / 4 and lane / 4 + 8.
    __device__ bool has_own_products() const {
        return lane_ / 8 == lane_ % 4;
    }
    __device__ float own_product(const float* two) const {
        return lane_ / 4 % 2 == 0 ? two[0] : two[1];
    }
    __device__ void make_operands(int block, const BlockTokens& L) const {
        float total[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            total[half] = up_to_eight(L, 1, half);
            keep(small_.own[block], ptx::exp2(total[half]), half);
        }
        BlockTokens x, k, decay;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) decay[n][i] = ptx::exp2(L[n][i]);
        load_keys(Layout::q, block, x);
        with_rows(small_.q_norm, block, [&](int n, int i, float norm) { x[n][i] *= call_.scale * norm * decay[n][i]; });
        store_operand(read_keys, block, x);
        load_keys(Layout::k, block, k);
        with_rows(small_.k_norm, block, [&](int n, int i, float norm) {
            k[n][i] *= norm;
            x[n][i] = k[n][i] * ptx::exp2(total[i / 2] - L[n][i]);
        });
        store_operand(written_keys, block, x);
        with_rows(small_.minus_beta, block,
                  [&](int n, int i, float minus_beta) { x[n][i] = minus_beta * k[n][i] * decay[n][i]; });
        store_operand(erase_keys, block, x);
    }

    // P and Q: of warpgroups 16 rows by a warp of the first half, of warps alone 16 rows and one half of the columns.
    __device__ void make_pairs() const {
        if constexpr (ptx::has_warpgroups) {
            const int warp = __shfl_sync(0xffffffffu, warp_, 0);  // known to be it
            if (warp < 8) make_rows_of_pairs(warp / 4, warp % 4);
        } else {
            make_half_of_pairs(warp_ / 4 % 2, warp_ / 8);
        }
    }
    __device__ void make_rows_of_pairs(int which, int block) const {
        float x[C / 8][4];
        begin_multiply_keys<T, true>(value_tile(which == 0 ? Layout::d_o : Layout::d_r), value_tile(Layout::u), 0,
                                     lane_, x);
        ptx::wait_for_products<0>(x);
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
            if (n / 2 <= block) store_pairs(which, block, n, x[n]);  // nobody reads the others
    }
    __device__ void make_half_of_pairs(int which, int column_half) const {
        const int block = warp_ % 4;
        float x[C / 16][4] = {};
        const auto left = value_tile(which == 0 ? Layout::d_o : Layout::d_r), right = value_tile(Layout::u);
#pragma unroll 2
        for (int depth = 0; depth < D / 16; ++depth) {
            if (2 * column_half > block) break;
            std::uint32_t a[4], b[4];
            left.load_left(a, 16 * block, depth, lane_);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if (2 * column_half + n > block) break;
                right.load_right(b, 32 * column_half + 16 * n, depth, lane_);
                ptx::multiply(x[2 * n], a, b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], a, b[2], b[3], T());
            }
        }
#pragma unroll
        for (int n = 0; n < C / 16; ++n) store_pairs(which, block, C / 16 * column_half + n, x[n]);
    }
    __device__ void store_pairs(int which, int block, int at, const float (&x)[4]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 16 * block + lane_ / 4 + 8 * half, j = 8 * at + 2 * (lane_ % 4), end = i + 1 - which;
            *reinterpret_cast<std::uint32_t*>(shared_at(pairs(which).unit(i, at) + 4 * (lane_ % 4))) =
                ptx::pack(j < end ? x[2 * half] : 0.0F, j + 1 < end ? x[2 * half + 1] : 0.0F, T());
        }
    }
};

}  // namespace softdelta::cuda
