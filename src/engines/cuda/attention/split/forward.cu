// The forward pass of split operands: a block has 128 queries of a head, 64 for each of two consumers, and walks over
// tiles of 64 keys. scale_q and so on: the power of 2 of 64 rows.
//
//     S = scale_q·scale_k·q kᵀ → scores      [64, 64]
//     top' = max(top, max S)               P = e^(S − top')
//     sum = e^(top − top')·sum + ΣP        o = e^(top − top')·o + scale_v·P v
//
// Matrix instructions cut sums off instead of rounding them. So each tile's P v is a sum of its own.
#include "engines/cuda/attention/row_end.h"
#include "engines/cuda/attention/split/products.h"
#include "engines/cuda/attention/warpgroup/added.h"
#include "engines/cuda/attention/warpgroup/boxes.h"
#include "engines/cuda/attention/warpgroup/mask.h"
#include "engines/cuda/attention/warpgroup/softmax.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace warpgroup;

// A block's shared memory: q, then stages of k and of v; mbarriers; the sequence.
template <int columns>
struct ForwardTiles {
    using Rows = SplitTile<columns>;
    using Stages = Ring<2>;
    static constexpr int keys_at = consumers * Rows::bytes(), values_at = keys_at + 2 * Rows::bytes();
    static constexpr int barriers_at = values_at + 2 * Rows::bytes(), sequence_at = barriers_at + 2 * Stages::bytes;
    static constexpr int bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));

    std::uint32_t base;

    __device__ Rows q(int consumer) const { return {base + static_cast<std::uint32_t>(consumer * Rows::bytes())}; }
    __device__ Rows k(int tile) const { return stage(keys_at, tile); }
    __device__ Rows v(int tile) const { return stage(values_at, tile); }
    __device__ Stages of_keys() const { return {base + barriers_at}; }
    __device__ Stages of_values() const { return {base + barriers_at + Stages::bytes}; }

  private:
    __device__ Rows stage(int from, int tile) const {
        return {base + static_cast<std::uint32_t>(from + Stages::stage(tile) * Rows::bytes())};
    }
};

// added: to scores, or their cap.
template <int columns, bool added>
struct ForwardBlock {
    using Tiles = ForwardTiles<columns>;

    Tiles m;
    const AttentionCall& call;
    const SplitOperands& split;
    const ForwardOutputs& out;
    const AttentionSequence& s;
    int head, first;
    Index q, k, v;  // places of the first rows of these
    Span keys;

    __device__ void produce() const {
        constexpr int bytes = Tiles::Rows::bytes();
        const auto bring = [&](const Ring<2>& ring, int tile, const typename Tiles::Rows& to, const SplitRows& from,
                               Index at) { copy_side_by_side(to.base, from.rows(at), bytes, ring.full(tile)); };
        int tile = 0;
        for (int at = keys.begin; at < keys.end; at += split_rows, ++tile) {
            begin_stage<true>(m.of_keys(), tile, tile == 0 ? (1 + consumers) * bytes : bytes);
            if (tile == 0)
                for (int w = 0; w < consumers; ++w) bring(m.of_keys(), tile, m.q(w), split.q, q + w);
            bring(m.of_keys(), tile, m.k(tile), split.k, k + at / split_rows);
            begin_stage<true>(m.of_values(), tile, bytes);
            bring(m.of_values(), tile, m.v(tile), split.v, v + at / split_rows);
        }
    }

    // By consumer w; whether a number is not finite.
    __device__ bool consume(int w, int warp, int lane) const {
        const int row = 64 * w + 16 * warp + lane / 4;
        Acc<64, columns> o{};
        Softmax<float> softmax{};
        const Mask mask = Mask::of_queries(call, s, first + 64 * w, 16 * warp + lane / 4);
        const float scale = call.scale * split.q.scale[q + w];
        const Index last = min(Index(first + 64 * w + 63), s.q_count - 1);
        const Span own(visible_keys(call, s, first + 64 * w).begin, visible_keys(call, s, last).end);
        int tile = 0;
        for (int at = keys.begin; at < keys.end; at += split_rows, ++tile) {
            const bool sees = at < own.end && at + split_rows > own.begin;
            Acc<64, split_rows> x;
            m.of_keys().wait(tile);
            if (sees) {
                multiply_split(x, m.q(w), m.k(tile), scale * split.k.scale[k + at / split_rows]);
            }
            m.of_keys().release(tile, lane);
            float factor[2];
            SplitLeft<split_rows> weights;
            if (sees) {
                if constexpr (added) {  // afterwards: registers are full before
                    SplitScores<split_rows> scores;
                    float slope[split_rows / 8][4];
                    scores.template fetch<false>(call, s, head, first + row, at + own_column(lane));
                    scores.take(x, call.softcap, slope);
                }
                if (mask.hides<split_rows>(at)) mask.hide(x, at, lane);
                softmax.template take<true>(x, log2_e, factor);
                weights.take_weights(x);
            }
            m.of_values().wait(tile);
            if (sees && out.o) {
                if (__any_sync(0xffffffffu, factor[0] != 1 || factor[1] != 1)) o.scale_rows(factor);
                add_split_product<columns>(o, weights, m.v(tile), split.v.scale[v + at / split_rows]);
            }
            m.of_values().release(tile, lane);
        }
        return store(o, softmax, mask, row, lane);
    }

  private:
    __device__ bool store(Acc<64, columns>& o, const Softmax<float>& softmax, const Mask& mask, int row,
                          int lane) const {
        bool nonfinite = false;
        for_rows([&](int half) {
            const float sum = softmax.row_sum(half);
            const bool seen = softmax.top[half] != -INFINITY;
            const RowEnd end = end_of_row(call, head, softmax.top[half], sum, seen);
            const int i = first + row + 8 * half;
            if (i >= s.q_count) return;
            nonfinite = nonfinite || is_lost(call, sum, seen, mask.seen[half].begin < mask.seen[half].end) ||
                        !o.row_is_finite(half);
            if (lane % 4 == 0) store_row_end(call, out, s, head, i, end);
            const View& to = out.o;
            if (to)
                store_row(to, query_row(to, s, i, head), o, half, call.value_channels, lane,
                          [&](float e) { return end.scale == 0 ? 0.0F : e * end.scale; });
        });
        return nonfinite;
    }
};

template <int columns, bool added>
__global__ void __launch_bounds__(block_threads, 1)
    split_forward_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ SplitOperands split,
                         const __grid_constant__ ForwardOutputs out) {
    if constexpr (ptx::has_warpgroups) {
        const auto& [call, sequences] = pass;
        using Tiles = ForwardTiles<columns>;
        if (out.far_lse && *out.redo.any == 0) return;
        const int head = static_cast<int>(blockIdx.x), key_head = head / call.group;
        const RowTile at = sequences.tile_of_block(sequences.of_queries, true);
        if (!at) return out.redo.clear(at, call.heads, head);
        if (out.far_lse && *out.redo.at(at, call.heads, head) == 0) return;
        const Tiles m{ptx::shared_address(ptx::shared_memory())};
        AttentionSequence& s = share_sequence(sequences, at.i, Tiles::sequence_at);
        const RowTile keys = sequences.tile_of(sequences.of_keys, at.i, 0);
        if (threadIdx.x == 0) {
            s.k_count = listed_rows(s.k_count, sequences.of_keys, keys);
            for (const Ring<2>& all : {m.of_keys(), m.of_values()}) all.start(1, 4 * consumers);
        }
        __syncthreads();
        const int first = static_cast<int>(at.first);
        const ForwardBlock<columns, added> block(m, call, split, out, s, head, first, split.q.at(at, head),
                                                 split.k.at(keys, key_head), split.v.at(keys, key_head),
                                                 keys_of_block<split_rows>(call, s, first));
        share_roles(
            [&] {
                if (threadIdx.x == 0) block.produce();
            },
            [&](int w, int warp, int lane) {
                const bool nonfinite = any_consumer(block.consume(w, warp, lane));
                if (threadIdx.x == warpgroup_threads)
                    out.redo.mark(sequences.tile_of_block(sequences.of_queries, true), call.heads, head, nonfinite);
            });
    }
}

}  // namespace

void launch_split_forward(const AttentionPass& pass, const SplitOperands& split, const ForwardOutputs& out,
                          cudaStream_t stream) {
    with_split_kernel(pass.call, split, [&]<int columns, bool added>() {
        launch(split_forward_kernel<columns, added>,
               {pass.query_tiles(pass.call.heads), block_threads, ForwardTiles<columns>::bytes}, stream,
               "attention forward of split operands", pass, split, out);
    });
}

}  // namespace softdelta::cuda
