// dq on warpgroups from ds that the kernel of keys has stored: a block takes 128 queries of a head after the other, 64
// for each of two warpgroups, and a third copies tiles of ds and of keys, already those of the next queries while dq of
// these is stored.
//
//     dq = scale·ds k
#include <algorithm>

#include "engines/cuda/attention/warpgroup/boxes.h"
#include "engines/cuda/attention/warpgroup/gradients.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace warpgroup;

constexpr int M = warpgroup_rows;

// Given where the copy engine copies.
struct StoredBoxes {
    Boxes ds, k;
    bool given = false;
};

// The call's bias is ds.
template <class T, int columns>
class WarpgroupByStored {
    static constexpr int N = columns > 128 ? 64 : 128, stages = 3;
    using QueryTile = Tile<T, columns, M>;
    using KeyTile = Tile<T, columns, N>;
    using ScoreTile = typename Added<T, M, N>::Bias;
    static constexpr int stage_bytes = KeyTile::bytes() + ScoreTile::bytes();
    static constexpr int counters_at = QueryTile::bytes() + stages * stage_bytes;
    static constexpr int sequence_at = counters_at + Ring<stages>::bytes;

  public:
    static constexpr int shared_bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));

    static StoredBoxes boxes_of(const AttentionCall& call, const AttentionSequences& sequences, const Gradients& grad) {
        StoredBoxes boxes;
        if (columns > 128 || !are_whole(call, sequences)) return boxes;
        boxes.k = row_boxes(call.k, call, call.keys, call.heads / call.group, call.channels, N);
        boxes.ds = score_boxes(grad.ds, M);
        boxes.given = boxes.k.given && boxes.ds.given;
        return boxes;
    }

    __device__ WarpgroupByStored(const AttentionCall& call, const AttentionSequences& sequences, const Gradients& grad,
                                 const StoredBoxes& boxes)
        : call_(call),
          boxes_(boxes),
          grad_(grad),
          sequence_(sequences.first + static_cast<int>(blockIdx.z)),
          blocks_(static_cast<int>((call.queries + M - 1) / M)),
          base_(ptx::shared_address(ptx::shared_memory())),
          s_(share_sequence(sequences, sequence_at)) {}

    __device__ void run() {
        if (threadIdx.x == 0) pipeline().start(boxes_.given ? 1 : 2 * group_threads, 4 * multipliers);
        __syncthreads();
        const int thread = static_cast<int>(threadIdx.x);
        const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
        int tile = 0;
        if (thread < group_threads) {
            ptx::release_registers<loader_registers>();
            for (int unit = first; unit < grad_.heads * blocks_; unit += step) {
                if (!boxes_.given)
                    load_tiles(queries_of(unit), tile, thread);
                else if (thread == 0)
                    load_boxes(queries_of(unit), tile);
            }
        } else {
            ptx::take_registers<multiplier_registers>();
            for (int unit = first; unit < grad_.heads * blocks_; unit += step)
                multiply_tiles(queries_of(unit), tile, own_group() - 1, thread % group_threads);
        }
    }

  private:
    struct Queries {
        int head, first;
        Span keys;
    };
    // The longest of a causal call first.
    __device__ Queries queries_of(int unit) const {
        Queries q{grad_.first_head + unit % grad_.heads, (blocks_ - 1 - unit / grad_.heads) * M, {}};
        const Index last = min(Index(q.first + M), s_.q_count) - 1;
        if (q.first < s_.q_count)
            q.keys = Span(visible_keys(call_, s_, q.first).begin / N * N, visible_keys(call_, s_, last).end);
        return q;
    }

    __device__ Ring<stages> pipeline() const { return {base_ + counters_at}; }
    __device__ QueryTile dq() const { return {base_}; }
    __device__ KeyTile keys(int tile) const {
        return {base_ + static_cast<std::uint32_t>(QueryTile::bytes() + Ring<stages>::stage(tile) * stage_bytes)};
    }
    __device__ ScoreTile ds(int tile) const { return {keys(tile).base + KeyTile::bytes()}; }

    __device__ void load_tiles(const Queries& q, int& tile, int thread) const {
        const Rows k = Rows::of_keys(call_.k, call_, s_, q.head / call_.group, call_.channels);
        const Added<T, M, N> scores(call_, s_, q.head);
        for (int at = q.keys.begin; at < q.keys.end; at += N, ++tile) {
            pipeline().acquire(tile);
            copy_rows(keys(tile), k, at, thread);
            scores.copy_bias(ds(tile), q.first, at, thread);
            pipeline().commit_copies(tile);
        }
    }
    // The same by the copy engine, for one thread.
    __device__ void load_boxes(const Queries& q, int& tile) const {
        for (int at = q.keys.begin; at < q.keys.end; at += N, ++tile) {
            const std::uint32_t counter = pipeline().full(tile);
            pipeline().acquire(tile);
            arrive_expecting(counter, stage_bytes);
            copy_rows(keys(tile), boxes_.k, call_.k, at, q.head / call_.group, s_.key_batch, counter);
            copy_panels(ds(tile), boxes_.ds, at, q.first, coordinate(grad_.ds.view, 1, q.head - grad_.ds.first_head),
                        coordinate(grad_.ds.view, 0, sequence_ - grad_.ds.first_sequence), counter);
        }
    }

    __device__ void multiply_tiles(const Queries& q, int& tile, int group, int thread) const {
        const int lane = thread % 32, row = 64 * group + 16 * own_warp();
        float sum[columns / 8][4] = {};
        ptx::begin_products(sum);
        for (int at = q.keys.begin; at < q.keys.end; at += N, ++tile) {
            pipeline().wait_for_products(tile, boxes_.given);
#pragma unroll
            for (int k = 0; k < N / 16; ++k) add_product(sum, group, tile, k);
            ptx::commit_products();
            if (at == q.keys.begin) continue;
            ptx::wait_for_products<1>();  // those of this tile go on
            pipeline().release(tile - 1, lane);
        }
        ptx::wait_for_products<0>(sum);
        if (q.keys.begin < q.keys.end) pipeline().release(tile - 1, lane);
        bool odd = false;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            odd = odd || (q.first + row + lane / 4 + 8 * half < s_.q_count && !all_finite(sum, half));
        odd = ptx::any(1, 128 * multipliers, odd);
        if (threadIdx.x == group_threads) *grad_.redo_queries.at(sequence_, call_.heads, q.head, q.first) = odd ? 1 : 0;
        const int first = q.first + row;
        if (first >= s_.q_count) return;
        const Index* stride = grad_.dq.stride;
        const float factor = call_.scale;
        __syncwarp();
        store_rows<T, M, columns>(
            dq(), row, sum, grad_.dq, s_.batch * stride[0] + (s_.q_begin + first) * stride[1] + q.head * stride[2],
            s_.q_count - first, call_.channels, lane, [factor](int, float x) { return factor * x; });
    }

    // sum += ds k of keys [16·k, 16·k + 16) of a tile, of columns by parts that one product takes.
    __device__ void add_product(float (&sum)[columns / 8][4], int group, int tile, int k) const {
        constexpr int width = columns > 128 ? 128 : columns;
#pragma unroll
        for (int i = 0; i < columns / width; ++i)
            ptx::warpgroup_multiply_mn_major(*reinterpret_cast<float(*)[width / 8][4]>(&sum[i * (width / 8)]),
                                             ds(tile).rows_operand(k, 64 * group),
                                             keys(tile).mn_major_operand(k, i * width), true, T());
    }

    const AttentionCall& call_;
    const StoredBoxes& boxes_;
    const Gradients& grad_;
    int sequence_, blocks_;
    std::uint32_t base_;
    const AttentionSequence& s_;
};

template <class T, int columns>
__global__ void __launch_bounds__(block_threads, 1)
    warpgroup_stored_kernel(const __grid_constant__ AttentionCall call,
                            const __grid_constant__ AttentionSequences sequences,
                            const __grid_constant__ Gradients grad, const __grid_constant__ StoredBoxes boxes) {
    if constexpr (ptx::has_warpgroups) {
        follow_launch_before();
        if (*grad.redo_queries.all == 0) WarpgroupByStored<T, columns>(call, sequences, grad, boxes).run();
    }
}

}  // namespace

void launch_warpgroup_by_stored(const AttentionCall& call, const AttentionSequences& sequences, const Gradients& grad,
                                cudaStream_t stream) {
    AttentionCall with_ds = call;
    const StoredScores& ds = grad.ds;
    with_ds.bias = ds.view, with_ds.bias_group = 1;
    with_ds.bias.data =
        static_cast<Plane*>(ds.view.data) - ds.first_sequence * ds.view.stride[0] - ds.first_head * ds.view.stride[1];
    with_tiles<warpgroup_backward_channels>(call, [&]<class T, int columns>() {
        if constexpr (type_of<T> == DType::bf16) {
            const Index units = grad.heads * ((call.queries + M - 1) / M);
            const dim3 blocks(static_cast<unsigned>(std::min(units, Index(multiprocessors()))), 1,
                              static_cast<unsigned>(sequences.count));
            using ByStored = WarpgroupByStored<T, columns>;
            launch(warpgroup_stored_kernel<T, columns>, {blocks, block_threads, ByStored::shared_bytes, true}, stream,
                   "attention's gradient of q on warpgroups", with_ds, sequences, grad,
                   ByStored::boxes_of(call, sequences, grad));
        }
    });
}

}  // namespace softdelta::cuda
