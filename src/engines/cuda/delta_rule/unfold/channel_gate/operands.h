// What the products of unfold.cu begin with: norms, left operands of each block of 16 tokens, and P and Q.
#pragma once

#include "engines/cuda/delta_rule/fold/launch.h"
#include "engines/cuda/delta_rule/unfold/channel_gate/tiles.h"

namespace softdelta::cuda {

template <class T, bool in_parts = false>
struct ChannelOperands {
    using Layout = ChannelMemory<T, in_parts>;
    using Rows = Tile<T, channels>;
    static constexpr int C = chunk_rows, D = channels;

    const ChannelTiles<T, in_parts>& my;

    // Where q and k lie before operands.
    __device__ int key(int which) const {
        if constexpr (in_parts) return my.keys_at + which * Layout::rows_bytes;
        return which == 0 ? Layout::q : Layout::k;
    }

    // Norms, of 16 rows by a warp.
    __device__ void norms() const {
        if (my.warp >= 8) return;
        const Rows keys = my.tile(key(my.warp < 4 ? 0 : 1));
        float* to = (my.warp < 4 ? my.small.q_norm : my.small.k_norm) + 16 * (my.warp % 4) + my.lane / 4;
        float first[4] = {}, second[4] = {};
        if (my.call.l2norm) {
#pragma unroll 4
            for (int depth = 0; depth < D / 16; ++depth) {
                std::uint32_t rows[4];
                keys.load_left(rows, 16 * (my.warp % 4), depth, my.lane);
                my.add_own_products(rows, rows, first, second);
            }
        }
        const auto norm = [&](float sum) { return my.call.l2norm ? 1 / sqrtf(sum + 1e-6F) : 1.0F; };
        if (!my.has_own_products()) return;
        to[0] = norm(my.own_product(first));
        to[8] = norm(my.own_product(second + 2));
    }
    // given: q and k of the block, or null: they still lie in their tiles.
    using Given = std::uint32_t[2][4];
    __device__ void of_block(int block, const BlockTokens& L, const Given* given = nullptr) const {
        const auto load = [&](int which, BlockTokens& out) {
            given != nullptr ? my.unpack((*given)[which], out) : my.load_keys(key(which), block, out);
        };
        float total[2];
        unrolled<2>([&](int half) {
            total[half] = my.up_to_eight(L, 1, half);
            my.keep(my.small.own[block], ptx::exp2(total[half]), half);
        });
        BlockTokens x, k, decay;
        unrolled<2, 4>([&](int n, int i) { decay[n][i] = ptx::exp2(L[n][i]); });
        load(0, x);
        my.with_rows(my.small.q_norm, block,
                     [&](int n, int i, float norm) { x[n][i] *= my.call.scale * norm * decay[n][i]; });
        my.store_operand(read_keys, block, x);
        load(1, k);
        my.with_rows(my.small.k_norm, block, [&](int n, int i, float norm) {
            k[n][i] *= norm;
            x[n][i] = k[n][i] * ptx::exp2(total[i / 2] - L[n][i]);
        });
        my.store_operand(written_keys, block, x);
        my.with_rows(my.small.minus_beta, block,
                     [&](int n, int i, float minus_beta) { x[n][i] = minus_beta * k[n][i] * decay[n][i]; });
        my.store_operand(erase_keys, block, x);
    }

    // P and Q: 16 rows by a warp of the first half, the warps together where they are warpgroups.
    __device__ void pairs() const {
        const int warp = __shfl_sync(0xffffffffu, my.warp, 0);  // known to be it
        if (warp >= 8) return;
        const int which = warp / 4, block = warp % 4;
        float x[C / 8][4];
        begin_multiply_keys<T, ptx::has_warpgroups>(my.value_tile(which == 0 ? Layout::d_o : Layout::d_r),
                                                    my.value_tile(Layout::u), 16 * block, my.lane, x);
        if constexpr (ptx::has_warpgroups) ptx::wait_for_products<0>(x);
        store_all_pairs(which, block, x);
    }
    __device__ void store_all_pairs(int which, int block, const float (&x)[C / 8][4]) const {
        unrolled<C / 8>([&](int n) {
            if (n / 2 <= block) store_pairs(which, block, n, x[n]);
        });  // nobody reads the others
    }
    __device__ void store_pairs(int which, int block, int at, const float (&x)[4]) const {
        unrolled<2>([&](int half) {
            const int i = 16 * block + my.lane / 4 + 8 * half, j = 8 * at + 2 * (my.lane % 4), end = i + 1 - which;
            *reinterpret_cast<std::uint32_t*>(shared_at(my.pairs(which).unit(i, at) + 4 * (my.lane % 4))) =
                ptx::pack(j < end ? x[2 * half] : 0.0F, j + 1 < end ? x[2 * half + 1] : 0.0F, T());
        });
    }
};

}  // namespace softdelta::cuda
