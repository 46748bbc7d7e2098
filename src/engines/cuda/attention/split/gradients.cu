// The gradients of split operands, by query and by key: a block has 128 own rows of a head, 64 for each of two
// consumers, and walks over tiles of 32 streamed ones.
//
//     by query   own rows are queries, streamed are keys     S = q kᵀ     dP = do vᵀ     dq += scale·ds k
//     by key     own rows are keys, streamed are queries     Sᵀ = k qᵀ    dPᵀ = v doᵀ    dk += scale·dsᵀ q   dv += Pᵀ
//     do
//
//     P = e^(S − lse)     ds = P∘(dP − D)
#include "engines/cuda/attention/split/products.h"
#include "engines/cuda/attention/warpgroup/added.h"
#include "engines/cuda/attention/warpgroup/block.h"
#include "engines/cuda/attention/warpgroup/mask.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace warpgroup;

constexpr int N = 32;

// Of a query's row: its probabilities are 2^(log2(e)·(S − top) − log_sum).
struct RowTerm {
    float top, log_sum, D;
};

// A block's shared memory: own rows of scores and of values, then stages of streamed ones, with terms of queries;
// mbarriers; the sequence.
template <int columns>
struct GradientTiles {
    using Own = SplitTile<columns>;
    using Streamed = Tile<__half, columns, 2 * N>;
    using Stages = Ring<2>;
    static constexpr int own_bytes = 2 * consumers * Own::bytes(), tile_bytes = 2 * Streamed::bytes();
    static constexpr int stage_bytes = tile_bytes + 1024;
    static constexpr int barriers_at = own_bytes + 2 * stage_bytes, sequence_at = barriers_at + Stages::bytes;
    static constexpr int bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));

    std::uint32_t base;

    __device__ Own own_scores(int w) const { return {base + static_cast<std::uint32_t>(w * Own::bytes())}; }
    __device__ Own own_values(int w) const { return own_scores(consumers + w); }
    __device__ Streamed scores(int tile) const {
        return {base + static_cast<std::uint32_t>(own_bytes + Stages::stage(tile) * stage_bytes)};
    }
    __device__ Streamed values(int tile) const { return {scores(tile).base + Streamed::bytes()}; }
    __device__ RowTerm* terms(int tile) const {
        return reinterpret_cast<RowTerm*>(shared_at(scores(tile).base + tile_bytes));
    }
    __device__ Stages ring() const { return {base + barriers_at}; }
};

template <int columns, bool by_key, bool added>
struct GradientBlock {
    using Tiles = GradientTiles<columns>;

    Tiles m;
    const AttentionCall& call;
    const SplitOperands& split;
    const Gradients& grad;
    const AttentionSequence& s;
    RowTile own, streamed;  // own rows, and the first of those that are streamed
    int head, first;
    Index rows;  // own ones that have a gradient: of keys also those that no sequence uses, 0

    __device__ const SplitRows& own_scores() const { return by_key ? split.k : split.q; }
    __device__ const SplitRows& own_values() const { return by_key ? split.v : split.d_o; }
    __device__ const SplitRows& streamed_scores() const { return by_key ? split.q : split.k; }
    __device__ const SplitRows& streamed_values() const { return by_key ? split.d_o : split.v; }

    // Streamed rows that concern own rows [begin, begin + count).
    __device__ Span concerned(Index begin, Index count) const {
        const Index last = min(begin + count, by_key ? s.k_count : s.q_count) - 1;
        if (last < begin) return {};
        if constexpr (by_key)
            return Span(seeing_queries(call, s, begin).begin, seeing_queries(call, s, last).end);
        else
            return Span(visible_keys(call, s, begin).begin, visible_keys(call, s, last).end);
    }
    // take(tile, streamed head, first row).
    template <class Take>
    __device__ void each_tile(const Take& take) const {
        const Span all = concerned(first, warpgroup_rows);
        int tile = 0;
        for (int h = by_key ? head * call.group : head / call.group, n = 0; n < (by_key ? call.group : 1); ++n, ++h)
            for (int at = all.begin / N * N; at < all.end; at += N, ++tile) take(tile, h, at);
    }
    __device__ RowTerm term_of(int query_head, Index i) const {
        if (i >= s.q_count) return {0, INFINITY, 0};
        const Index at = call.row_of(s, query_head) + i;
        const float top = grad.rows.sums.top[at], log_sum = grad.rows.sums.log_sum[at];
        if (isinf(top + log_sum)) return {0, INFINITY, 0};
        return {top, log_sum * log2_e, grad.rows.D[at]};
    }

    // By a warp, of which each lane brings the terms of a query.
    __device__ void produce(int lane) const {
        constexpr int panels = columns / 64, part = N * 128;  // high or low parts of a panel
        const auto bring = [&](const typename Tiles::Streamed& to, const SplitRows& from, int h, int at,
                               std::uint32_t full) {
            const __half* rows = from.rows(from.at(streamed, h) + at / split_rows) + at % split_rows * 64;
            unrolled<panels, 2>([&](int panel, int low) {
                const int n = 2 * panel + low;
                copy_side_by_side(to.base + static_cast<std::uint32_t>(n * part), rows + n * split_rows * 64, part,
                                  full);
            });
        };
        each_tile([&](int tile, int h, int at) {
            const RowTerm term = by_key ? term_of(h, at + lane) : RowTerm{};
            m.ring().acquire(tile);
            const std::uint32_t full = m.ring().full(tile);
            if (by_key) m.terms(tile)[lane] = term;
            if (lane > 0) return ptx::arrive(full);
            arrive_expecting(full, Tiles::tile_bytes + (tile == 0 ? Tiles::own_bytes : 0));
            for (int w = 0; tile == 0 && w < consumers; ++w) {
                const SplitRows &of_scores = own_scores(), &of_values = own_values();
                copy_side_by_side(m.own_scores(w).base, of_scores.rows(of_scores.at(own, head) + w),
                                  Tiles::Own::bytes(), full);
                copy_side_by_side(m.own_values(w).base, of_values.rows(of_values.at(own, head) + w),
                                  Tiles::Own::bytes(), full);
            }
            bring(m.scores(tile), streamed_scores(), h, at, full);
            bring(m.values(tile), streamed_values(), h, at, full);
        });
    }

    // By consumer w; whether a number is not finite.
    __device__ bool consume(int w, int warp, int lane) const {
        const int begin = first + 64 * w, row = 16 * warp + lane / 4;
        Acc<64, columns> dx{};
        Acc<64, by_key ? columns : 8> dv{};
        const Mask mask = by_key ? Mask::of_keys(call, s, begin, row) : Mask::of_queries(call, s, begin, row);
        const Span sees = concerned(begin, 64);
        const float score_scale = call.scale * own_scores().scale[own_scores().at(own, head) + w];
        const float value_scale = own_values().scale[own_values().at(own, head) + w];
        const RowTerm of_row[2] = {by_key ? RowTerm{} : term_of(head, begin + row),
                                   by_key ? RowTerm{} : term_of(head, begin + row + 8)};
        each_tile([&](int tile, int h, int at) {
            const float of_scores = streamed_scores().scale[streamed_scores().at(streamed, h) + at / split_rows];
            const float of_values = streamed_values().scale[streamed_values().at(streamed, h) + at / split_rows];
            const bool concerns = (at < sees.end && at + N > sees.begin) || stores_bias();
            SplitScores<N> scores;
            float slope[N / 8][4];
            if constexpr (added)
                if (concerns)
                    scores.template fetch<by_key>(call, s, by_key ? h : head, begin + row, at + own_column(lane));
            m.ring().wait(tile);
            if (concerns) {
                Acc<64, N> p, ds;
                multiply_split(p, m.own_scores(w), m.scores(tile), score_scale * of_scores);
                multiply_split(ds, m.own_values(w), m.values(tile), value_scale * of_values);  // dP
                if constexpr (added) scores.take(p, call.softcap, slope);
                const RowTerm* const terms = m.terms(tile) + own_column(lane);
                const auto term = [&](int half, int column) { return by_key ? terms[column] : of_row[half]; };
                p.each([&](float& e, int half, int column) {
                    const RowTerm of = term(half, column);
                    e = ptx::exp2(fmaf(e - of.top, log2_e, -of.log_sum));
                });
                if (mask.hides<N>(at)) mask.hide(p, at, lane, 0);
                unrolled<N / 8, 4>([&](int i, int e) {
                    float& of_ds = ds.x[i][e];
                    of_ds = p.x[i][e] == 0 ? 0.0F : p.x[i][e] * (of_ds - term(e / 2, 8 * i + e % 2).D);
                });
                if (stores_bias()) store_bias(ds, h, begin + row, at + own_column(lane));
                if constexpr (added) unrolled<N / 8, 4>([&](int i, int e) { ds.x[i][e] *= slope[i][e]; });
                SplitLeft<N> left;
                if constexpr (by_key) {
                    left.take(p);
                    add_split_product<64>(dv, left, m.values(tile), of_values);
                }
                left.take(ds);
                add_split_product<64>(dx, left, m.scores(tile), of_scores);
            }
            m.ring().release(tile, lane);
        });
        return store(dx, dv, begin + row, lane);
    }

    // dbias where no tile is, by so many threads.
    __device__ void clear_bias(int thread, int threads) const {
        if (!stores_bias()) return;
        const Span all = concerned(first, warpgroup_rows);
        const Index begin = all.begin / N * N, end = max(begin, Index((all.end + N - 1) / N * N));
        for (int h = head * call.group; h < (head + 1) * call.group; ++h)
            for (Index e = thread; e < s.q_count * warpgroup_rows; e += threads) {
                const Index i = e / warpgroup_rows, j = first + e % warpgroup_rows;
                if ((i < begin || i >= end) && j < s.k_count) cuda::store(grad.dbias, bias_at(h, i, j), 0);
            }
    }

  private:
    __device__ bool stores_bias() const { return by_key && added && grad.dbias; }
    __device__ Index bias_at(int h, Index i, Index j) const {
        const Index* stride = grad.dbias.stride;
        return s.mask_batch * stride[0] + h * stride[1] + i * stride[2] + j * stride[3];
    }
    __device__ void store_bias(Acc<64, N>& ds, int h, Index key, Index query) const {
        const float slope = bias_slope(call, h);
        with_type(grad.dbias, [&](auto* data) {
            ds.each([&](float e, int half, int column) {
                const Index i = query + column, j = key + 8 * half;
                if (i < s.q_count && j < s.k_count) assign(data + bias_at(h, i, j), slope * e);
            });
        });
    }
    __device__ bool store(Acc<64, columns>& dx, Acc<64, by_key ? columns : 8>& dv, Index row, int lane) const {
        bool nonfinite = false;
        const Index count = by_key ? s.k_count : s.q_count;
        for_rows([&](int half) {
            const Index i = row + 8 * half;
            const bool used = i < count;
            nonfinite = nonfinite || (used && (!dx.row_is_finite(half) || (by_key && !dv.row_is_finite(half))));
            const auto put = [&](const View& to, auto& sum, int channels, float factor) {
                if (to && i < rows)
                    store_row(to, by_key ? key_row(to, s, i, head) : query_row(to, s, i, head), sum, half, channels,
                              lane, [&](float e) { return used ? factor * e : 0.0F; });
            };
            put(by_key ? grad.dk : grad.dq, dx, call.channels, call.scale);
            if constexpr (by_key) put(grad.dv, dv, call.value_channels, 1);
        });
        return nonfinite;
    }
};

template <int columns, bool by_key, bool added>
__global__ void __launch_bounds__(block_threads, 1)
    split_gradient_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ SplitOperands split,
                          const __grid_constant__ Gradients grad) {
    if constexpr (ptx::has_warpgroups) {
        const auto& [call, sequences] = pass;
        using Tiles = GradientTiles<columns>;
        const int head = static_cast<int>(blockIdx.x), heads = by_key ? call.heads / call.group : call.heads;
        const TileList &own = by_key ? sequences.of_keys : sequences.of_queries,
                       &streamed = by_key ? sequences.of_queries : sequences.of_keys;
        const Redo& redo = by_key ? grad.redo_keys : grad.redo_queries;
        const RowTile at = sequences.tile_of_block(own, !by_key);
        if (!at) return redo.clear(at, heads, head);
        const Tiles m{ptx::shared_address(ptx::shared_memory())};
        AttentionSequence& s = share_sequence(sequences, at.i, Tiles::sequence_at);
        const RowTile from = sequences.tile_of(streamed, at.i, 0);
        if (threadIdx.x == 0) {
            Index& rows = by_key ? s.q_count : s.k_count;
            rows = listed_rows(rows, streamed, from);
            m.ring().start(32, 4 * consumers);
        }
        __syncthreads();
        const Index rows = !by_key ? s.q_count : own ? s.k_count : call.keys;
        const GradientBlock<columns, by_key, added> block(m, call, split, grad, s, at, from, head,
                                                          static_cast<int>(at.first), rows);
        share_roles(
            [&] {
                const int thread = static_cast<int>(threadIdx.x);
                if (thread < 32)
                    block.produce(thread);
                else
                    block.clear_bias(thread - 32, warpgroup_threads - 32);
            },
            [&](int w, int warp, int lane) {
                const bool nonfinite = any_consumer(block.consume(w, warp, lane));
                if (threadIdx.x == warpgroup_threads)
                    redo.mark(sequences.tile_of_block(own, !by_key), heads, head, nonfinite);
            });
    }
}

}  // namespace

void launch_split_gradients(const AttentionPass& pass, const SplitOperands& split, const Gradients& grad,
                            cudaStream_t stream) {
    const AttentionCall& call = pass.call;
    with_split_kernel(call, split, [&]<int columns, bool added>() {
        const Grid by_key{pass.key_tiles(call.heads / call.group), block_threads, GradientTiles<columns>::bytes};
        const Grid by_query{pass.query_tiles(call.heads), block_threads, GradientTiles<columns>::bytes};
        if (grad.dk || grad.dv || grad.dbias)
            launch(split_gradient_kernel<columns, true, added>, by_key, stream, "attention's split gradients by key",
                   pass, split, grad);
        if (grad.dq)
            launch(split_gradient_kernel<columns, false, added>, by_query, stream,
                   "attention's split gradient by query", pass, split, grad);
    });
}

}  // namespace softdelta::cuda
