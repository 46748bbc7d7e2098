// The forward kernel on warpgroups: a block has 128 queries of a head, 64 for each of two consumers, and the producer
// copies tiles of keys. The scores of a tile are multiplied before the values of the tile before, and become weights
// while these are multiplied. Keys, bias and values have rings of their own: their stages become free at different
// times.
//
//     S = q kᵀ → scores          [64, N]
//     top' = max S, where that exceeds top by more than slack, else top
//     P = 2^(c·(S − top'))       sum = 2^(c·(top − top'))·sum + ΣP        o = 2^(c·(top − top'))·o + P v
#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/row_end.h"
#include "engines/cuda/attention/warpgroup/mask.h"
#include "engines/cuda/attention/warpgroup/query_block.h"
#include "engines/cuda/attention/warpgroup/scores.h"
#include "engines/cuda/attention/warpgroup/softmax.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace warpgroup;

constexpr int M = warpgroup_rows;

// A block's shared memory: q, then stages of k, of v and of bias; bits of the mask; mbarriers; the sequence.
template <class T, int columns, Between between>
struct ForwardTiles {
    static constexpr bool copied_by_threads = between == Between::added, alone = is_bias_alone(between);
    static constexpr bool biased = copied_by_threads || alone, shares_bias = between == Between::shared_bias;
    static constexpr int N = columns > 128 ? 64 : 128;
    static constexpr int stages = copied_by_threads || between == Between::bias || columns > 128 ? 2 : 3;
    using Query = Tile<T, columns, M>;
    using Key = Tile<T, columns, N>;
    using AddedTile = Added<T, M, N>;
    using Bias = typename AddedTile::Bias;
    using Stages = Ring<stages>;
    static constexpr int keys_at = Query::bytes(), values_at = keys_at + stages * Key::bytes();
    static constexpr int bias_at = values_at + stages * Key::bytes();
    static constexpr int bias_bytes = shares_bias ? 2 * N : biased ? Bias::bytes() : 0;
    static constexpr int bits_at = bias_at + stages * bias_bytes;
    static constexpr int barriers_at = bits_at + (copied_by_threads ? AddedTile::bits_bytes : 0);
    static constexpr int sequence_at = barriers_at + 3 * Stages::bytes + 8;
    static constexpr int bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));

    std::uint32_t base;

    __device__ Query q() const { return {base}; }
    __device__ Key k(int tile) const { return {stage(keys_at, tile, Key::bytes())}; }
    __device__ Key v(int tile) const { return {stage(values_at, tile, Key::bytes())}; }
    __device__ Bias bias(int tile) const { return {stage(bias_at, tile, bias_bytes)}; }
    __device__ std::uint32_t bits() const { return base + bits_at; }
    __device__ Stages of_keys() const { return {base + barriers_at}; }
    __device__ Stages of_values() const { return {base + barriers_at + Stages::bytes}; }
    __device__ Stages of_bias() const { return {base + barriers_at + 2 * Stages::bytes}; }  // and of the mask's bits
    __device__ std::uint32_t bits_free() const { return base + barriers_at + 3 * Stages::bytes; }

    __device__ void start(bool by_tma) const {
        for (const Stages& all : {of_keys(), of_values(), of_bias()})
            all.start(by_tma ? 1 : 2 * warpgroup_threads, 4 * consumers);
        ptx::start_counter(bits_free(), 4 * consumers);
    }

  private:
    __device__ std::uint32_t stage(int from, int tile, int size) const {
        return base + static_cast<std::uint32_t>(from + Stages::stage(tile) * size);
    }
};

template <class Tiles>
__device__ bool adds_tiles(const AttentionCall& call) {
    return Tiles::copied_by_threads && (call.bias || call.mask);
}

template <class T, int columns, Between between>
using ForwardBlock = QueryBlock<ForwardTiles<T, columns, between>, ForwardOutputs>;

template <class T, int columns, Between between>
struct ForwardProducer {
    using Tiles = ForwardTiles<T, columns, between>;
    static constexpr int N = Tiles::N;

    const ForwardBlock<T, columns, between>& b;

    // In the order in which stages become free.
    template <bool by_tma>
    __device__ void run(int thread) const {
        const Tiles& m = b.m;
        const int key_head = b.head / b.call.group;
        const BlockRows<by_tma> rows{b.call, b.boxes, b.sequences, b.s};
        const auto q = rows.q(b.head);
        const auto k = rows.k(key_head);
        const auto v = rows.v(key_head);
        const typename Tiles::AddedTile extra(b.call, b.s, b.head);
        if (b.keys.begin >= b.keys.end) return;
        const auto bring_values = [&](int tile, int at) {
            if (!b.out.o) return;
            begin_stage<by_tma>(m.of_values(), tile, Tiles::Key::bytes());
            v.bring(m.v(tile), at, thread, m.of_values().full(tile));
            end_stage<by_tma>(m.of_values(), tile);
        };
        if (!by_tma) q.bring(m.q(), b.first, thread, 0);
        int tile = 0;
        for (int at = b.keys.begin; at < b.keys.end; at += N, ++tile) {
            typename Tiles::AddedTile::Bits bits{};
            if (Tiles::copied_by_threads && b.call.mask) bits = extra.load_bits(b.first, at, thread);
            begin_stage<by_tma>(m.of_keys(), tile,
                                Tiles::Key::bytes() + Tiles::bias_bytes + (tile == 0 ? Tiles::Query::bytes() : 0));
            const std::uint32_t full = m.of_keys().full(tile);
            if (by_tma && tile == 0) q.bring(m.q(), b.first, thread, full);
            k.bring(m.k(tile), at, thread, full);
            if constexpr (Tiles::shares_bias)
                extra.template bring_shared_bias<by_tma>(m.bias(tile).base, b.boxes.bias, at, thread, full);
            else if constexpr (Tiles::alone)
                extra.template bring_bias<by_tma>(m.bias(tile), b.boxes.bias, b.first, at, thread, full);
            end_stage<by_tma>(m.of_keys(), tile);
            if (tile > 0) bring_values(tile - 1, at - N);
            if (!adds_tiles<Tiles>(b.call)) continue;
            m.of_bias().acquire(tile);
            if (b.call.bias) extra.copy_bias(m.bias(tile), b.first, at, thread);
            if (b.call.mask) {
                ptx::wait(m.bits_free(), (tile & 1) ^ 1);
                extra.store_bits(m.bits(), bits, thread);
            }
            m.of_bias().commit_copies(tile);
        }
        bring_values(tile - 1, b.keys.begin + (tile - 1) * N);
    }
};

template <class T, int columns, Between between>
struct ForwardConsumer {
    using Tiles = ForwardTiles<T, columns, between>;
    static constexpr int N = Tiles::N;

    const ForwardBlock<T, columns, between>& b;
    int warpgroup, warp, lane;
    Acc<64, columns> o{};
    Softmax<T> softmax{};

    __device__ int row() const { return 64 * warpgroup + 16 * warp; }

    // Whether a number is not finite.
    __device__ bool run() {
        const Tiles& m = b.m;
        Mask mask{};
        if (b.keys.begin < b.keys.end) {
            mask = Mask::of_queries(b.call, b.s, b.first + 64 * warpgroup, 16 * warp + lane / 4);
            const Scores<T, M, N, between> scores(b.call, b.s, b.head, b.first, row(), lane);
            LoneBias<T, N, Tiles::shares_bias> bias;
            Acc<64, N> x;
            Left<T, N> p;
            float factor[2];
            const auto multiply_scores = [&](int tile) {  // x = q kᵀ, in the background
                m.of_keys().wait_for_products(tile, b.boxes.given);
                ptx::begin_products(x.x);
                multiply_transposed(x, m.q(), 64 * warpgroup, m.k(tile));
                ptx::commit_products();
            };
            const auto add_values = [&](int tile) {  // o += P v, in the background
                if (!b.out.o) return ptx::commit_products();
                m.of_values().wait_for_products(tile, b.boxes.given);
                ptx::begin_products(o.x);
                add_product(o, p, m.v(tile));
                ptx::commit_products();
            };
            const auto finish_values = [&](int tile) {
                ptx::wait_for_products<0>(o.x);
                m.of_values().release(tile, lane);
            };
            const auto to_weights = [&]<int running>(int tile) {  // x = P, once q kᵀ is there
                const int at = b.keys.begin + tile * N;
                if constexpr (Tiles::shares_bias)
                    bias.fetch_shared(m.bias(tile).base, lane);
                else if constexpr (Tiles::alone)
                    bias.fetch(m.bias(tile), row(), lane);
                ptx::wait_for_products<running>(x.x);
                m.of_keys().release(tile, lane);
                if constexpr (Tiles::alone) {
                    scores.take(bias, x);
                } else {
                    if (adds_tiles<Tiles>(b.call)) m.of_bias().wait(tile);
                    scores.take(m.bias(tile), m.bits(), at, x);
                    if (Tiles::copied_by_threads && b.call.mask) ptx::arrive_as_warp(m.bits_free(), lane);
                    if (adds_tiles<Tiles>(b.call)) m.of_bias().release(tile, lane);
                }
                if (mask.hides<N>(at)) mask.hide(x, at, lane);
                softmax.template take<Tiles::biased>(x, exponent_scale(b.call, Tiles::biased), factor);
            };
            take_first_turn(warpgroup);
            multiply_scores(0);
            give_turn(warpgroup);
            to_weights.template operator()<0>(0);
            x.pack(p);
            int tile = 1;
            for (int at = b.keys.begin + N; at < b.keys.end; at += N, ++tile) {
                take_turn(warpgroup);
                multiply_scores(tile);
                add_values(tile - 1);
                give_turn(warpgroup);
                to_weights.template operator()<1>(tile);
                finish_values(tile - 1);
                if (__any_sync(0xffffffffu, factor[0] != 1 || factor[1] != 1)) o.scale_rows(factor);
                x.pack(p);
            }
            add_values(tile - 1);
            finish_values(tile - 1);
        }
        return store(mask);
    }

    // o and lse.
    __device__ bool store(const Mask& mask) {
        bool nonfinite = false;
        float scale[2];
        for_rows([&](int half) {
            const float sum = softmax.row_sum(half);
            const bool seen = softmax.top[half] != -INFINITY;
            const RowEnd end =
                end_of_row(b.call, b.head, softmax.top[half] * scale_left(b.call, Tiles::biased), sum, seen);
            scale[half] = weight_scale<T> * end.scale;
            const int i = b.first + row() + lane / 4 + 8 * half;
            if (i >= b.s.q_count) return;
            nonfinite = nonfinite || is_lost(b.call, sum, seen, mask.seen[half].begin < mask.seen[half].end) ||
                        !o.row_is_finite(half);
            if (lane % 4 == 0) store_row_end(b.call, b.out, b.s, b.head, i, end);
        });
        const int first = b.first + row();
        const View& to = b.out.o;
        if (to && first < b.s.q_count)
            store_rows(b.m.q(), row(), o, to, query_row(to, b.s, first, b.head), b.s.q_count - first,
                       b.call.value_channels, lane,
                       [&scale](int half, float x) { return scale[half] == 0 ? 0.0F : x * scale[half]; });
        return nonfinite;
    }
};

template <class T, int columns, Between between>
__global__ void __launch_bounds__(block_threads, 1)
    warpgroup_forward_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ OperandBoxes boxes,
                             const __grid_constant__ ForwardOutputs out) {
    if constexpr (ptx::has_warpgroups) {
        ptx::follow_launch_before();
        if (out.far_lse && *out.redo.any == 0) return;
        run_query_block<ForwardProducer<T, columns, between>, ForwardConsumer<T, columns, between>,
                        ForwardBlock<T, columns, between>>(
            pass, boxes, out, out.redo,
            [&](const RowTile& at, int head) { return out.far_lse && *out.redo.at(at, pass.call.heads, head) == 0; });
    }
}

template <class T, int columns, Between between>
void launch_for(const AttentionPass& pass, const ForwardOutputs& out, cudaStream_t stream) {
    using Tiles = ForwardTiles<T, columns, between>;
    OperandBoxes boxes;
    if (columns <= 128 && !Tiles::copied_by_threads) boxes = OperandBoxes::of(pass, {}, M, Tiles::N);
    if (Tiles::alone) boxes.add_bias(pass, Tiles::shares_bias ? 1 : M, Tiles::shares_bias ? Tiles::N : 64);
    boxes.cut(pass, {}, stream);
    const Blocks blocks = pass.query_tiles(pass.call.heads);
    launch(warpgroup_forward_kernel<T, columns, between>,
           {blocks, block_threads, Tiles::bytes, static_cast<bool>(out.far_lse)}, stream,
           "attention forward on warpgroups", pass, boxes, out);
}

}  // namespace

void launch_warpgroup_forward(const AttentionPass& pass, const ForwardOutputs& out, cudaStream_t stream) {
    with_tiles<warpgroup_forward_channels>(pass.call, [&]<class T, int columns>() {
        with_between(between_of(pass.call), [&]<Between between>() {  // a soft cap comes with any of them
            if constexpr (between != Between::cap) launch_for<T, columns, between>(pass, out, stream);
        });
    });
}

}  // namespace softdelta::cuda
