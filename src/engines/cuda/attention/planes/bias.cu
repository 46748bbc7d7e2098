// dbias: a block has tiles of dbias and walks over all that share one, in the order of sequences, heads, queries and
// keys: each element is one sum in f64, rounded once.
#include <algorithm>

#include "engines/cuda/attention/planes/score_tile.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

template <class Tiles>
class BiasGradient {
    static constexpr int N = Tiles::streamed, M = Tiles::block_rows, threads = Tiles::threads;

  public:
    __device__ BiasGradient(const AttentionPass& pass, const Gradients& grad)
        : call_(pass.call), sequences_(pass.sequences), grad_(grad), thread_(static_cast<int>(threadIdx.x)) {}

    __device__ void take_bias() {
        if (!takes_any_bias()) return;
        const Index tiles_of_queries = (grad_.bias_queries + M - 1) / M, tiles_of_keys = (grad_.bias_keys + N - 1) / N;
        for (Index tile = blockIdx.x; tile < tiles_of_queries * tiles_of_keys; tile += gridDim.x) {
            const Index at = tile % tiles_of_keys * N;
            if (takes_bias_of(at)) take_bias_tile(tile / tiles_of_keys * M, at);
        }
    }

  private:
    // The sequences and key heads that share the block's head of dbias.
    struct Sharers {
        int sequence, sequences, head, heads;
    };
    __device__ Sharers sharers() const {
        const bool all = grad_.bias_batches == 1;
        const int each = call_.heads / static_cast<int>(grad_.bias_heads), first = static_cast<int>(blockIdx.y) * each;
        return {all ? 0 : static_cast<int>(blockIdx.z), all ? sequences_.count : 1, first / call_.group,
                (first + each - 1) / call_.group + 1 - first / call_.group};
    }
    // Whether the kernel of keys has left any of their blocks, or all is taken.
    __device__ bool takes_any_bias() const {
        const Redo& redo = grad_.redo_keys;
        if (!redo.may_take_none()) return true;
        const Sharers of = sharers();
        const int key_heads = call_.heads / call_.group;
        const Index count = Index(sequences_.of_keys ? 1 : of.sequences) * of.heads * redo.count;
        bool any = false;
        for (Index i = thread_; i < count; i += threads) {
            const Index tile = i % redo.count, head = of.head + i / redo.count % of.heads;
            const Index n = sequences_.of_keys ? 0 : sequences_.first + of.sequence + i / redo.count / of.heads;
            any = any || redo.blocks[(n * key_heads + head) * redo.count + tile] != 0;
        }
        return ptx::any(1, threads, any);
    }
    // Whether it has left one that has this key.
    __device__ bool takes_bias_of(Index key) const {
        if (!grad_.redo_keys.may_take_none()) return true;
        const Sharers of = sharers();
        for (int n = of.sequence; n < of.sequence + of.sequences; ++n) {
            const RowTile tile = sequences_.tile_of(sequences_.of_keys, n, static_cast<int>(key / tile_rows));
            for (int head = of.head; tile && head < of.head + of.heads; ++head)
                if (grad_.redo_keys.takes(tile, call_.heads / call_.group, head)) return true;
        }
        return false;
    }
    __device__ void take_bias_tile(Index first, Index at) {
        const bool queries_shared = grad_.bias_queries == 1, keys_shared = grad_.bias_keys == 1;
        const Index batch = Index(blockIdx.z);
        const int bias_head = static_cast<int>(blockIdx.y);
        unrolled<N / 8, 4>([&](int n, int m) { bias_[n][m] = 0; });
        const int heads = call_.heads / static_cast<int>(grad_.bias_heads);  // that share the bias's
        const bool all = grad_.bias_batches == 1;
        for (int n = all ? 0 : static_cast<int>(batch); n < (all ? sequences_.count : static_cast<int>(batch) + 1);
             ++n) {
            const AttentionSequence s = sequences_[n];
            for (int h = bias_head * heads; h < (bias_head + 1) * heads; ++h)
                walk(s, h, queries_shared ? Range{0, s.q_count} : Range{first, min(first + 1, s.q_count)},
                     keys_shared ? Range{0, s.k_count} : Range{at, min(at + N, s.k_count)});
        }
        store_bias(batch, bias_head, first, at, queries_shared, keys_shared);
    }

    // Tiles of queries that begin in a span, against the keys of a span.
    __device__ void walk(const AttentionSequence& s, int head, Range queries, Range keys) {
        const int key_head = head / call_.group;
        const Rows q = Rows::of_queries(call_.q, s, head, call_.channels);
        const Rows d_o = Rows::of_queries(grad_.d_o, s, head, call_.value_channels);
        const Rows k = Rows::of_keys(call_.k, call_, s, key_head, call_.channels);
        const Rows v = Rows::of_keys(call_.v, call_, s, key_head, call_.value_channels);
        ScoreTile<Tiles, false> tile(call_, grad_.rows, s, head, tiles_.bias, q, k, v, d_o);
        for (Index first = queries.begin; first < queries.end; first += M) {
            const Index last = min(first + M, s.q_count) - 1;
            const Range seen{max(visible_keys(call_, s, first).begin / N * N, keys.begin / N * N),
                             min(visible_keys(call_, s, last).end, keys.end)};
            if (seen.begin >= seen.end) continue;
            __syncthreads();
            q.copy(tiles_.own_scores, first, nullptr, thread_, threads);
            d_o.copy(tiles_.own_values, first, nullptr, thread_, threads);
            for (Index at = seen.begin; at < seen.end; at += N) {
                Acc<16, N> p, dx, ds;
                tile.take(tiles_, first, at, thread_, p, dx, ds);
                const double slope = static_cast<double>(bias_slope(call_, head));
                ds.each([&](float e, int half, int column) {
                    bias_[column / 8][2 * half + column % 2] += slope * static_cast<double>(e);
                });
            }
        }
    }

    // The block's sums through shared memory: rows or columns that share an element are added in their order.
    __device__ void store_bias(Index batch, int head, Index first, Index at, bool queries_shared, bool keys_shared) {
        double* sums = reinterpret_cast<double*>(ptx::shared_memory());  // [M, N]
        const int warp = thread_ / 32, lane = thread_ % 32;
        __syncthreads();
        unrolled<N / 8, 4>([&](int n, int m) {
            sums[(16 * warp + lane / 4 + 8 * (m / 2)) * N + 8 * n + 2 * (lane % 4) + m % 2] = bias_[n][m];
        });
        __syncthreads();
        const int rows = queries_shared ? 1 : M, width = keys_shared ? 1 : N;
        const Index* stride = grad_.dbias.stride;
        for (int e = thread_; e < rows * width; e += threads) {
            const int r = e / width, c = e % width;
            if (first + r >= grad_.bias_queries || at + c >= grad_.bias_keys) continue;
            double sum = 0;
            for (int i = r; i < (queries_shared ? M : r + 1); ++i)
                for (int j = c; j < (keys_shared ? N : c + 1); ++j) sum += sums[i * N + j];
            store(grad_.dbias,
                  (batch + (grad_.bias_batches == 1 ? 0 : sequences_.first)) * stride[0] + head * stride[1] +
                      (first + r) * stride[2] + (at + c) * stride[3],
                  static_cast<float>(sum));
        }
    }

    const AttentionCall& call_;
    const AttentionSequences& sequences_;
    const Gradients& grad_;
    int thread_;
    Tiles tiles_;
    double bias_[N / 8][4] = {};
};

template <class Tiles>
__global__ void __launch_bounds__(Tiles::threads)
    bias_gradient_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ Gradients grad) {
    ptx::follow_launch_before();
    BiasGradient<Tiles>(pass, grad).take_bias();
}

}  // namespace

void launch_bias_gradient(const AttentionPass& pass, int planes, const Gradients& grad, cudaStream_t stream) {
    with_gradient_tiles(pass.call, planes, [&]<class Tiles>() {
        const Index batches = grad.bias_batches == 1 ? 1 : pass.sequences.count;
        const Index all = blocks_of(grad.bias_queries, Tiles::block_rows) * blocks_of(grad.bias_keys, Tiles::streamed);
        const bool few = grad.redo_keys.may_take_none();
        launch(bias_gradient_kernel<Tiles>,
               {{few ? few_blocks(all, grad.bias_heads * batches) : all, grad.bias_heads, batches},
                Tiles::threads,
                Tiles::shared_bytes,
                grad.redo_keys.early},
               stream, "attention's gradient of bias", pass, grad);
    });
}

}  // namespace softdelta::cuda
