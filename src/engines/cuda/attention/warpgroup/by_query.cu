// dq on warpgroups: a block has 128 queries of a head, 64 for each of two consumers, and the producer copies tiles of
// keys.
//
//     S = q kᵀ     P = 2^(c·S − lse)     dP = do vᵀ     ds = P∘(dP − D)     dq += scale·ds k
#include "engines/cuda/attention/warpgroup/gradients.h"
#include "engines/cuda/attention/warpgroup/query_block.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace warpgroup;

constexpr int M = warpgroup_rows;

// A block's shared memory: q, do, then stages of k, v and bias; bits of the mask; stages of a bias that queries share;
// mbarriers; the sequence.
template <class T, int columns, Between between>
struct QueryTiles {
    static constexpr bool capped = between == Between::cap, shares_bias = between == Between::shared_bias;
    static constexpr bool copied_by_threads = between == Between::added || capped;
    static constexpr bool has_tiles = between == Between::added || between == Between::bias;  // of bias
    static constexpr bool is_wide = columns > 128, is_narrow = has_tiles || capped;
    static constexpr int N = is_wide ? (is_narrow ? 64 : 32) : is_narrow ? 64 : 128;
    static constexpr int stages = is_wide && N == 32 ? 3 : is_wide ? 1 : 2;
    using Query = Tile<T, columns, M>;
    using Key = Tile<T, columns, N>;
    using AddedTile = Added<T, M, N>;
    using Bias = typename AddedTile::Bias;
    using Stages = Ring<stages>;
    static constexpr int bias_bytes = has_tiles ? M * N * 2 : 0;
    static constexpr int stage_bytes = 2 * Key::bytes() + bias_bytes;
    static constexpr int bits_at = 2 * Query::bytes() + stages * stage_bytes;
    static constexpr int shared_bias_at = bits_at + (copied_by_threads ? AddedTile::bits_bytes : 0);
    static constexpr int shared_bias_bytes = N < 64 ? 128 : 2 * N;  // TMA wants a multiple of 128
    static constexpr int barriers_at = shared_bias_at + (shares_bias ? stages * shared_bias_bytes : 0);
    static constexpr int sequence_at = barriers_at + Stages::bytes + 8;
    static constexpr int bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));

    std::uint32_t base;

    __device__ Query q() const { return {base}; }
    __device__ Query d_o() const { return {base + Query::bytes()}; }
    __device__ Key k(int tile) const { return {stage(2 * Query::bytes(), tile, stage_bytes)}; }
    __device__ Key v(int tile) const { return {k(tile).base + Key::bytes()}; }
    __device__ Bias bias(int tile) const { return {k(tile).base + 2 * Key::bytes()}; }
    __device__ std::uint32_t shared_bias(int tile) const { return stage(shared_bias_at, tile, shared_bias_bytes); }
    __device__ std::uint32_t bits() const { return base + bits_at; }
    __device__ Stages ring() const { return {base + barriers_at}; }
    __device__ std::uint32_t bits_free() const { return base + barriers_at + Stages::bytes; }

    __device__ void start(bool by_tma) const {
        ring().start(by_tma ? 1 : 2 * warpgroup_threads, 4 * consumers);
        ptx::start_counter(bits_free(), 4 * consumers);
    }

  private:
    __device__ std::uint32_t stage(int from, int tile, int size) const {
        return base + static_cast<std::uint32_t>(from + Stages::stage(tile) * size);
    }
};

template <class T, int columns, Between between>
using GradientBlock = QueryBlock<QueryTiles<T, columns, between>, Gradients>;

template <class T, int columns, Between between>
struct QueryProducer {
    using Tiles = QueryTiles<T, columns, between>;
    static constexpr int N = Tiles::N;

    const GradientBlock<T, columns, between>& b;

    template <bool by_tma>
    __device__ void run(int thread) const {
        const Tiles& m = b.m;
        const int key_head = b.head / b.call.group;
        const BlockRows<by_tma> rows{b.call, b.boxes, b.sequences, b.s};
        const auto q = rows.q(b.head);
        const auto d_o = rows.d_o(b.out.d_o, b.head);
        const auto k = rows.k(key_head);
        const auto v = rows.v(key_head);
        const typename Tiles::AddedTile extra(b.call, b.s, b.head);
        const auto bring_own = [&](std::uint32_t full) {
            q.bring(m.q(), b.first, thread, full);
            d_o.bring(m.d_o(), b.first, thread, full);
        };
        if (!by_tma && b.keys.begin < b.keys.end) bring_own(0);
        int tile = 0;
        for (int at = b.keys.begin; at < b.keys.end; at += N, ++tile) {
            typename Tiles::AddedTile::Bits bits{};
            if (Tiles::copied_by_threads && b.call.mask) bits = extra.load_bits(b.first, at, thread);
            begin_stage<by_tma>(
                m.ring(), tile,
                Tiles::stage_bytes + (Tiles::shares_bias ? 2 * N : 0) + (tile == 0 ? 2 * Tiles::Query::bytes() : 0));
            const std::uint32_t full = m.ring().full(tile);
            if (by_tma && tile == 0) bring_own(full);
            k.bring(m.k(tile), at, thread, full);
            v.bring(m.v(tile), at, thread, full);
            if constexpr (Tiles::has_tiles) {
                if (b.call.bias)
                    extra.template bring_bias<by_tma>(m.bias(tile), b.boxes.bias, b.first, at, thread, full);
            }
            if constexpr (Tiles::shares_bias)
                extra.template bring_shared_bias<by_tma>(m.shared_bias(tile), b.boxes.bias, at, thread, full);
            if (Tiles::copied_by_threads && b.call.mask) {
                ptx::wait(m.bits_free(), (tile & 1) ^ 1);
                extra.store_bits(m.bits(), bits, thread);
            }
            end_stage<by_tma>(m.ring(), tile);
        }
    }
};

template <class T, int columns, Between between>
struct QueryConsumer {
    using Tiles = QueryTiles<T, columns, between>;
    static constexpr int N = Tiles::N;

    const GradientBlock<T, columns, between>& b;
    int warpgroup, warp, lane;
    Acc<64, columns> dq{};

    __device__ int row() const { return 64 * warpgroup + 16 * warp; }
    __device__ int query(int half) const { return b.first + row() + lane / 4 + 8 * half; }

    // Whether a number is not finite.
    __device__ bool run() {
        if (b.keys.begin < b.keys.end) add_tiles();
        return (query(0) < b.s.q_count && !dq.row_is_finite(0)) || (query(1) < b.s.q_count && !dq.row_is_finite(1));
    }
    __device__ void add_tiles() {
        const Tiles& m = b.m;
        const float c = exponent_scale(b.call, Tiles::copied_by_threads);
        const RowTerm term[2] = {term_of<T>(b.call, b.out.rows, b.s, b.head, query(0), !Tiles::capped),
                                 term_of<T>(b.call, b.out.rows, b.s, b.head, query(1), !Tiles::capped)};
        const Mask mask = Mask::of_queries(b.call, b.s, b.first + 64 * warpgroup, 16 * warp + lane / 4);
        const bool far = __any_sync(0xffffffffu, term[0].top != 0 || term[1].top != 0);
        int tile = 0;
        for (int at = b.keys.begin; at < b.keys.end; at += N, ++tile) {
            m.ring().wait_for_products(tile, b.boxes.given);
            Acc<64, N> p, ds;
            ptx::begin_products(p.x, ds.x);
            multiply_transposed(p, m.q(), 64 * warpgroup, m.k(tile));
            ptx::commit_products();
            multiply_transposed(ds, m.d_o(), 64 * warpgroup, m.v(tile));  // dP
            ptx::commit_products();
            LoneBias<T, N, Tiles::shares_bias> bias;
            if constexpr (Tiles::shares_bias)
                bias.fetch_shared(m.shared_bias(tile), lane);
            else if constexpr (between == Between::bias)
                bias.fetch(m.bias(tile), row(), lane);
            ptx::wait_for_products<1>(p.x);
            if (Tiles::capped) keep_from_hiding(p);
            if constexpr (Tiles::copied_by_threads) {
                Scores<T, M, N, between>(b.call, b.s, b.head, b.first, row(), lane).take(m.bias(tile), m.bits(), at, p);
                if (b.call.mask) ptx::arrive_as_warp(m.bits_free(), lane);
            }
            if (!Tiles::capped && far) {
                float top[2];
                for_rows(
                    [&](int half) { top[half] = term_of<T>(b.call, b.out.rows, b.s, b.head, query(half), true).top; });
                const float factor = scale_left(b.call, Tiles::copied_by_threads);
                p.each_pair([&](float& e, float& next, int half, int column) {
                    float2 two{};
                    if constexpr (is_bias_alone(between)) two = bias.at(half, column);
                    e = far_exponent(e, factor, two.x, top[half], term[half].lse);
                    next = far_exponent(next, factor, two.y, top[half], term[half].lse);
                });
            } else if constexpr (!Tiles::capped) {
                p.each_pair([&](float& e, float& next, int half, int column) {
                    float2 from{-term[half].lse, -term[half].lse};
                    if constexpr (is_bias_alone(between)) {
                        const float2 two = bias.at(half, column);
                        from = {fmaf(two.x, log2_e, from.x), fmaf(two.y, log2_e, from.y)};
                    }
                    e = fmaf(e, c, from.x);
                    next = fmaf(next, c, from.y);
                });
            }
            if (mask.hides<N>(at)) mask.hide(p, at, lane);
            p.each([&](float& e, int half, int) {
                if constexpr (Tiles::capped)
                    take_capped<T>(e, b.call, term[half].lse);
                else
                    e = ptx::exp2(e);
            });
            ptx::wait_for_products<0>(ds.x);
            to_ds<T>(ds, p, false, [&](int half, int) { return float2{term[half].D, term[half].D}; });
            Left<T, N> weights;
            ds.pack(weights);
            ptx::begin_products(dq.x);
            add_product(dq, weights, m.k(tile));
            ptx::commit_products();
            ptx::wait_for_products<0>(dq.x);
            m.ring().release(tile, lane);
        }
    }

    __device__ void store_dq() {
        const int first = b.first + row();
        if (first >= b.s.q_count) return;
        const View& to = b.out.dq;
        const float factor = gradient_scale<T>(b.call);
        store_rows(b.m.q(), row(), dq, to, query_row(to, b.s, first, b.head), b.s.q_count - first, b.call.channels,
                   lane, [factor](int, float x) { return factor * x; });
    }
};

template <class T, int columns, Between between>
__global__ void __launch_bounds__(block_threads, 1)
    warpgroup_query_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ Gradients grad,
                           const __grid_constant__ OperandBoxes boxes) {
    if constexpr (ptx::has_warpgroups) {
        ptx::follow_launch_before();
        run_query_block<QueryProducer<T, columns, between>, QueryConsumer<T, columns, between>,
                        GradientBlock<T, columns, between>>(pass, boxes, grad, grad.redo_queries,
                                                            [](const RowTile&, int) { return false; });
    }
}

template <class T, int columns, Between between>
void launch_for(const AttentionPass& pass, const Gradients& grad, cudaStream_t stream) {
    using Tiles = QueryTiles<T, columns, between>;
    OperandBoxes boxes;
    if (columns <= 128 && !Tiles::copied_by_threads) boxes = OperandBoxes::of(pass, grad.d_o, M, Tiles::N);
    if (is_bias_alone(between)) boxes.add_bias(pass, Tiles::shares_bias ? 1 : M, Tiles::shares_bias ? Tiles::N : 64);
    boxes.cut(pass, grad.d_o, stream);
    const Blocks blocks = pass.query_tiles(pass.call.heads);
    launch(warpgroup_query_kernel<T, columns, between>, {blocks, block_threads, Tiles::bytes, true}, stream,
           "attention's gradient of q on warpgroups", pass, grad, boxes);
}

}  // namespace

void launch_warpgroup_by_query(const AttentionPass& pass, const Gradients& grad, cudaStream_t stream) {
    with_tiles<warpgroup_backward_channels>(pass.call, [&]<class T, int columns>() {
        with_between(pass.call.softcap != 0 ? Between::cap : between_of(pass.call),
                     [&]<Between between>() { launch_for<T, columns, between>(pass, grad, stream); });
    });
}

}  // namespace softdelta::cuda
