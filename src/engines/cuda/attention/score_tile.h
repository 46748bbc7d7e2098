// A tile of probabilities and of ds, for the kernels of the gradients: 16 rows of a warp against N streamed rows.
//
//     by query   rows are queries, streamed are keys      S = q kᵀ    dP = do vᵀ
//     by key     rows are keys, streamed are queries      Sᵀ = k qᵀ   dPᵀ = v doᵀ
//
//     P = e^(S − lse)     ds = P∘(dP − D)     dx = ds∘softcap'
#pragma once

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/rows.h"
#include "engines/cuda/attention/scores.h"

namespace softdelta::cuda {

template <int planes, int columns>
struct GradientTiles {
    static constexpr int warps = planes * columns > 384 ? 2 : 4, block_rows = 16 * warps, threads = 32 * warps;
    static constexpr int streamed = planes * columns > 384 ? 16 : 32;  // rows of a streamed tile
    using Own = PlaneTile<planes, block_rows, columns>;
    using Streamed = PlaneTile<planes, streamed, columns>;
    using Bias = BiasTile<block_rows, streamed, false>;  // by key it is as large
    static constexpr int bias_at = 2 * (Own::bytes + Streamed::bytes), odd_at = bias_at + Bias::bytes;
    static constexpr int shared_bytes = odd_at + 2 * streamed * static_cast<int>(sizeof(int));

    Own own_scores, own_values;  // q and do, or k and v
    Streamed streamed_scores, streamed_values;
    float* bias;
    int *odd_scores, *odd_values;  // of streamed rows: whether one is not finite

    __device__ GradientTiles() {
        const std::uint32_t base = ptx::shared_address(ptx::shared_memory());
        own_scores.base = base;
        own_values.base = base + Own::bytes;
        streamed_scores.base = base + 2 * Own::bytes;
        streamed_values.base = streamed_scores.base + Streamed::bytes;
        bias = reinterpret_cast<float*>(shared_at(base + bias_at));
        odd_scores = reinterpret_cast<int*>(shared_at(base + odd_at));
        odd_values = odd_scores + streamed;
    }
};

// What the gradients need of a query's row.
struct RowTerm {
    float top, log_sum, D;
};

// One head of one sequence.
template <int planes, int columns, bool by_key>
class ScoreTile {
    using Tiles = GradientTiles<planes, columns>;
    static constexpr int N = Tiles::streamed;

  public:
    using Bias = BiasTile<Tiles::block_rows, N, by_key>;

    __device__ ScoreTile(const AttentionCall& call, const RowTerms& terms, const AttentionSequence& s, int head,
                         float* bias, const Rows& queries, const Rows& keys, const Rows& values, const Rows& d_o)
        : call_(call),
          terms_(terms),
          s_(s),
          bias_(bias, call, s, head),
          terms_at_(call.row_of(s, head)),
          queries_(queries),
          keys_(keys),
          values_(values),
          d_o_(d_o) {}

    // Before compute(), by all threads of the block, which waits before and after.
    __device__ void prepare(Index own, Index at, int thread) {
        plain_ = bias_.is_plain(own, at);
        if (!plain_) bias_.fill(own, at, thread, Tiles::threads);
    }

    // p and dx of own rows [first, …) and streamed rows [at, at + N); ds, without the soft cap, into `ds`.
    __device__ void compute(const Tiles& tiles, Index first, Index at, int warp, int lane, float (&p)[N / 8][4],
                            float (&dx)[N / 8][4], float (&ds)[N / 8][4]) const {
        multiply_transposed<planes, Tiles::block_rows, N, columns>(p, tiles.own_scores, 16 * warp,
                                                                   tiles.streamed_scores, call_.channels, lane);
        multiply_transposed<planes, Tiles::block_rows, N, columns>(ds, tiles.own_values, 16 * warp,
                                                                   tiles.streamed_values, call_.value_channels, lane);
        const int own = 16 * warp + lane / 4;
        RowTerm term[2];
#pragma unroll
        for (int half = 0; half < 2 && !by_key; ++half) term[half] = term_of(first + own + 8 * half);
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int column = 8 * n + 2 * (lane % 4) + c;
                if (by_key) term[0] = term_of(at + column);
                const bool odd = tiles.odd_scores[column] != 0 || tiles.odd_values[column] != 0;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int m = 2 * half + c;
                    if (odd) take_odd(tiles, column, first + own + 8 * half, at + column, p[n][m], ds[n][m]);
                    const float added = plain_ ? 0.0F : bias_.at(own + 8 * half, column);
                    float score = p[n][m] * call_.scale, slope = 1;
                    if (call_.softcap != 0) {
                        const float2 capped = soft_cap(score, call_.softcap);
                        score = capped.x, slope = capped.y;
                    }
                    const RowTerm& of = term[by_key ? 0 : half];
                    const float exponent = score + added - of.top - of.log_sum;
                    p[n][m] = added == -INFINITY ? 0.0F : expf(exponent);
                    ds[n][m] = p[n][m] != 0 ? p[n][m] * (ds[n][m] - of.D) : 0.0F;
                    dx[n][m] = ds[n][m] != 0 ? ds[n][m] * slope : 0.0F;
                }
            }
    }

  private:
    // Products with a row that is not finite: the tile has zeros there.
    __device__ void take_odd(const Tiles& tiles, int column, Index own, Index streamed, float& score,
                             float& d_p) const {
        const Index i = by_key ? streamed : own, j = by_key ? own : streamed;
        if (i >= s_.q_count || j >= s_.k_count) return;
        if (tiles.odd_scores[column] != 0) score = queries_.dot(i, keys_, j);
        if (tiles.odd_values[column] != 0) d_p = d_o_.dot(i, values_, j);
    }
    __device__ RowTerm term_of(Index i) const {
        if (i >= s_.q_count) return {};
        return {terms_.sums.top[terms_at_ + i], terms_.sums.log_sum[terms_at_ + i], terms_.D[terms_at_ + i]};
    }

    const AttentionCall& call_;
    const RowTerms& terms_;
    const AttentionSequence& s_;
    Bias bias_;
    bool plain_ = false;
    Index terms_at_;
    const Rows &queries_, &keys_, &values_, &d_o_;
};

}  // namespace softdelta::cuda
