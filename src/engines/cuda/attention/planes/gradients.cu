// dq, dk and dv: a block has 64 own rows of a head and walks over those that concern them, by key head by head.
//
//     by query   own rows are queries, streamed are keys     dq += scale·dx k
//     by key     own rows are keys, streamed are queries     dk += scale·dxᵀ q     dv += Pᵀ do
#include "engines/cuda/attention/planes/score_tile.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

// with_dx: dq or dk.
template <class Tiles, bool by_key, bool with_dx, bool with_dv>
class GradientWalk {
    static constexpr int planes = Tiles::planes, columns = Tiles::columns;
    static constexpr int N = Tiles::streamed, M = Tiles::block_rows, threads = Tiles::threads;

  public:
    __device__ GradientWalk(const AttentionPass& pass, const Gradients& grad, const RowTile& at, int head)
        : call_(pass.call),
          grad_(grad),
          s_(pass.sequences[at.i]),
          packed_(by_key ? pass.sequences.of_keys : pass.sequences.of_queries),
          head_(head),
          first_(at.first) {}

    __device__ void run() {
        const AttentionSequence s = s_;  // what functions out of line point to is not in registers
        const int key_head = by_key ? head_ : head_ / call_.group;
        const Rows k = Rows::of_keys(call_.k, call_, s, key_head, call_.channels);
        const Rows v = Rows::of_keys(call_.v, call_, s, key_head, call_.value_channels);
        if (by_key && first_ < s.k_count) {
            k.copy(tiles_.own_scores, first_, nullptr, thread_, threads);
            v.copy(tiles_.own_values, first_, nullptr, thread_, threads);
        }
        const int heads = by_key ? call_.group : 1, first_head = by_key ? head_ * call_.group : head_;
        for (int h = first_head; first_ < count() && h < first_head + heads; ++h) take_head(s, h, k, v);
        const auto store = [&](const View& to, int channels, float factor, auto& sum) {
            const int row = 16 * (thread_ / 32) + thread_ % 32 / 4;
            // Rows of a cache that no sequence uses have no gradient.
            const Index rows = by_key && !packed_ ? call_.keys : count();
            for_rows([&](int half) {
                const Index i = first_ + row + 8 * half;
                if (to && i < rows)
                    store_row(to, by_key ? key_row(to, s, i, head_) : query_row(to, s, i, head_), sum, half, channels,
                              thread_ % 32, [factor](float x) { return factor * x; });
            });
        };
        if constexpr (with_dx) store(by_key ? grad_.dk : grad_.dq, call_.channels, call_.scale, dx_);
        if constexpr (with_dv) store(grad_.dv, call_.value_channels, 1, dv_);
    }

  private:
    __device__ Index count() const { return by_key ? s_.k_count : s_.q_count; }
    // Streamed rows that own ones may concern: of keys, queries that see none of the block's are left out later.
    __device__ Range streamed() const {
        if constexpr (by_key) return {0, s_.q_count};
        const Index last = min(first_ + M, s_.q_count) - 1;
        return {visible_keys(call_, s_, first_).begin / N * N, visible_keys(call_, s_, last).end};
    }
    __device__ bool concerns(Index at) const {
        if constexpr (!by_key) return true;
        const Index last = min(at + N, s_.q_count) - 1;
        return visible_keys(call_, s_, at).begin < first_ + M && visible_keys(call_, s_, last).end > first_;
    }

    __device__ void take_head(const AttentionSequence& s, int head, const Rows& k, const Rows& v) {
        const Rows q = Rows::of_queries(call_.q, s, head, call_.channels);
        const Rows d_o = Rows::of_queries(grad_.d_o, s, head, call_.value_channels);
        ScoreTile<Tiles, by_key> tile(call_, grad_.rows, s, head, tiles_.bias, q, k, v, d_o);
        if (!by_key) {
            q.copy(tiles_.own_scores, first_, nullptr, thread_, threads);
            d_o.copy(tiles_.own_values, first_, nullptr, thread_, threads);
        }
        const Rows &scores = by_key ? q : k, &values = by_key ? d_o : v;
        const int lane = thread_ % 32;
        const Range all = streamed();
        for (Index at = all.begin; at < all.end; at += N) {
            if (!concerns(at)) continue;
            Acc<16, N> p, dx, ds;
            tile.take(tiles_, first_, at, thread_, p, dx, ds);
            const auto add = [&](auto& sum, Acc<16, N>& weight, const auto& rows, const Rows& from,
                                 const int* nonfinite, int channels) {
                constexpr float one[2] = {1, 1};
                std::uint32_t weights[N / 16][planes][4];
                to_planes(weights, weight);
                add_weighted<planes, N, columns>(sum, one, weights, rows, channels, lane);
                add_nonfinite_rows(sum, weight, from, at, nonfinite, channels, lane);
            };
            if constexpr (with_dx)
                add(dx_, dx, tiles_.streamed_scores, scores, tiles_.nonfinite_scores, call_.channels);
            if constexpr (with_dv)
                add(dv_, p, tiles_.streamed_values, values, tiles_.nonfinite_values, call_.value_channels);
        }
    }

    const AttentionCall& call_;
    const Gradients& grad_;
    AttentionSequence s_;
    bool packed_;
    int head_;
    Index first_;
    int thread_ = static_cast<int>(threadIdx.x);
    Tiles tiles_;
    Acc<16, with_dx ? columns : 8> dx_{};
    Acc<16, with_dv ? columns : 8> dv_{};
};

template <class Tiles, bool few, bool by_key, bool with_dx, bool with_dv>
__device__ void take_blocks(const AttentionPass& pass, const Gradients& grad, int head) {
    const AttentionCall& call = pass.call;
    const Redo& redo = by_key ? grad.redo_keys : grad.redo_queries;
    const int heads = by_key ? call.heads / call.group : call.heads;
    for_each_block<few>(redo, pass.sequences, by_key ? pass.sequences.of_keys : pass.sequences.of_queries, heads, head,
                        by_key ? call.keys : call.queries, Tiles::block_rows, [&](const RowTile& at) {
                            if (redo.takes(at, heads, head))
                                GradientWalk<Tiles, by_key, with_dx, with_dv>(pass, grad, at, head).run();
                        });
}

template <class Tiles, bool by_key, bool with_dx, bool with_dv>
__global__ void __launch_bounds__(Tiles::threads)
    gradient_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ Gradients grad) {
    take_blocks<Tiles, false, by_key, with_dx, with_dv>(pass, grad, static_cast<int>(blockIdx.y));
}
// What kernels of warpgroups have left, all in one launch: query heads, and after them key heads.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::threads)
    left_gradient_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ Gradients grad) {
    ptx::follow_launch_before();
    const int query_heads = grad.dq ? pass.call.heads : 0, head = static_cast<int>(blockIdx.y);
    const bool of_keys = head >= query_heads;
    if (blockIdx.z > 0 && (of_keys ? pass.sequences.of_keys : pass.sequences.of_queries)) return;
    if (!of_keys) return take_blocks<Tiles, true, false, true, false>(pass, grad, head);
    if constexpr (Tiles::columns <= 128) {
        take_blocks<Tiles, true, true, true, true>(pass, grad, head - query_heads);
    } else {
        take_blocks<Tiles, true, true, true, false>(pass, grad, head - query_heads);
        take_blocks<Tiles, true, true, false, true>(pass, grad, head - query_heads);
    }
}

template <class Tiles>
void launch_left(const AttentionPass& pass, const Gradients& grad, cudaStream_t stream) {
    const auto& [call, sequences] = pass;
    const auto blocks = [](const TileList& list, Index rows) { return row_blocks(list, rows, Tiles::block_rows); };
    const Index most = std::max(grad.dq ? blocks(sequences.of_queries, call.queries) : 0,
                                grad.dk || grad.dv ? blocks(sequences.of_keys, call.keys) : 0);
    const int heads = (grad.dq ? call.heads : 0) + (grad.dk || grad.dv ? call.heads / call.group : 0);
    const int z = sequences.of_queries && sequences.of_keys ? 1 : sequences.count;
    if (heads > 65535) {  // of a grid, in its second dimension
        Gradients part = grad;
        part.dk = part.dv = {};
        launch_left<Tiles>(pass, part, stream);
        part = grad;
        part.dq = {};
        return launch_left<Tiles>(pass, part, stream);
    }
    launch(left_gradient_kernel<Tiles>,
           {{few_blocks(most, heads * z), heads, z}, Tiles::threads, Tiles::shared_bytes, grad.redo_keys.early}, stream,
           "attention's gradients of q, k and v", pass, grad);
}

}  // namespace

void launch_gradients(const AttentionPass& pass, int planes, const Gradients& grad, cudaStream_t stream) {
    const AttentionCall& call = pass.call;
    if (!grad.dq && !grad.dk && !grad.dv) return;
    with_gradient_tiles(call, planes, [&]<class Tiles>() {
        if constexpr (!Tiles::is_small)  // cards with warpgroups have more memory
            if (grad.redo_keys.may_take_none()) return launch_left<Tiles>(pass, grad, stream);
        const auto run = [&]<bool by_key, bool with_dx, bool with_dv>() {
            const TileList& list = by_key ? pass.sequences.of_keys : pass.sequences.of_queries;
            const Index blocks = row_blocks(list, by_key ? call.keys : call.queries, Tiles::block_rows);
            launch(gradient_kernel<Tiles, by_key, with_dx, with_dv>,
                   {row_block_grid<false>(blocks, by_key ? call.heads / call.group : call.heads, list, pass.sequences),
                    Tiles::threads, Tiles::shared_bytes},
                   stream, by_key ? "attention's gradients of k and v" : "attention's gradient of q", pass, grad);
        };
        if (grad.dq) run.template operator()<false, true, false>();
        if constexpr (Tiles::columns <= 128) {
            if (grad.dk || grad.dv) run.template operator()<true, true, true>();
        } else {  // both sums do not fit into registers
            if (grad.dk) run.template operator()<true, true, false>();
            if (grad.dv) run.template operator()<true, false, true>();
        }
    });
}

}  // namespace softdelta::cuda
