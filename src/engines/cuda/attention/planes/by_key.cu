// dk and dv: a block has 64 keys of a key head and walks over the queries that may see one of them, head by head.
//
//     dv += Pᵀ do      dk += scale·dxᵀ q
#include "engines/cuda/attention/planes/score_tile.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

template <int planes, int columns, bool with_dk, bool with_dv>
class ByKey {
    using Tiles = GradientTiles<planes, columns>;
    static constexpr int N = Tiles::streamed, M = Tiles::block_rows, threads = Tiles::threads;

  public:
    __device__ ByKey(const AttentionCall& call, const AttentionSequences& sequences, const Gradients& grad,
                     const RowTile& at)
        : call_(call), grad_(grad), s_(sequences[at.i]), at_(at), packed_(sequences.of_keys) {}

    __device__ void run() {
        if (!grad_.redo_keys.takes(at_, call_.heads / call_.group, key_head_)) return;
        if (first_ < s_.k_count) {
            const AttentionSequence s = s_;  // what functions out of line point to is not in registers
            const Rows k = Rows::of_keys(call_.k, call_, s, key_head_, call_.channels);
            const Rows v = Rows::of_keys(call_.v, call_, s, key_head_, call_.value_channels);
            k.copy(tiles_.own_scores, first_, nullptr, thread_, threads);
            v.copy(tiles_.own_values, first_, nullptr, thread_, threads);
            for (int h = key_head_ * call_.group; h < (key_head_ + 1) * call_.group; ++h) take_head(s, h, k, v);
        }
        if (with_dk && grad_.dk) store(grad_.dk, call_.channels, call_.scale, dk_);
        if (with_dv && grad_.dv) store(grad_.dv, call_.value_channels, 1, dv_);
    }

  private:
    __device__ void take_head(const AttentionSequence& s, int head, const Rows& k, const Rows& v) {
        const Rows q = Rows::of_queries(call_.q, s, head, call_.channels);
        const Rows d_o = Rows::of_queries(grad_.d_o, s, head, call_.value_channels);
        ScoreTile<planes, columns, true> tile(call_, grad_.rows, s, head, tiles_.bias, q, k, v, d_o);
        const int warp = thread_ / 32, lane = thread_ % 32;
        for (Index at = 0; at < s.q_count; at += N) {
            const Index last = min(at + N, s.q_count) - 1;
            if (visible_keys(call_, s, at).begin >= first_ + M || visible_keys(call_, s, last).end <= first_) continue;
            __syncthreads();
            q.copy(tiles_.streamed_scores, at, tiles_.nonfinite_scores, thread_, threads);
            d_o.copy(tiles_.streamed_values, at, tiles_.nonfinite_values, thread_, threads);
            tile.prepare(first_, at, thread_);
            __syncthreads();
            Acc<16, N> p, dx, ds;
            tile.compute(tiles_, first_, at, warp, lane, p, dx, ds);
            constexpr float one[2] = {1, 1};
            std::uint32_t weights[N / 16][planes][4];
            if constexpr (with_dk) {
                to_planes(weights, dx);
                add_weighted<planes, N, columns>(dk_, one, weights, tiles_.streamed_scores, call_.channels, lane);
                add_nonfinite_rows(dk_, dx, q, at, tiles_.nonfinite_scores, call_.channels, lane);
            }
            if constexpr (with_dv) {
                to_planes(weights, p);
                add_weighted<planes, N, columns>(dv_, one, weights, tiles_.streamed_values, call_.value_channels, lane);
                add_nonfinite_rows(dv_, p, d_o, at, tiles_.nonfinite_values, call_.value_channels, lane);
            }
        }
    }

    // Rows of a cache that no sequence uses have no gradient.
    template <int n>
    __device__ void store(const View& to, int channels, float factor, Acc<16, n>& sum) const {
        const int warp = thread_ / 32, lane = thread_ % 32;
        const Index rows = packed_ ? s_.k_count : call_.keys;
        for_rows([&](int half) {
            const Index j = first_ + 16 * warp + lane / 4 + 8 * half;
            if (j < rows)
                store_row(to, s_.key_batch * to.stride[0] + (s_.k_begin + j) * to.stride[1] + key_head_ * to.stride[2],
                          sum, half, channels, lane, [factor](float x) { return factor * x; });
        });
    }

    const AttentionCall& call_;
    const Gradients& grad_;
    AttentionSequence s_;
    RowTile at_;
    bool packed_;
    int key_head_ = static_cast<int>(blockIdx.y);
    Index first_ = at_.first;
    int thread_ = static_cast<int>(threadIdx.x);
    Tiles tiles_;
    Acc<16, with_dk ? columns : 8> dk_{};
    Acc<16, with_dv ? columns : 8> dv_{};
};

template <int planes, int columns, bool with_dk, bool with_dv, bool few>
__global__ void __launch_bounds__(GradientTiles<planes, columns>::threads)
    key_gradient_kernel(const __grid_constant__ AttentionCall call,
                        const __grid_constant__ AttentionSequences sequences, const __grid_constant__ Gradients grad) {
    constexpr int step = GradientTiles<planes, columns>::block_rows;
    for_each_block<few>(
        grad.redo_keys, sequences, sequences.of_keys, call.heads / call.group, call.keys, step,
        [&](const RowTile& at) { ByKey<planes, columns, with_dk, with_dv>(call, sequences, grad, at).run(); });
}

template <int planes, int columns, bool with_dk, bool with_dv>
void launch_for(const AttentionCall& call, const AttentionSequences& sequences, const Gradients& grad,
                cudaStream_t stream) {
    using T = GradientTiles<planes, columns>;
    const TileList& list = sequences.of_keys;
    const Index blocks = row_blocks(list, call.keys, T::block_rows), heads = call.heads / call.group;
    with_few<planes>(grad.redo_keys, [&]<bool few>() {
        launch(key_gradient_kernel<planes, columns, with_dk, with_dv, few>,
               {row_block_grid<few>(blocks, heads, list, sequences), T::threads, T::shared_bytes,
                few && grad.redo_keys.early},
               stream, "attention's gradients of k and v", call, sequences, grad);
    });
}

}  // namespace

void launch_gradients_by_key(const AttentionCall& call, const AttentionSequences& sequences, int planes,
                             const Gradients& grad, cudaStream_t stream) {
    with_kernel(call, planes, [&]<int p, int columns>() {
        if constexpr (columns <= 128) {
            launch_for<p, columns, true, true>(call, sequences, grad, stream);
        } else {  // both sums do not fit into registers
            if (grad.dk) launch_for<p, columns, true, false>(call, sequences, grad, stream);
            if (grad.dv) launch_for<p, columns, false, true>(call, sequences, grad, stream);
        }
    });
}

}  // namespace softdelta::cuda
