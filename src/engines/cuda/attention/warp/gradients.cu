// dq, dk and dv on cards without warpgroups. A block has 128 own rows, and walks over those that concern them:
//
//     by query   own rows are queries, the others keys     S = q kᵀ    dP = do vᵀ     dq += scale·ds k
//     by key     own rows are keys, the others queries     Sᵀ = k qᵀ   dPᵀ = v doᵀ    dv += Pᵀ do   dk += scale·dsᵀ q
//
//     P = 2^(c·S − lse)     ds = P∘(dP − D)
//
// ds, as dbias or for its sums, is stored by query, whose rows are dbias's. Blocks with far rows are left to the
// kernels of planes.
#include "engines/cuda/attention/warp/block.h"
#include "engines/cuda/attention/warpgroup/gradients.h"
#include "engines/cuda/device/card.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace warp;

constexpr int N = 32;

// A block's shared memory: its own rows; two tiles of the others, with the terms of rows that are queries; the
// sequence.
template <class T, int columns>
struct GradientTiles {
    using Own = Tile<T, columns, M>;
    using Other = Tile<T, columns, N>;
    static constexpr int stages_at = 2 * Own::bytes(), stage_bytes = 2 * Other::bytes(),
                         terms_at = stages_at + 2 * stage_bytes, terms_bytes = 2 * N * static_cast<int>(sizeof(float)),
                         sequence_at = terms_at + 2 * terms_bytes,
                         bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));
    static_assert(bytes <= least_shared_bytes);

    std::uint32_t base;

    __device__ Own own(int which) const { return {base + static_cast<std::uint32_t>(which * Own::bytes())}; }
    __device__ Other other(int tile, int which) const {
        return {base + static_cast<std::uint32_t>(stages_at + tile % 2 * stage_bytes + which * Other::bytes())};
    }
    __device__ float* terms(int tile) const {  // lse, D
        return reinterpret_cast<float*>(
            shared_at(base + static_cast<std::uint32_t>(terms_at + tile % 2 * terms_bytes)));
    }
};

// take(tile) for so many, each brought by bring_tile(tile) while the one before it is taken.
template <class Bring, class Take>
__device__ inline void walk(int tiles, const Bring& bring_tile, const Take& take) {
    if (tiles > 0) bring_tile(0);
    ptx::commit_copies();
    for (int tile = 0; tile < tiles; ++tile) {
        if (tile + 1 < tiles) bring_tile(tile + 1);
        ptx::commit_copies();
        ptx::wait_for_copies_but<1>();
        __syncthreads();
        take(tile);
        __syncthreads();
    }
    ptx::wait_for_copies();
}

// blocks: of 16 rows of a warp.
template <class T, int columns, bool biased, int blocks, bool with_ds = false>
struct Block {
    const GradientTiles<T, columns> m;
    const AttentionCall& call;
    const Gradients& grad;
    const AttentionSequence& s;
    int head, first, row, lane;  // head: by key, of keys; row: the warp's first of the block's

    // The lane's row of the warp's r-th 16, from the block's first on.
    __device__ int own(int r, int half) const { return row + 16 * r + lane / 4 + 8 * half; }
    __device__ int of_64(int r) const { return (row + 16 * r) / 64 * 64; }

    // Sums of rows to `to`, from row `begin` of the batch row on; whether one is not finite. used(r, half): of a row.
    template <class Used>
    __device__ bool store(Acc<64, columns> (&sum)[blocks], int which, const View& to, Index batch, Index begin,
                          Index rows, int channels, float factor, const Used& used) const {
        bool finite = true;
        unrolled<blocks>([&](int r) {
            for_rows([&](int half) { finite = finite && (!used(r, half) || sum[r].row_is_finite(half)); });
            if (const Index at = first + row + 16 * r; to && at < rows)
                store_rows(m.own(which), row + 16 * r, sum[r], to,
                           batch * to.stride[0] + (begin + at) * to.stride[1] + head * to.stride[2], rows - at,
                           channels, lane, [&](int half, float x) { return used(r, half) ? factor * x : 0.0F; });
        });
        return !finite;
    }

    __device__ Index ds_at(Index query, Index key) const {
        const Index* stride = grad.ds.view.stride;
        return (s.mask_batch - grad.ds.first_sequence) * stride[0] + (head - grad.ds.first_head) * stride[1] +
               query * stride[2] + key * stride[3];
    }
    // Of the warp's r-th 16 queries and the keys from `at` on. in_pairs: two keys lie in a unit of 4 bytes.
    __device__ void store_ds(Acc<64, N>& ds, int r, int at, bool in_pairs) const {
        ds.each_pair([&](float& e, float& next, int half, int column) {
            const Index query = first + own(r, half), key = at + own_column(lane) + column, to = ds_at(query, key);
            if (query >= s.q_count || key >= s.k_count) return;
            const float two[2] = {ds_scale<T> * e, ds_scale<T> * next};
            if (in_pairs && key + 1 < s.k_count) {
                *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(grad.ds.view.data) + to) =
                    ptx::pack(two[0], two[1], T());
                return;
            }
            cuda::store(grad.ds.view, to, two[0]);
            if (key + 1 < s.k_count) cuda::store(grad.ds.view, to + grad.ds.view.stride[3], two[1]);
        });
    }
    __device__ bool ds_is_in_pairs() const {
        const View& to = grad.ds.view;
        return to.dtype == type_of<T> && to.stride[3] == 1 && (to.stride[0] | to.stride[1] | to.stride[2]) % 2 == 0 &&
               reinterpret_cast<std::uintptr_t>(to.data) % 4 == 0;
    }
    // Of the block's queries and the keys that none of them sees.
    __device__ void clear_ds(Index begin, Index end) const {
        if (begin <= 0 && end >= s.k_count) return;
        const Index rows = min(Index(M), s.q_count - first);
        for (Index e = threadIdx.x; e < rows * s.k_count; e += blockDim.x)
            if (const Index key = e % s.k_count; key < begin || key >= end)
                cuda::store(grad.ds.view, ds_at(first + e / s.k_count, key), 0);
    }

    __device__ bool by_query() {
        const int key_head = head / call.group;
        const Rows k = Rows::of_keys(call.k, call, s, key_head, call.channels);
        const Rows v = Rows::of_keys(call.v, call, s, key_head, call.value_channels);
        const Span keys = keys_of_block<N>(call, s, first);
        const float c = exponent_scale(call, false);
        const bool in_pairs = with_ds && ds_is_in_pairs();
        RowTerm term[blocks][2];
        Mask mask[blocks];
        bool far = false;
        unrolled<blocks>([&](int r) {
            for_rows([&](int half) {
                term[r][half] = term_of<T>(call, grad.rows, s, head, first + own(r, half), true);
                far = far || term[r][half].top != 0;
            });
            mask[r] = Mask::of_queries(call, s, first + of_64(r), own(r, 0) - of_64(r));
        });
        if (any<blocks>(far)) return true;
        Acc<64, columns> dq[blocks] = {};
        const auto bring_tile = [&](int tile) {
            if (tile == 0) {
                bring<blocks>(m.own(0), Rows::of_queries(call.q, s, head, call.channels), first);
                bring<blocks>(m.own(1), Rows::of_queries(grad.d_o, s, head, call.value_channels), first);
            }
            bring<blocks>(m.other(tile, 0), k, keys.begin + tile * N);
            bring<blocks>(m.other(tile, 1), v, keys.begin + tile * N);
        };
        walk((keys.end - keys.begin + N - 1) / N, bring_tile, [&](int tile) {
            const int at = keys.begin + tile * N;
            BiasPairs<T, N, false, !biased> bias[blocks];
            unrolled<blocks>([&](int r) { bias[r].fetch(call, s, head, first + row + 16 * r, at, lane); });
            Acc<64, N> p[blocks], ds[blocks];
            multiply_transposed(p, m.own(0), row, m.other(tile, 0), lane);
            multiply_transposed(ds, m.own(1), row, m.other(tile, 1), lane);  // dP
            Left<T, N> weights[blocks];
            unrolled<blocks>([&](int r) {
                const RowTerm(&of)[2] = term[r];
                p[r].each_pair([&](float& e, float& next, int half, int column) {
                    const float2 two = bias[r].at(half, column);
                    e = fmaf(e, c, fmaf(two.x, log2_e, -of[half].lse));
                    next = fmaf(next, c, fmaf(two.y, log2_e, -of[half].lse));
                });
                if (mask[r].template hides<N>(at)) mask[r].hide(p[r], at, lane);
                p[r].each([](float& e, int, int) { e = ptx::exp2(e); });
                to_ds<T>(ds[r], p[r], false, [&](int half, int) { return float2{of[half].D, of[half].D}; });
                if constexpr (with_ds) store_ds(ds[r], r, at, in_pairs);
                ds[r].pack(weights[r]);
            });
            warp::add(dq, weights, m.other(tile, 0), lane);
        });
        if constexpr (with_ds) clear_ds(keys.begin, (keys.end - keys.begin + N - 1) / N * N + keys.begin);
        return store(dq, 0, grad.dq, s.batch, s.q_begin, s.q_count, call.channels, gradient_scale<T>(call),
                     [&](int r, int half) { return first + own(r, half) < s.q_count; });
    }

    // of_cache: rows that there are, though no sequence may use them.
    __device__ bool by_key(Index of_cache) {
        const Span queries = first >= s.k_count
                                 ? Span()
                                 : Span(seeing_queries(call, s, first).begin / N * N,
                                        seeing_queries(call, s, min(Index(first + M), s.k_count) - 1).end);
        const int of_head = max(queries.end - queries.begin + N - 1, 0) / N;  // tiles
        const float c = exponent_scale(call, false);
        Mask mask[blocks];
        unrolled<blocks>([&](int r) { mask[r] = Mask::of_keys(call, s, first + of_64(r), own(r, 0) - of_64(r)); });
        Acc<64, columns> dk[blocks] = {}, dv[blocks] = {};
        const auto bring_tile = [&](int tile) {
            const int query_head = head * call.group + tile / of_head, at = queries.begin + tile % of_head * N;
            if (tile == 0) {
                bring<blocks>(m.own(0), Rows::of_keys(call.k, call, s, head, call.channels), first);
                bring<blocks>(m.own(1), Rows::of_keys(call.v, call, s, head, call.value_channels), first);
            }
            bring<blocks>(m.other(tile, 0), Rows::of_queries(call.q, s, query_head, call.channels), at);
            bring<blocks>(m.other(tile, 1), Rows::of_queries(grad.d_o, s, query_head, call.value_channels), at);
            if (const int i = static_cast<int>(threadIdx.x); i < N) {
                const RowTerm term = term_of<T>(call, grad.rows, s, query_head, at + i, false);
                m.terms(tile)[i] = term.lse, m.terms(tile)[N + i] = term.D;
            }
        };
        walk(of_head * call.group, bring_tile, [&](int tile) {
            const int query_head = head * call.group + tile / of_head, at = queries.begin + tile % of_head * N;
            BiasPairs<T, N, true, !biased> bias[blocks];
            unrolled<blocks>([&](int r) { bias[r].fetch(call, s, query_head, first + row + 16 * r, at, lane); });
            const float* const terms = m.terms(tile) + own_column(lane);
            const auto two = [terms](int i) { return *reinterpret_cast<const float2*>(terms + i); };
            Acc<64, N> p[blocks], ds[blocks];
            multiply_transposed(p, m.own(0), row, m.other(tile, 0), lane);
            multiply_transposed(ds, m.own(1), row, m.other(tile, 1), lane);  // dP
            Left<T, N> weights[blocks];
            unrolled<blocks>([&](int r) {
                p[r].each_pair([&](float& e, float& next, int half, int column) {
                    const float2 lse = two(column), of = bias[r].at(half, column);
                    e = ptx::exp2(fmaf(e, c, fmaf(of.x, log2_e, -lse.x)));
                    next = ptx::exp2(fmaf(next, c, fmaf(of.y, log2_e, -lse.y)));
                });
                if (mask[r].template hides<N>(at)) mask[r].hide(p[r], at, lane, 0);
                p[r].pack(weights[r]);
            });
            warp::add(dv, weights, m.other(tile, 1), lane);
            unrolled<blocks>([&](int r) {
                to_ds<T>(ds[r], p[r], false, [&](int, int column) { return two(N + column); });
                ds[r].pack(weights[r]);
            });
            warp::add(dk, weights, m.other(tile, 0), lane);
        });
        const auto used = [&](int r, int half) { return first + own(r, half) < s.k_count; };
        const bool of_dk =
            store(dk, 0, grad.dk, s.key_batch, s.k_begin, of_cache, call.channels, gradient_scale<T>(call), used);
        return store(dv, 1, grad.dv, s.key_batch, s.k_begin, of_cache, call.value_channels, weight_scale<T>, used) ||
               of_dk;
    }
};

template <class T, int columns, bool biased, bool by_key, int blocks, bool with_ds>
__global__ void __launch_bounds__(threads<blocks>, columns <= 64 || blocks > 1 ? 2 : 1)
    warp_gradient_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ Gradients grad) {
    const auto& [call, sequences] = pass;
    using Tiles = GradientTiles<T, columns>;
    const int head = static_cast<int>(blockIdx.x) + (by_key ? 0 : grad.first_head);
    const int heads = by_key ? call.heads / call.group : call.heads;
    const Redo& redo = by_key ? grad.redo_keys : grad.redo_queries;
    const RowTile at = sequences.tile_of_block(by_key ? sequences.of_keys : sequences.of_queries, !by_key);
    if (!at) return redo.clear(at, heads, head);
    bool left = by_key && redo.any[(sequences.first + at.i) * heads + head] != 0;  // a row of its queries is far
    if (!left) {
        const AttentionSequence& s = share_sequence(sequences, at.i, Tiles::sequence_at);
        Block<T, columns, biased, blocks, with_ds> block(
            Tiles{ptx::shared_address(ptx::shared_memory())}, call, grad, s, head, static_cast<int>(at.first),
            16 * blocks * warp::own_warp(), static_cast<int>(threadIdx.x) % 32);
        if constexpr (by_key)
            left = any<blocks>(block.by_key(sequences.of_keys ? s.k_count : call.keys));
        else
            left = any<blocks>(block.by_query());
    }
    if (threadIdx.x == 0) redo.mark(at, heads, head, left);
}

template <bool by_key>
void launch_for(const AttentionPass& pass, const Gradients& grad, cudaStream_t stream) {
    const AttentionCall& call = pass.call;
    const Blocks grid = by_key ? pass.key_tiles(call.heads / call.group) : pass.query_tiles(grad.heads);
    with_tiles<128>(call, [&]<class T, int columns>() {
        constexpr int blocks = by_key && columns > 64 ? 1 : 2;  // dk and dv together are as large
        auto* kernel = call.bias || call.mask ? warp_gradient_kernel<T, columns, true, by_key, blocks, false>
                                              : warp_gradient_kernel<T, columns, false, by_key, blocks, false>;
        if constexpr (!by_key)
            if (grad.ds) kernel = warp_gradient_kernel<T, columns, true, by_key, blocks, true>;
        launch(kernel, {grid, threads<blocks>, GradientTiles<T, columns>::bytes}, stream,
               by_key ? "attention's gradients of k and v by warps" : "attention's gradient of q by warps", pass, grad);
    });
}

}  // namespace

void launch_warp_gradients(bool by_key, const AttentionPass& pass, const Gradients& grad, cudaStream_t stream) {
    (by_key ? launch_for<true> : launch_for<false>)(pass, grad, stream);
}

}  // namespace softdelta::cuda
