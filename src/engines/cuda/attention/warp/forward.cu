// The forward kernel on cards without warpgroups.
//
//     S = q kᵀ → scores     P = 2^(c·(S − top))     o = factor·o + P v     (warpgroup/softmax.h)
//
// Keys of the next tile come while weights multiply values, values while keys are multiplied.
#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/row_end.h"
#include "engines/cuda/attention/warp/block.h"
#include "engines/cuda/attention/warpgroup/softmax.h"
#include "engines/cuda/device/card.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace warp;

constexpr int N = 64;

template <class T, int columns>
struct ForwardTiles {
    using Query = Tile<T, columns, M>;
    using Key = Tile<T, columns, N>;
    static constexpr int keys_at = Query::bytes(), values_at = keys_at + Key::bytes(),
                         sequence_at = values_at + Key::bytes(),
                         bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));
    static_assert(bytes <= least_shared_bytes);

    std::uint32_t base;

    __device__ Query q() const { return {base}; }
    __device__ Key k() const { return {base + keys_at}; }
    __device__ Key v() const { return {base + values_at}; }
};

// blocks: of 16 rows of a warp.
template <class T, int columns, bool biased, int blocks>
struct WarpForward {
    const ForwardTiles<T, columns> m;
    const AttentionCall& call;
    const ForwardOutputs& out;
    const AttentionSequence& s;
    int head, first, row, lane;  // row: the warp's first of the block's
    Acc<64, columns> o[blocks] = {};
    Softmax<T> softmax[blocks] = {};

    __device__ Mask mask_of(int r) const {
        const int of_block = row + 16 * r;
        return Mask::of_queries(call, s, first + of_block / 64 * 64, of_block % 64 + lane / 4);
    }

    // Whether a number is not finite.
    __device__ bool run() {
        const int key_head = head / call.group;
        const Span keys = keys_of_block<N>(call, s, first);
        Mask mask[blocks];
        unrolled<blocks>([&](int r) { mask[r] = mask_of(r); });
        const Rows k = Rows::of_keys(call.k, call, s, key_head, call.channels);
        const Rows v = Rows::of_keys(call.v, call, s, key_head, call.value_channels);
        const auto wait_for_all = [] {
            ptx::wait_for_copies();
            __syncthreads();
        };
        if (keys.begin < keys.end) {
            bring<blocks>(m.q(), Rows::of_queries(call.q, s, head, call.channels), first);
            bring<blocks>(m.k(), k, keys.begin);
        }
        for (int at = keys.begin; at < keys.end; at += N) {
            BiasPairs<T, N, false, !biased> bias[blocks];
            unrolled<blocks>([&](int r) { bias[r].fetch(call, s, head, first + row + 16 * r, at, lane); });
            wait_for_all();
            if (out.o) bring<blocks>(m.v(), v, at);
            Acc<64, N> x[blocks];
            float factor[blocks][2];
            multiply_transposed(x, m.q(), row, m.k(), lane);
            Left<T, N> p[blocks];
            unrolled<blocks>([&](int r) {
                if constexpr (biased) {
                    x[r].each_pair([&](float& e, float& next, int half, int column) {
                        const float2 two = bias[r].at(half, column);
                        e = fmaf(e, call.scale, two.x);
                        next = fmaf(next, call.scale, two.y);
                    });
                } else if (call.softcap != 0) {
                    float slope;
                    x[r].each([&](float& e, int, int) { e = capped(e * call.scale, call.softcap, slope); });
                }
                if (mask[r].template hides<N>(at)) mask[r].hide(x[r], at, lane);
                softmax[r].template take<biased>(x[r], exponent_scale(call, biased), factor[r]);
                x[r].pack(p[r]);
            });
            wait_for_all();
            if (at + N < keys.end) bring<blocks>(m.k(), k, at + N);
            if (!out.o) continue;
            unrolled<blocks>([&](int r) {
                if (__any_sync(0xffffffffu, factor[r][0] != 1 || factor[r][1] != 1)) o[r].scale_rows(factor[r]);
            });
            warp::add(o, p, m.v(), lane);
        }
        bool nonfinite = false;
        unrolled<blocks>([&](int r) { nonfinite = store(r, mask[r]) || nonfinite; });
        return nonfinite;
    }

    // As warpgroup/forward.cu has it.
    __device__ bool store(int r, const Mask& mask) {
        const int own = row + 16 * r;
        bool nonfinite = false;
        float scale[2];
        for_rows([&](int half) {
            const float sum = softmax[r].row_sum(half);
            const bool seen = softmax[r].top[half] != -INFINITY;
            const RowEnd end = end_of_row(call, head, softmax[r].top[half] * scale_left(call, biased), sum, seen);
            scale[half] = weight_scale<T> * end.scale;
            const int i = first + own + lane / 4 + 8 * half;
            if (i >= s.q_count) return;
            nonfinite = nonfinite || is_lost(call, sum, seen, mask.seen[half].begin < mask.seen[half].end) ||
                        !o[r].row_is_finite(half);
            if (lane % 4 == 0) store_row_end(call, out, s, head, i, end);
        });
        const View& to = out.o;
        if (const int begin = first + own; to && begin < s.q_count)
            store_rows(m.q(), own, o[r], to, query_row(to, s, begin, head), s.q_count - begin, call.value_channels,
                       lane, [&scale](int half, float x) { return scale[half] == 0 ? 0.0F : x * scale[half]; });
        return nonfinite;
    }
};

template <class T, int columns, bool biased, int blocks>
__global__ void __launch_bounds__(threads<blocks>, columns <= 64 || blocks > 1 ? 2 : 1)
    warp_forward_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ ForwardOutputs out) {
    const AttentionCall& call = pass.call;
    const int head = static_cast<int>(blockIdx.x);
    const RowTile at = pass.sequences.tile_of_block(pass.sequences.of_queries, true);
    if (!at) return out.redo.clear(at, call.heads, head);
    if (out.far_lse && *out.redo.at(at, call.heads, head) == 0) return;
    const AttentionSequence& s = share_sequence(pass.sequences, at.i, ForwardTiles<T, columns>::sequence_at);
    const ForwardTiles<T, columns> tiles{ptx::shared_address(ptx::shared_memory())};
    WarpForward<T, columns, biased, blocks> of(tiles, call, out, s, head, static_cast<int>(at.first),
                                               16 * blocks * warp::own_warp(), static_cast<int>(threadIdx.x) % 32);
    const bool nonfinite = any<blocks>(of.run());
    if (threadIdx.x == 0) out.redo.mark(at, call.heads, head, nonfinite);
}

}  // namespace

void launch_warp_forward(const AttentionPass& pass, const ForwardOutputs& out, cudaStream_t stream) {
    const AttentionCall& call = pass.call;
    with_tiles<128>(call, [&]<class T, int columns>() {
        const auto launch_for = [&]<bool biased>() {
            constexpr int blocks = biased && columns > 64 ? 1 : 2;
            launch(warp_forward_kernel<T, columns, biased, blocks>,
                   {pass.query_tiles(call.heads), threads<blocks>, ForwardTiles<T, columns>::bytes}, stream,
                   "attention forward by warps", pass, out);
        };
        call.bias || call.mask ? launch_for.template operator()<true>() : launch_for.template operator()<false>();
    });
}

}  // namespace softdelta::cuda
