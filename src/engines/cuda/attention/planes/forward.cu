// The forward kernel: a block has 64 queries of a head and walks over the keys that one of them may see.
//
//     S = q kᵀ → scores        [64, N] = [64, D]·[D, N]
//     top' = max(top, max S)   P = e^(S − top')   sum = e^(top − top')·sum + ΣP
//     o = e^(top − top')·o + P v
//
// A warp holds 16 rows of S and o. Every type goes as planes of bf16 (planes.h).
#include "engines/cuda/attention/addends.h"
#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/row_end.h"
#include "engines/cuda/attention/rows.h"
#include "engines/cuda/device/card.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

namespace {

// Keys of a tile: what fits beside the queries. small: on the cards with the least shared memory.
template <int planes, int columns, bool small>
class AttentionForward {
    static constexpr int size = planes * columns, N = size > (small ? 256 : 384) ? 16 : small ? 32 : 64;
    static constexpr int warps = small && size > 384 ? 1 : 4;
    using KeyTile = PlaneTile<planes, N, columns>;

  public:
    static constexpr int block_queries = 16 * warps, threads = 32 * warps;
    using QueryTile = PlaneTile<planes, block_queries, columns>;
    using Bias = BiasTile<block_queries, N, false>;
    static constexpr int bias_at = QueryTile::bytes + 2 * KeyTile::bytes, nonfinite_at = bias_at + Bias::bytes;
    static constexpr int shared_bytes = nonfinite_at + N * static_cast<int>(sizeof(int));

    __device__ AttentionForward(const AttentionPass& pass, const ForwardOutputs& out, const RowTile& at)
        : call_(pass.call), out_(out), s_(pass.sequences[at.i]), at_(at) {}

    __device__ void run() {
        if (first_ >= s_.q_count || !out_.redo.takes(at_, call_.heads, head_)) return;
        const AttentionSequence s = s_;  // what functions out of line point to is not in registers
        const int thread = static_cast<int>(threadIdx.x), key_head = head_ / call_.group;
        const Rows queries = Rows::of_queries(call_.q, s, head_, call_.channels);
        const Rows keys = Rows::of_keys(call_.k, call_, s, key_head, call_.channels);
        const Rows values = Rows::of_keys(call_.v, call_, s, key_head, call_.value_channels);
        const Bias bias(reinterpret_cast<float*>(shared_at(base_ + bias_at)), call_, s, head_);
        const QueryTile q{base_};
        const KeyTile k{base_ + QueryTile::bytes}, v{k.base + KeyTile::bytes};
        int* nonfinite = reinterpret_cast<int*>(shared_at(base_ + nonfinite_at));

        queries.copy(q, first_, nullptr, thread, threads);
        const Index last = min(first_ + block_queries, s_.q_count) - 1;
        const Range all{visible_keys(call_, s_, first_).begin, visible_keys(call_, s_, last).end};
        for (Index at = all.begin / N * N; at < all.end; at += N) {
            __syncthreads();
            keys.copy(k, at, nullptr, thread, threads);
            if (out_.o) values.copy(v, at, nonfinite, thread, threads);
            const bool plain = bias.is_plain(first_, at);
            if (!plain) bias.fill(first_, at, thread, threads);
            __syncthreads();
            Acc<16, N> x;
            float factor[2];
            multiply_transposed<planes, block_queries, N, columns>(x, q, 16 * warp_, k, call_.channels, lane_);
            take_scores(bias, plain, x, factor);
            if (!out_.o) continue;
            std::uint32_t p[N / 16][planes][4];
            to_planes(p, x);
            add_weighted<planes, N, columns>(o_, factor, p, v, call_.value_channels, lane_);
            add_nonfinite_rows<N, columns>(o_, x, values, at, nonfinite, call_.value_channels, lane_);
        }
        finish();
    }

  private:
    __device__ Index query(int half) const { return first_ + 16 * warp_ + lane_ / 4 + 8 * half; }

    // Products become scores, then probabilities of the sums so far; `factor` is what older sums shrink by.
    __device__ void take_scores(const Bias& bias, bool plain, Acc<16, N>& x, float (&factor)[2]) {
        std::uint32_t seen[2] = {~0u, ~0u};  // a bit for each of the lane's keys
        const auto bit = [](int column) { return column / 4 + column % 2; };
        if (call_.softcap == 0)
            x.scale(call_.scale);
        else
            x.each([&](float& e, int, int) { e = soft_cap(e * call_.scale, call_.softcap).x; });
        if (!plain) {
            seen[0] = seen[1] = 0;
            x.each([&](float& e, int half, int column) {
                const float added = bias.at(16 * warp_ + lane_ / 4 + 8 * half, column + own_column(lane_));
                e = added == -INFINITY ? -INFINITY : e + added;
                if (added != -INFINITY) seen[half] |= 1u << bit(column);
            });
        }
        float top[2] = {top_[0], top_[1]};
        x.each([&](float& e, int half, int) { top[half] = fmaxf(top[half], e); });
        for_rows([&](int half) {
            top[half] = maximum_of_lanes<4>(top[half]);
            factor[half] = top_[half] == top[half] ? 1.0F : expf(top_[half] - top[half]);
            top_[half] = top[half];
            sum_[half] *= factor[half];
            seen_[half] = seen_[half] || seen[half] != 0;
        });
        x.each([&](float& e, int half, int column) {
            const bool visible = (seen[half] >> bit(column) & 1u) != 0;
            e = visible ? (planes == 1 ? __expf(e - top[half]) : expf(e - top[half])) : 0.0F;
            sum_[half] += e;
        });
    }

    __device__ void finish() {
        for_rows([&](int half) {
            const float sum = sum_of_lanes<4>(sum_[half]);
            bool seen = seen_[half];
            for (int lanes = 1; lanes < 4; lanes *= 2)
                seen = __shfl_xor_sync(0xffffffffu, static_cast<int>(seen), lanes) != 0 || seen;
            if (query(half) >= s_.q_count) return;
            const RowEnd end = end_of_row(call_, head_, top_[half], sum, seen);
            if (lane_ % 4 == 0) store_row_end(call_, out_, s_, head_, query(half), end);
            if (!out_.o) return;
            store_row(out_.o, query_row(out_.o, s_, query(half), head_), o_, half, call_.value_channels, lane_,
                      [&end](float x) { return end.scale == 0 ? 0.0F : x * end.scale; });
        });
    }

    const AttentionCall& call_;
    const ForwardOutputs& out_;
    AttentionSequence s_;
    RowTile at_;
    int head_ = static_cast<int>(blockIdx.y);
    Index first_ = at_.first;
    int warp_ = static_cast<int>(threadIdx.x) / 32, lane_ = static_cast<int>(threadIdx.x) % 32;
    std::uint32_t base_ = ptx::shared_address(ptx::shared_memory());
    Acc<16, columns> o_{};
    float top_[2] = {-INFINITY, -INFINITY}, sum_[2] = {};  // the lane's part of a sum
    bool seen_[2] = {};
};

template <class Forward, bool few>
__global__ void __launch_bounds__(Forward::threads)
    attention_forward_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ ForwardOutputs out) {
    if constexpr (few) ptx::follow_launch_before();
    for_each_block<few>(out.redo, pass.sequences, pass.sequences.of_queries, pass.call.heads,
                        static_cast<int>(blockIdx.y), pass.call.queries, Forward::block_queries,
                        [&](const RowTile& at) { Forward(pass, out, at).run(); });
}

}  // namespace

void launch_attention_forward(const AttentionPass& pass, int planes, const ForwardOutputs& out, cudaStream_t stream) {
    const auto run = [&]<class Forward, bool few>() {
        const TileList& list = pass.sequences.of_queries;
        const Index rows = row_blocks(list, pass.call.queries, Forward::block_queries);
        launch(attention_forward_kernel<Forward, few>,
               {row_block_grid<few>(rows, pass.call.heads, list, pass.sequences), Forward::threads,
                Forward::shared_bytes, few && out.redo.early},
               stream, "attention forward", pass, out);
    };
    with_kernel(pass.call, planes, [&]<int p, int columns>() {
        with_room<AttentionForward<p, columns, false>::shared_bytes>([&]<bool small>() {
            using Forward = AttentionForward<p, columns, small>;
            with_few(out.redo, [&]<bool few>() { run.template operator()<Forward, few>(); });
        });
    });
}

}  // namespace softdelta::cuda
