// dk, dv, a bias's gradient and ds on warpgroups: a block has 128 keys of a key head, 64 for each of two warpgroups,
// and a third copies tiles of queries, head by head. One file: a step's products hand their registers on.
//
//     Sᵀ = k qᵀ       Pᵀ = 2^(c·Sᵀ − lse)            dv += Pᵀ do
//     dPᵀ = v doᵀ     dsᵀ = Pᵀ∘(dPᵀ − D)             dk += scale·dsᵀ q          dbias = ds, or its sum over queries
#include "engines/cuda/attention/warpgroup/gradients.h"
#include "engines/cuda/attention/warpgroup/key_scores.h"
#include "engines/cuda/attention/warpgroup/score_gradient.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace warpgroup;

constexpr int M = warpgroup_rows;

// Where sums of both fill the registers, dk, with dbias, and dv are made by kernels of their own.
enum class Of { both, dk, dv };

// Given where the copy engine copies.
struct KeyBoxes {
    Boxes q, d_o, k, v, bias, ds;
    bool given = false;
};

// keeps: ds is stored though there is no bias in whose place it could lie.
template <class T, int columns, Between between, Of made, bool keeps>
class WarpgroupByKey {
    static constexpr int N = columns > 128 ? 32 : 64, stages = columns > 128 ? 2 : 3;
    static constexpr bool makes_dk = made != Of::dv, makes_dv = made != Of::dk;
    static constexpr bool added = between == Between::added, capped = between == Between::cap;
    static constexpr bool alone = is_bias_alone(between), biased = added || alone, masked = added || capped;
    static constexpr bool has_tiles = added || between == Between::bias;  // of bias
    static constexpr bool holds_tiles = has_tiles || keeps;               // and of ds
    using KeyTile = Tile<T, columns, M>;
    using QueryTile = Tile<T, columns, N>;
    using AddedTile = Added<T, N, M>;
    using BiasTile = typename AddedTile::Bias;
    static constexpr int bias_at = 2 * QueryTile::bytes(), bits_at = bias_at + (holds_tiles ? BiasTile::bytes() : 0);
    static constexpr int terms_at = bits_at + (masked ? AddedTile::bits_bytes : 0);
    static constexpr int stage_bytes = (terms_at + 2 * N * 4 + 1023) / 1024 * 1024;
    static constexpr int tile_bytes = 2 * QueryTile::bytes() + (has_tiles ? BiasTile::bytes() : 0);  // copied
    static constexpr int own_bytes = (makes_dk ? 2 : 1) * KeyTile::bytes();
    static_assert(tile_bytes % 16 == 0 && own_bytes % 16 == 0, "copies are whole units");
    static_assert(!(biased && capped), "a cap leaves no bias apart");
    static constexpr int counters_at = 2 * KeyTile::bytes() + stages * stage_bytes;
    static constexpr int sequence_at = counters_at + Ring<stages>::bytes + 8 * stages;

  public:
    static KeyBoxes boxes_of(const AttentionCall& call, const AttentionSequences& sequences, const Gradients& grad) {
        KeyBoxes boxes;
        if (columns > 128 || masked || !are_whole(call, sequences)) return boxes;
        boxes.q = row_boxes(call.q, call, call.queries, call.heads, call.channels, N);
        boxes.d_o = row_boxes(grad.d_o, call, call.queries, call.heads, call.value_channels, N);
        boxes.k = row_boxes(call.k, call, call.keys, call.heads / call.group, call.channels, M);
        boxes.v = row_boxes(call.v, call, call.keys, call.heads / call.group, call.value_channels, M);
        if (has_tiles) boxes.bias = bias_boxes(call.bias, call, N, 64);
        if (holds_tiles && grad.ds) boxes.ds = score_boxes(grad.ds, N);
        boxes.given =
            boxes.q.given && boxes.d_o.given && boxes.k.given && boxes.v.given && (!has_tiles || boxes.bias.given);
        boxes.ds.given = boxes.ds.given && boxes.given;
        return boxes;
    }
    static constexpr int shared_bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));

    __device__ WarpgroupByKey(const AttentionCall& call, const AttentionSequences& sequences, const RowTerms& rows,
                              const Gradients& grad, const KeyBoxes& boxes)
        : call_(call),
          boxes_(boxes),
          rows_(rows),
          grad_(grad),
          packed_(sequences.of_keys.given),
          sequence_(sequences.first + static_cast<int>(blockIdx.z)),
          key_head_(grad.first_head / call.group + static_cast<int>(blockIdx.x)),
          first_(static_cast<int>(blockIdx.y) * M),
          base_(ptx::shared_address(ptx::shared_memory())),
          s_(share_sequence(sequences, sequence_at)) {}

    __device__ void run() {
        if (threadIdx.x == 0) {
            pipeline().start(boxes_.given ? N : 2 * group_threads, 4 * multipliers + (stores_boxes() ? 1 : 0));
            for (int i = 0; i < stages; ++i) ptx::start_counter(ds_made(i), 4 * multipliers);
        }
        if (first_ < s_.k_count) {
            queries_ = Span(seeing_queries(call_, s_, first_).begin / N * N,
                            seeing_queries(call_, s_, min(Index(first_ + M), s_.k_count) - 1).end);
            if (queries_.begin >= queries_.end) queries_ = {};
            if (stores() && !grad_.ds.is_dbias && queries_.begin < queries_.end)  // what the kernel of dq reads
                queries_ = Span(queries_.begin / M * M, min(Index((queries_.end + M - 1) / M * M), s_.q_count));
        }
        __syncthreads();
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < group_threads) {
            ptx::release_registers<loader_registers>();
            load_tiles(thread);
        } else {
            ptx::take_registers<multiplier_registers>();
            multiply_tiles(own_group() - 1, thread % group_threads);
        }
    }

  private:
    __device__ Ring<stages> pipeline() const { return {base_ + counters_at}; }
    __device__ KeyTile keys() const { return {base_}; }
    __device__ KeyTile values() const { return {base_ + KeyTile::bytes()}; }
    __device__ std::uint32_t stage(int tile) const {
        return base_ + static_cast<std::uint32_t>(2 * KeyTile::bytes() + Ring<stages>::stage(tile) * stage_bytes);
    }
    __device__ QueryTile queries(int tile) const { return {stage(tile)}; }
    __device__ QueryTile d_o(int tile) const { return {stage(tile) + QueryTile::bytes()}; }
    __device__ BiasTile bias(int tile) const { return {stage(tile) + bias_at}; }
    __device__ float* terms(int tile) const { return reinterpret_cast<float*>(shared_at(stage(tile) + terms_at)); }
    __device__ ScoreGradient<T, BiasTile> score_gradient() const { return {grad_, boxes_.ds, sequence_, first_}; }
    __device__ bool stores() const { return keeps || (makes_dk && has_tiles && grad_.ds); }
    __device__ bool stores_boxes() const { return stores() && boxes_.ds.given; }
    // Counts the warps that have made their part of a tile of ds.
    __device__ std::uint32_t ds_made(int tile) const {
        return base_ + static_cast<std::uint32_t>(counters_at + Ring<stages>::bytes + 8 * Ring<stages>::stage(tile));
    }

    __device__ void load_tiles(int thread) const {
        const bool by_engine = boxes_.given;
        if (by_engine && thread >= N) {
            if (thread >= N + 32)
                clear_unseen(thread % 32, 32);
            else if (thread == N && stores_boxes())
                store_tiles();
            return;
        }
        if (!by_engine && queries_.begin < queries_.end) {
            copy_rows(keys(), Rows::of_keys(call_.k, call_, s_, key_head_, call_.channels), first_, thread);
            if (makes_dk)
                copy_rows(values(), Rows::of_keys(call_.v, call_, s_, key_head_, call_.value_channels), first_, thread);
        }
        for_each_tile([&](int tile, int head, int at) {
            const RowTerm term = thread < N ? term_of<T>(call_, rows_, s_, head, at + thread) : RowTerm{};
            if (by_engine) {
                pipeline().acquire(tile);
                if (thread == 0) load_boxes(tile, head, at);
            } else {
                load_tile(tile, head, at, thread);
            }
            if (thread < N) terms(tile)[thread] = term.lse, terms(tile)[N + thread] = term.D;
            if (!by_engine)
                pipeline().commit_copies(tile);
            else if (thread > 0)
                ptx::arrive(pipeline().full(tile));
            else
                arrive_expecting(pipeline().full(tile), tile_bytes + (tile == 0 ? own_bytes : 0));
        });
        if (!by_engine) clear_unseen(thread, group_threads);
    }
    template <class Take>
    __device__ void for_each_tile(const Take& take) const {
        int tile = 0;
        for (int head = key_head_ * call_.group; head < (key_head_ + 1) * call_.group; ++head)
            for (int at = queries_.begin; at < queries_.end; at += N, ++tile) take(tile, head, at);
    }
    // dbias where no tile is.
    __device__ void clear_unseen(int thread, int threads) const {
        if (!has_tiles || !stores() || !grad_.ds.is_dbias) return;
        const Index end = min(Index((queries_.end + N - 1) / N * N), grad_.ds.queries);
        for (int head = key_head_ * call_.group; head < (key_head_ + 1) * call_.group; ++head) {
            score_gradient().clear(head, 0, queries_.begin, thread, threads);
            score_gradient().clear(head, end, grad_.ds.queries, thread, threads);
        }
    }
    // By one thread: a stage is free when the copy engine has read what it stores of it, too.
    __device__ void store_tiles() const {
        for_each_tile([&](int tile, int head, int at) {
            ptx::wait(ds_made(tile), tile / stages & 1);
            score_gradient().store_boxes(bias(tile), head, at);
            wait_for_stored_boxes();
            pipeline().release_by_one(tile);
        });
    }
    __device__ void load_tile(int tile, int head, int at, int thread) const {
        const AddedTile extra(call_, s_, head);
        typename AddedTile::Bits bits{};
        if (masked && call_.mask) bits = extra.load_bits(at, first_, thread);
        pipeline().acquire(tile);
        copy_rows(queries(tile), Rows::of_queries(call_.q, s_, head, call_.channels), at, thread);
        copy_rows(d_o(tile), Rows::of_queries(grad_.d_o, s_, head, call_.value_channels), at, thread);
        if (has_tiles && call_.bias) extra.copy_bias(bias(tile), at, first_, thread);
        if (masked && call_.mask) extra.store_bits(stage(tile) + bits_at, bits, thread);
    }
    // By the copy engine, for one thread.
    __device__ void load_boxes(int tile, int head, int at) const {
        const std::uint32_t counter = pipeline().full(tile);
        if (tile == 0) {
            copy_rows(keys(), boxes_.k, call_.k, first_, key_head_, s_.key_batch, counter);
            if (makes_dk) copy_rows(values(), boxes_.v, call_.v, first_, key_head_, s_.key_batch, counter);
        }
        copy_rows(queries(tile), boxes_.q, call_.q, at, head, s_.batch, counter);
        copy_rows(d_o(tile), boxes_.d_o, grad_.d_o, at, head, s_.batch, counter);
        if constexpr (has_tiles) copy_bias(bias(tile), boxes_.bias, call_, at, first_, head, s_.mask_batch, counter);
    }

    __device__ void multiply_tiles(int group, int thread) {
        const int warp = own_warp(), lane = thread % 32, row = 64 * group + 16 * warp;
        const int wg_first = first_ + 64 * group;
        Span all(seeing_queries(call_, s_, wg_first + 63).begin, seeing_queries(call_, s_, wg_first).end);
        if (wg_first + 64 > s_.k_count) all = {};
        Span seen[2];  // queries that see the lane's keys
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Index key = first_ + row + lane / 4 + 8 * half;
            if (key < s_.k_count) seen[half] = Span(seeing_queries(call_, s_, key));
        }
        const float c = is_scaled(call_, masked) ? log2_e : call_.scale * log2_e;
        // A turn: dv and dk of a tile, and scores and dP of the next.
        const bool multiplies = queries_.begin < queries_.end;
        if (multiplies) take_first_turn(group);
        int tile = 0;
        for (int head = key_head_ * call_.group; head < (key_head_ + 1) * call_.group; ++head) {
            double sum[2] = {};
            float key_bias[2];  // in the exponent's unit
            bool hidden[2] = {};
            const KeyScores<T, M, N, between> scores(call_, s_, head, first_, row, lane);
            if constexpr (between == Between::shared_bias) {
                scores.load_bias(key_bias);
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    hidden[half] = key_bias[half] == -INFINITY;  // though products are no numbers
            }
            const bool any_hidden = __any_sync(0xffffffffu, hidden[0] || hidden[1]);
            for (int at = queries_.begin; at < queries_.end; at += N, ++tile) {
                pipeline().wait_for_products(tile, boxes_.given);
                float p[N / 8][4], ds[N / 8][4];
                ptx::begin_products(p, ds);
                multiply_rows(p, keys(), group, queries(tile));
                if (makes_dk) multiply_rows(ds, values(), group, d_o(tile));
                give_turn(group);
                LoneBias<T, N, false> own;
                if constexpr (between == Between::bias) own.load_transposed(bias(tile), row, lane);
                ptx::wait_for_products<makes_dk ? 1 : 0>(p);
                if (capped) keep_from_hiding(p);
                scores.take(bias(tile), stage(tile) + bits_at, at, p);
                const float* const lse = terms(tile) + 2 * (lane % 4);
#pragma unroll
                for (int n = 0; n < N / 8 && !capped; ++n) {
                    const float2 of = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float2 from{-of.x, -of.y};
                        if constexpr (between == Between::bias) {
                            const float2 b = own.at(n, half);
                            from = {fmaf(b.x, log2_e, from.x), fmaf(b.y, log2_e, from.y)};
                        } else if constexpr (between == Between::shared_bias) {
                            from = {key_bias[half] + from.x, key_bias[half] + from.y};
                            if (hidden[half]) p[n][2 * half] = p[n][2 * half + 1] = 0;
                        }
                        p[n][2 * half] = fmaf(p[n][2 * half], c, from.x);
                        p[n][2 * half + 1] = fmaf(p[n][2 * half + 1], c, from.y);
                    }
                }
                std::uint32_t weights[N / 16][4];
                const bool hides = at < all.begin || at + N > all.end;
                if (capped && hides) hide<N>(seen, at, lane, p);
#pragma unroll
                for (int n = 0; n < N / 8; ++n) {
                    if constexpr (capped) {
                        const float2 of = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const float first = take_capped<T>(p[n][2 * half], call_, of.x);
                            const float second = take_capped<T>(p[n][2 * half + 1], call_, of.y);
                            weights[n / 2][2 * (n % 2) + half] = ptx::pack(first, second, T());
                        }
                    } else {
#pragma unroll
                        for (int m = 0; m < 4; ++m) p[n][m] = ptx::exp2(p[n][m]);
                    }
                }
                // Afterwards: where code branches, the compiler leaves exponentials before the wait for dP.
                if (!capped && hides) hide<N>(seen, at, lane, p, 0);
                if (!capped) to_left<T, N / 8>(weights, p);
                std::uint32_t d_weights[N / 16][4];
                if constexpr (makes_dk) {
                    ptx::wait_for_products<0>(ds);
#pragma unroll
                    for (int n = 0; n < N / 8; ++n) {
                        const float2 D = *reinterpret_cast<const float2*>(lse + N + 8 * n);
#pragma unroll
                        for (int m = 0; m < 4; ++m) {
                            ds[n][m] = p[n][m] * d_p_in_units<T>(ds[n][m], m % 2 == 0 ? D.x : D.y);
                            if (masked && p[n][m] == 0) ds[n][m] = 0;  // though dP is no number
                        }
                    }
                    if constexpr (between == Between::shared_bias) {
#pragma unroll
                        for (int n = 0; n < N / 8 && any_hidden; ++n)
#pragma unroll
                            for (int m = 0; m < 4; ++m)
                                if (hidden[m / 2]) ds[n][m] = 0;  // though dP is no number
                    }
                    if (biased && sums_queries(grad_)) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float part = 0;
#pragma unroll
                            for (int n = 0; n < N / 8; ++n) part += ds[n][2 * half] + ds[n][2 * half + 1];
                            sum[half] += static_cast<double>(ds_unit<T> * part);
                        }
                    }
                    to_left<T, N / 8>(d_weights, ds);
                }
                take_turn(group);
                ptx::begin_products(dv_, dk_);
                if constexpr (makes_dv) add_product(dv_, weights, d_o(tile));
                if constexpr (makes_dk) add_product(dk_, d_weights, queries(tile));
                ptx::commit_products();
                if (stores()) {
                    if constexpr (type_of<T> == DType::f16) {
#pragma unroll
                        for (int n = 0; n < N / 8; ++n)
#pragma unroll
                            for (int m = 0; m < 4; ++m) ds[n][m] *= ds_unit<T>;
                        std::uint32_t of_ds[N / 16][4];
                        to_left<T, N / 8>(of_ds, ds);
                        score_gradient().store(bias(tile), ds_made(tile), head, at, group, warp, lane, of_ds);
                    } else {
                        score_gradient().store(bias(tile), ds_made(tile), head, at, group, warp, lane, d_weights);
                    }
                }
                ptx::wait_for_products<0>(dv_);
                ptx::keep_registers(dk_);
                pipeline().release(tile, lane);
            }
            if (makes_dk && biased && sums_queries(grad_)) score_gradient().store_sum(head, row, lane, sum);
        }
        if (multiplies) give_turn(group);
        finish(group, warp, lane);
    }

    // sum += left right, of a tile's columns by parts that one product takes.
    __device__ static void add_product(float (&sum)[columns / 8][4], const std::uint32_t (&left)[N / 16][4],
                                       const QueryTile& right) {
        constexpr int width = columns > 128 ? 128 : columns;
#pragma unroll
        for (int k = 0; k < N / 16; ++k)
#pragma unroll
            for (int i = 0; i < columns / width; ++i)
                ptx::warpgroup_multiply_mn_major(*reinterpret_cast<float(*)[width / 8][4]>(&sum[i * (width / 8)]),
                                                 left[k], right.mn_major_operand(k, i * width), true, T());
    }

    __device__ void finish(int group, int warp, int lane) {
        bool odd = false;
        const int row = 64 * group + 16 * warp;
        bool used[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            used[half] = first_ + row + lane / 4 + 8 * half < s_.k_count;
            if (makes_dk) odd = odd || (used[half] && !all_finite(dk_, half));
            if (makes_dv) odd = odd || (used[half] && !all_finite(dv_, half));
        }
        odd = ptx::any(1, 128 * multipliers, odd);
        if (threadIdx.x == group_threads) {  // after dv comes dk
            int& redo = *grad_.redo_keys.at(sequence_, call_.heads / call_.group, key_head_, first_);
            redo = odd || (made == Of::dk && redo != 0) ? 1 : 0;
        }
        // Rows of a cache that no sequence uses have no gradient.
        const Index first = first_ + row, rows = packed_ ? s_.k_count : call_.keys;
        if (first >= rows) return;
        const auto store = [&](const View& to, const KeyTile& tile, const auto& sum, int channels, float factor) {
            if (!to) return;
            store_rows<T, M, columns>(
                tile, row, sum, to,
                s_.key_batch * to.stride[0] + (s_.k_begin + first) * to.stride[1] + key_head_ * to.stride[2],
                rows - first, channels, lane, [&](int half, float x) { return used[half] ? factor * x : 0.0F; });
        };
        if constexpr (makes_dk) store(grad_.dk, keys(), dk_, call_.channels, ds_unit<T> * call_.scale);
        if constexpr (makes_dv) store(grad_.dv, values(), dv_, call_.value_channels, weight_unit<T>);
    }

    const AttentionCall& call_;
    const KeyBoxes& boxes_;
    const RowTerms& rows_;
    const Gradients& grad_;
    bool packed_;
    int sequence_, key_head_, first_;
    std::uint32_t base_;
    const AttentionSequence& s_;
    Span queries_;
    float dk_[makes_dk ? columns / 8 : 1][4] = {}, dv_[makes_dv ? columns / 8 : 1][4] = {};
};

template <class T, int columns, Between between, Of made, bool keeps>
__global__ void __launch_bounds__(block_threads, 1)
    warpgroup_key_kernel(const __grid_constant__ AttentionCall call,
                         const __grid_constant__ AttentionSequences sequences, const __grid_constant__ RowTerms rows,
                         const __grid_constant__ Gradients grad, const __grid_constant__ KeyBoxes boxes) {
    if constexpr (ptx::has_warpgroups) {
        follow_launch_before();
        if (*grad.redo_keys.all == 0)
            WarpgroupByKey<T, columns, between, made, keeps>(call, sequences, rows, grad, boxes).run();
    }
}

template <class T, int columns, Between between, Of made, bool keeps = false>
void launch_one(const AttentionCall& call, const AttentionSequences& sequences, const RowTerms& rows,
                const Gradients& grad, cudaStream_t stream) {
    const dim3 blocks(static_cast<unsigned>(grad.heads / call.group), static_cast<unsigned>((call.keys + M - 1) / M),
                      static_cast<unsigned>(sequences.count));
    using ByKey = WarpgroupByKey<T, columns, between, made, keeps>;
    launch(warpgroup_key_kernel<T, columns, between, made, keeps>, {blocks, block_threads, ByKey::shared_bytes, true},
           stream, "attention's gradients of k and v on warpgroups", call, sequences, rows, grad,
           ByKey::boxes_of(call, sequences, grad));
}

template <class T, int columns, Between between>
void launch_for(const AttentionCall& call, const AttentionSequences& sequences, const RowTerms& rows,
                const Gradients& grad, cudaStream_t stream) {
    if constexpr (columns > 128) {
        launch_one<T, columns, between, Of::dv>(call, sequences, rows, grad, stream);
        launch_one<T, columns, between, Of::dk>(call, sequences, rows, grad, stream);
    } else {
        if constexpr (type_of<T> == DType::bf16 && columns == 128 &&
                      (between == Between::nothing || between == Between::shared_bias)) {
            if (grad.ds) return launch_one<T, columns, between, Of::both, true>(call, sequences, rows, grad, stream);
        }
        launch_one<T, columns, between, Of::both>(call, sequences, rows, grad, stream);
    }
}

}  // namespace

void launch_warpgroup_by_key(const AttentionCall& call, const AttentionSequences& sequences, const RowTerms& rows,
                             const Gradients& grad, cudaStream_t stream) {
    with_tiles<warpgroup_backward_channels>(call, [&]<class T, int columns>() {
        with_between(call.softcap != 0 ? Between::cap : between_of(call, grad.ds.is_dbias),
                     [&]<Between between>() { launch_for<T, columns, between>(call, sequences, rows, grad, stream); });
    });
}

}  // namespace softdelta::cuda
