// dq on warpgroups: a block has 128 queries of a head, 64 for each of two warpgroups, and a third copies tiles of keys.
//
//     S = q kᵀ     P = 2^(c·S − lse)     dP = do vᵀ     ds = P∘(dP − D)     dq += scale·ds k
#include "engines/cuda/attention/warpgroup/boxes.h"
#include "engines/cuda/attention/warpgroup/gradients.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace warpgroup;

constexpr int M = warpgroup_rows;

// Given where the copy engine copies.
struct QueryBoxes {
    Boxes q, d_o, k, v, bias;
    bool given = false;
};

template <class T, int columns, Between between>
class WarpgroupByQuery {
    static constexpr bool capped = between == Between::cap, shares_bias = between == Between::shared_bias;
    static constexpr bool masked = between == Between::added || capped;
    static constexpr bool has_tiles = between == Between::added || between == Between::bias;  // of bias
    static constexpr bool is_wide = columns > 128, is_narrow = has_tiles || capped;
    static constexpr int N = is_wide ? (has_tiles || capped ? 64 : 32) : is_narrow ? 64 : 128;
    static constexpr int stages = is_wide && N == 32 ? 3 : is_wide ? 1 : 2;
    using QueryTile = Tile<T, columns, M>;
    using KeyTile = Tile<T, columns, N>;
    using AddedTile = Added<T, M, N>;
    using BiasTile = typename AddedTile::Bias;
    static constexpr int bias_bytes = has_tiles ? M * N * 2 : 0;
    static constexpr int stage_bytes = 2 * KeyTile::bytes() + bias_bytes;
    static constexpr int bits_at = 2 * QueryTile::bytes() + stages * stage_bytes;
    static constexpr int shared_bias_at = bits_at + (masked ? AddedTile::bits_bytes : 0);
    static constexpr int shared_bias_bytes = N < 64 ? 128 : 2 * N;  // the copy engine wants a multiple of 128
    static constexpr int counters_at = shared_bias_at + (shares_bias ? stages * shared_bias_bytes : 0);
    static constexpr int sequence_at = counters_at + Ring<stages>::bytes + 8;

  public:
    static QueryBoxes boxes_of(const AttentionCall& call, const AttentionSequences& sequences, const View& d_o) {
        QueryBoxes boxes;
        if (columns > 128 || masked || !are_whole(call, sequences)) return boxes;
        boxes.q = row_boxes(call.q, call, call.queries, call.heads, call.channels, M);
        boxes.d_o = row_boxes(d_o, call, call.queries, call.heads, call.value_channels, M);
        boxes.k = row_boxes(call.k, call, call.keys, call.heads / call.group, call.channels, N);
        boxes.v = row_boxes(call.v, call, call.keys, call.heads / call.group, call.value_channels, N);
        if (has_tiles || shares_bias)
            boxes.bias = bias_boxes(call.bias, call, shares_bias ? 1 : M, shares_bias ? N : 64);
        boxes.given = boxes.q.given && boxes.d_o.given && boxes.k.given && boxes.v.given &&
                      (!(has_tiles || shares_bias) || boxes.bias.given);
        return boxes;
    }
    static constexpr int shared_bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));

    __device__ WarpgroupByQuery(const AttentionCall& call, const AttentionSequences& sequences, const RowTerms& rows,
                                const Gradients& grad, const QueryBoxes& boxes)
        : call_(call),
          boxes_(boxes),
          rows_(rows),
          grad_(grad),
          head_(static_cast<int>(blockIdx.x)),
          first_(static_cast<int>(gridDim.y - 1 - blockIdx.y) * M),  // the longest of a causal call first
          base_(ptx::shared_address(ptx::shared_memory())),
          s_(share_sequence(sequences, sequence_at)),
          redo_(grad.redo_queries.at(sequences.first + static_cast<int>(blockIdx.z), call.heads, head_, first_)) {}

    __device__ void run() {
        if (threadIdx.x == 0) {
            pipeline().start(boxes_.given ? 1 : 2 * group_threads, 4 * multipliers);
            ptx::start_counter(bits_free(), 4 * multipliers);
        }
        const Index last = min(Index(first_ + M), s_.q_count) - 1;
        if (first_ < s_.q_count)
            keys_ = Span(visible_keys(call_, s_, first_).begin / N * N, visible_keys(call_, s_, last).end);
        __syncthreads();
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < group_threads) {
            ptx::release_registers<loader_registers>();
            if (!boxes_.given)
                load_tiles(thread);
            else if (thread == 0)
                load_boxes();
        } else {
            ptx::take_registers<multiplier_registers>();
            multiply_tiles(own_group() - 1, thread % group_threads);
        }
    }

  private:
    __device__ Ring<stages> pipeline() const { return {base_ + counters_at}; }
    __device__ std::uint32_t bits_free() const { return base_ + counters_at + Ring<stages>::bytes; }
    __device__ QueryTile queries() const { return {base_}; }
    __device__ QueryTile d_o() const { return {base_ + QueryTile::bytes()}; }
    __device__ KeyTile keys(int tile) const {
        return {base_ + static_cast<std::uint32_t>(2 * QueryTile::bytes() + Ring<stages>::stage(tile) * stage_bytes)};
    }
    __device__ KeyTile values(int tile) const { return {keys(tile).base + KeyTile::bytes()}; }
    __device__ BiasTile bias(int tile) const { return {keys(tile).base + 2 * KeyTile::bytes()}; }
    __device__ std::uint32_t shared_bias(int tile) const {
        return base_ + static_cast<std::uint32_t>(shared_bias_at + Ring<stages>::stage(tile) * shared_bias_bytes);
    }

    __device__ void load_tiles(int thread) const {
        const int key_head = head_ / call_.group;
        const Rows k = Rows::of_keys(call_.k, call_, s_, key_head, call_.channels);
        const Rows v = Rows::of_keys(call_.v, call_, s_, key_head, call_.value_channels);
        const AddedTile extra(call_, s_, head_);
        if (keys_.begin < keys_.end) {
            copy_rows(queries(), Rows::of_queries(call_.q, s_, head_, call_.channels), first_, thread);
            copy_rows(d_o(), Rows::of_queries(grad_.d_o, s_, head_, call_.value_channels), first_, thread);
        }
        int tile = 0;
        for (int at = keys_.begin; at < keys_.end; at += N, ++tile) {
            typename AddedTile::Bits bits{};
            if (masked && call_.mask) bits = extra.load_bits(first_, at, thread);
            pipeline().acquire(tile);
            copy_rows(keys(tile), k, at, thread);
            copy_rows(values(tile), v, at, thread);
            if constexpr (has_tiles) {
                if (call_.bias) extra.copy_bias(bias(tile), first_, at, thread);
            }
            if (shares_bias) extra.copy_shared_bias(shared_bias(tile), at, thread);
            if (masked && call_.mask) {
                ptx::wait(bits_free(), (tile & 1) ^ 1);
                extra.store_bits(base_ + bits_at, bits, thread);
            }
            pipeline().commit_copies(tile);
        }
    }

    // The same by the copy engine, for one thread.
    __device__ void load_boxes() const {
        const int key_head = head_ / call_.group;
        int tile = 0;
        for (int at = keys_.begin; at < keys_.end; at += N, ++tile) {
            const std::uint32_t counter = pipeline().full(tile);
            pipeline().acquire(tile);
            arrive_expecting(counter,
                             stage_bytes + (shares_bias ? 2 * N : 0) + (tile == 0 ? 2 * QueryTile::bytes() : 0));
            if (tile == 0) {
                copy_rows(queries(), boxes_.q, call_.q, first_, head_, s_.batch, counter);
                copy_rows(d_o(), boxes_.d_o, grad_.d_o, first_, head_, s_.batch, counter);
            }
            copy_rows(keys(tile), boxes_.k, call_.k, at, key_head, s_.key_batch, counter);
            copy_rows(values(tile), boxes_.v, call_.v, at, key_head, s_.key_batch, counter);
            if constexpr (shares_bias)
                copy_box(shared_bias(tile), boxes_.bias, at, 0, coordinate(call_.bias, 1, head_ / call_.bias_group),
                         coordinate(call_.bias, 0, s_.mask_batch), counter);
            else if constexpr (has_tiles)
                copy_bias(bias(tile), boxes_.bias, call_, first_, at, head_, s_.mask_batch, counter);
        }
    }

    __device__ void multiply_tiles(int group, int thread) {
        const int warp = own_warp(), lane = thread % 32, row = 64 * group + 16 * warp;
        if (keys_.begin < keys_.end) {
            const float c = is_scaled(call_, masked) ? log2_e : call_.scale * log2_e;
            Span seen[2];
            RowTerm term[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = first_ + row + lane / 4 + 8 * half;
                seen[half] = Span(visible_keys(call_, s_, i));
                term[half] = term_of<T>(call_, rows_, s_, head_, i);
            }
            const Span all(visible_keys(call_, s_, first_ + 64 * group + 63).begin,
                           visible_keys(call_, s_, first_ + 64 * group).end);
            int tile = 0;
            for (int at = keys_.begin; at < keys_.end; at += N, ++tile) {
                pipeline().wait_for_products(tile, boxes_.given);
                float p[N / 8][4], ds[N / 8][4];
                ptx::begin_products(p, ds);
                multiply_rows(p, queries(), group, keys(tile));
                multiply_rows(ds, d_o(), group, values(tile));
                LoneBias<T, N, shares_bias> own;
                if constexpr (shares_bias)
                    own.load_shared(shared_bias(tile), lane);
                else if constexpr (between == Between::bias)
                    own.load(bias(tile), row, lane);
                ptx::wait_for_products<1>(p);
                if (capped) keep_from_hiding(p);
                if constexpr (masked)
                    QueryScores<T, M, N, between>(call_, s_, head_, first_, row, lane)
                        .take(bias(tile), base_ + bits_at, bits_free(), at, p);
#pragma unroll
                for (int n = 0; n < N / 8 && !capped; ++n)
#pragma unroll
                    for (int m = 0; m < 4; ++m) {
                        float from = -term[m / 2].lse;
                        if constexpr (is_bias_alone(between)) {
                            const float2 b = own.at(n, m / 2);
                            from = fmaf(m % 2 == 0 ? b.x : b.y, log2_e, from);
                        }
                        p[n][m] = fmaf(p[n][m], c, from);
                    }
                if (at < all.begin || at + N > all.end) hide<N>(seen, at, lane, p);
#pragma unroll
                for (int n = 0; n < N / 8; ++n)
#pragma unroll
                    for (int m = 0; m < 4; ++m)
                        if constexpr (capped)
                            take_capped<T>(p[n][m], call_, term[m / 2].lse);
                        else
                            p[n][m] = ptx::exp2(p[n][m]);
                ptx::wait_for_products<0>(ds);
                std::uint32_t weights[N / 16][4];
#pragma unroll
                for (int n = 0; n < N / 8; ++n)
#pragma unroll
                    for (int m = 0; m < 4; ++m) ds[n][m] = p[n][m] * d_p_in_units<T>(ds[n][m], term[m / 2].D);
                to_left<T, N / 8>(weights, ds);
                ptx::begin_products(dq_);
#pragma unroll
                for (int k = 0; k < N / 16; ++k) add_product(weights[k], tile, k);
                ptx::commit_products();
                ptx::wait_for_products<0>(dq_);
                pipeline().release(tile, lane);
            }
        }
        finish(row, lane);
    }

    // dq += left · rows [16·k, 16·k + 16) of a tile's keys, of columns by parts that one product takes.
    template <class Left>
    __device__ void add_product(const Left& left, int tile, int k) {
        constexpr int width = is_wide ? 128 : columns;
#pragma unroll
        for (int i = 0; i < columns / width; ++i)
            ptx::warpgroup_multiply_mn_major(*reinterpret_cast<float(*)[width / 8][4]>(&dq_[i * (width / 8)]), left,
                                             keys(tile).mn_major_operand(k, i * width), true, T());
    }

    __device__ void finish(int row, int lane) {
        bool odd = false;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            odd = odd || (first_ + row + lane / 4 + 8 * half < s_.q_count && !all_finite(dq_, half));
        odd = ptx::any(1, 128 * multipliers, odd);
        if (threadIdx.x == group_threads) *redo_ = odd ? 1 : 0;
        const int first = first_ + row;
        if (first >= s_.q_count) return;
        const Index* stride = grad_.dq.stride;
        const float factor = ds_unit<T> * call_.scale;
        store_rows<T, M, columns>(
            queries(), row, dq_, grad_.dq, s_.batch * stride[0] + (s_.q_begin + first) * stride[1] + head_ * stride[2],
            s_.q_count - first, call_.channels, lane, [factor](int, float x) { return factor * x; });
    }

    const AttentionCall& call_;
    const QueryBoxes& boxes_;
    const RowTerms& rows_;
    const Gradients& grad_;
    int head_, first_;
    std::uint32_t base_;
    const AttentionSequence& s_;
    int* redo_;
    Span keys_;
    float dq_[columns / 8][4] = {};
};

template <class T, int columns, Between between>
__global__ void __launch_bounds__(block_threads, 1)
    warpgroup_query_kernel(const __grid_constant__ AttentionCall call,
                           const __grid_constant__ AttentionSequences sequences, const __grid_constant__ RowTerms rows,
                           const __grid_constant__ Gradients grad, const __grid_constant__ QueryBoxes boxes) {
    if constexpr (ptx::has_warpgroups) {
        follow_launch_before();
        if (*grad.redo_queries.all == 0)
            WarpgroupByQuery<T, columns, between>(call, sequences, rows, grad, boxes).run();
    }
}

template <class T, int columns, Between between>
void launch_for(const AttentionCall& call, const AttentionSequences& sequences, const RowTerms& rows,
                const Gradients& grad, cudaStream_t stream) {
    const dim3 blocks(static_cast<unsigned>(call.heads), static_cast<unsigned>((call.queries + M - 1) / M),
                      static_cast<unsigned>(sequences.count));
    using ByQuery = WarpgroupByQuery<T, columns, between>;
    launch(warpgroup_query_kernel<T, columns, between>, {blocks, block_threads, ByQuery::shared_bytes, true}, stream,
           "attention's gradient of q on warpgroups", call, sequences, rows, grad,
           ByQuery::boxes_of(call, sequences, grad.d_o));
}

}  // namespace

void launch_warpgroup_by_query(const AttentionCall& call, const AttentionSequences& sequences, const RowTerms& rows,
                               const Gradients& grad, cudaStream_t stream) {
    with_tiles<warpgroup_backward_channels>(call, [&]<class T, int columns>() {
        with_between(call.softcap != 0 ? Between::cap : between_of(call),
                     [&]<Between between>() { launch_for<T, columns, between>(call, sequences, rows, grad, stream); });
    });
}

}  // namespace softdelta::cuda
