// dq on warpgroups from ds that the kernel of keys has stored: a block takes 128 queries of a head after the other, 64
// for each of two consumers. The producer copies tiles of ds and of keys, already those of the next queries while dq of
// these is stored.
//
//     dq = scale·ds k
#include <algorithm>

#include "engines/cuda/attention/warpgroup/gradients.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace warpgroup;

constexpr int M = warpgroup_rows;

// A block's shared memory: dq, then stages of k and ds; mbarriers; the sequence.
template <class T, int columns>
struct StoredTiles {
    static constexpr int N = columns > 128 ? 64 : 128, stages = 3;
    using Query = Tile<T, columns, M>;
    using Key = Tile<T, columns, N>;
    using Score = typename Added<T, M, N>::Bias;
    using Stages = Ring<stages>;
    static constexpr int stage_bytes = Key::bytes() + Score::bytes();
    static constexpr int barriers_at = Query::bytes() + stages * stage_bytes;
    static constexpr int sequence_at = barriers_at + Stages::bytes;
    static constexpr int bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));

    std::uint32_t base;

    __device__ Query dq() const { return {base}; }
    __device__ Key k(int tile) const {
        return {base + static_cast<std::uint32_t>(Query::bytes() + Stages::stage(tile) * stage_bytes)};
    }
    __device__ Score ds(int tile) const { return {k(tile).base + Key::bytes()}; }
    __device__ Stages ring() const { return {base + barriers_at}; }
};

// The call's bias is ds.
template <class T, int columns>
struct StoredBlock {
    StoredTiles<T, columns> m;
    const AttentionCall& call;
    const OperandBoxes& boxes;
    const Gradients& grad;
    const AttentionSequence& s;
    int sequence, blocks;

    struct Queries {
        int head, first;
        Span keys;
    };
    // take(queries) for those of this block of threads, the longest of a causal call first.
    template <class Take>
    __device__ void each_queries(const Take& take) const {
        for (int i = static_cast<int>(blockIdx.x); i < grad.heads * blocks; i += static_cast<int>(gridDim.x)) {
            const int head = grad.first_head + i % grad.heads, first = (blocks - 1 - i / grad.heads) * M;
            take(Queries{head, first, keys_of_block<StoredTiles<T, columns>::N>(call, s, first)});
        }
    }
};

template <class T, int columns>
struct StoredProducer {
    using Tiles = StoredTiles<T, columns>;

    const StoredBlock<T, columns>& b;

    template <bool by_tma>
    __device__ void run(const typename StoredBlock<T, columns>::Queries& q, int& tile, int thread) const {
        const auto k = rows_of_keys<by_tma>(b.call.k, b.boxes.k, b.call, b.s, q.head / b.call.group, b.call.channels);
        const Added<T, M, Tiles::N> scores(b.call, b.s, q.head);
        const StoredScores& stored = b.grad.ds;
        for (int at = q.keys.begin; at < q.keys.end; at += Tiles::N, ++tile) {
            begin_stage<by_tma>(b.m.ring(), tile, Tiles::stage_bytes);
            const std::uint32_t full = b.m.ring().full(tile);
            k.bring(b.m.k(tile), at, thread, full);
            if constexpr (by_tma)
                copy_panels(b.m.ds(tile), b.boxes.ds, at, q.first,
                            coordinate(stored.view, 1, q.head - stored.first_head),
                            coordinate(stored.view, 0, b.sequence - stored.first_sequence), full);
            else
                scores.copy_bias(b.m.ds(tile), q.first, at, thread);
            end_stage<by_tma>(b.m.ring(), tile);
        }
    }
};

template <class T, int columns>
struct StoredConsumer {
    using Tiles = StoredTiles<T, columns>;

    const StoredBlock<T, columns>& b;
    int warpgroup, warp, lane;

    __device__ void run(const typename StoredBlock<T, columns>::Queries& q, int& tile) const {
        const int row = 64 * warpgroup + 16 * warp;
        Acc<64, columns> dq{};
        ptx::begin_products(dq.x);
        for (int at = q.keys.begin; at < q.keys.end; at += Tiles::N, ++tile) {
            b.m.ring().wait_for_products(tile, b.boxes.given);
            add_product(dq, b.m.ds(tile), 64 * warpgroup, b.m.k(tile));
            ptx::commit_products();
            if (at == q.keys.begin) continue;
            ptx::wait_for_products<1>();  // those of this tile go on
            b.m.ring().release(tile - 1, lane);
        }
        ptx::wait_for_products<0>(dq.x);
        if (q.keys.begin < q.keys.end) b.m.ring().release(tile - 1, lane);
        bool nonfinite = false;
        for_rows([&](int half) {
            nonfinite = nonfinite || (q.first + row + lane / 4 + 8 * half < b.s.q_count && !dq.row_is_finite(half));
        });
        nonfinite = any_consumer(nonfinite);
        if (threadIdx.x == warpgroup_threads)
            b.grad.redo_queries.mark({0, b.sequence, q.first / M, 0}, b.call.heads, q.head, nonfinite);
        const int first = q.first + row;
        if (first >= b.s.q_count) return;
        const View& to = b.grad.dq;
        const float factor = gradient_scale<T>(b.call);
        __syncwarp();
        store_rows(b.m.dq(), row, dq, to, query_row(to, b.s, first, q.head), b.s.q_count - first, b.call.channels, lane,
                   [factor](int, float x) { return factor * x; });
    }
};

template <class T, int columns>
__global__ void __launch_bounds__(block_threads, 1)
    warpgroup_stored_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ Gradients grad,
                            const __grid_constant__ OperandBoxes boxes) {
    if constexpr (ptx::has_warpgroups) {
        using Tiles = StoredTiles<T, columns>;
        ptx::follow_launch_before();
        const Tiles m{ptx::shared_address(ptx::shared_memory())};
        const int n = static_cast<int>(blockIdx.z), blocks = static_cast<int>((pass.call.queries + M - 1) / M);
        const AttentionSequence& s = share_sequence(pass.sequences, n, Tiles::sequence_at);
        const StoredBlock<T, columns> block(m, pass.call, boxes, grad, s, pass.sequences.first + n, blocks);
        if (threadIdx.x == 0) m.ring().start(boxes.given ? 1 : 2 * warpgroup_threads, 4 * consumers);
        __syncthreads();
        int tile = 0;
        const auto produce = [&]<bool by_tma>(int thread) {
            const StoredProducer<T, columns> producer{block};
            block.each_queries([&](const auto& q) { producer.template run<by_tma>(q, tile, thread); });
        };
        const auto consume = [&](int warpgroup, int warp, int lane) {
            const StoredConsumer<T, columns> consumer{block, warpgroup, warp, lane};
            block.each_queries([&](const auto& q) { consumer.run(q, tile); });
        };
        share_roles([&] { produce_by(boxes.given, produce); }, consume);
    }
}

template <class T, int columns>
OperandBoxes boxes_of(const AttentionPass& pass, const Gradients& grad) {
    const AttentionCall& call = pass.call;
    OperandBoxes boxes;
    if (columns > 128 || !are_whole(pass)) return boxes;
    boxes.k = row_boxes(call.k, call, call.keys, call.heads / call.group, call.channels, StoredTiles<T, columns>::N);
    boxes.ds = score_boxes(grad.ds, M);
    boxes.given = boxes.k.given && boxes.ds.given;
    return boxes;
}

}  // namespace

void launch_warpgroup_by_stored(const AttentionPass& pass, const Gradients& grad, cudaStream_t stream) {
    AttentionPass with_ds = pass;
    const StoredScores& ds = grad.ds;
    View& bias = with_ds.call.bias;
    bias = ds.view, with_ds.call.bias_group = 1;
    bias.data =
        static_cast<Plane*>(ds.view.data) - ds.first_sequence * ds.view.stride[0] - ds.first_head * ds.view.stride[1];
    with_tiles<warpgroup_backward_channels>(pass.call, [&]<class T, int columns>() {
        if constexpr (type_of<T> == DType::bf16) {
            const Index turns = grad.heads * blocks_of(pass.call.queries, M), most = multiprocessors();
            launch(
                warpgroup_stored_kernel<T, columns>,
                {{std::min(turns, most), 1, pass.sequences.count}, block_threads, StoredTiles<T, columns>::bytes, true},
                stream, "attention's gradient of q on warpgroups", with_ds, grad, boxes_of<T, columns>(pass, grad));
        }
    });
}

}  // namespace softdelta::cuda
