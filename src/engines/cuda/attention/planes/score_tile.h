// A tile of probabilities and of ds, for the kernels of the gradients: 16 rows of a warp against N streamed rows.
//
//     by query   rows are queries, streamed are keys      S = q kᵀ    dP = do vᵀ
//     by key     rows are keys, streamed are queries      Sᵀ = k qᵀ   dPᵀ = v doᵀ
//
//     P = e^(S − lse)     ds = P∘(dP − D)     dx = ds∘softcap'
#pragma once

#include "engines/cuda/attention/addends.h"
#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/rows.h"
#include "engines/cuda/device/card.h"

namespace softdelta::cuda {

// small: of the cards with the least shared memory.
template <int of_planes, int of_columns, bool small = false>
struct GradientTiles {
    static constexpr bool is_small = small;
    static constexpr int planes = of_planes, columns = of_columns, size = planes * columns;
    static constexpr int warps = (size > 384 ? 2 : 4) / (small && size > 256 ? 2 : 1), block_rows = 16 * warps,
                         threads = 32 * warps;
    static constexpr int streamed = small || size > 384 ? 16 : 32;  // rows of a streamed tile
    using Own = PlaneTile<planes, block_rows, columns>;
    using Streamed = PlaneTile<planes, streamed, columns>;
    using Bias = BiasTile<block_rows, streamed, false>;  // by key it is as large
    static constexpr int bias_at = 2 * (Own::bytes + Streamed::bytes), nonfinite_at = bias_at + Bias::bytes;
    static constexpr int shared_bytes = nonfinite_at + 2 * streamed * static_cast<int>(sizeof(int));

    Own own_scores, own_values;  // q and do, or k and v
    Streamed streamed_scores, streamed_values;
    float* bias;
    int *nonfinite_scores, *nonfinite_values;  // of streamed rows: whether one is not finite

    __device__ GradientTiles() {
        const std::uint32_t base = ptx::shared_address(ptx::shared_memory());
        own_scores.base = base;
        own_values.base = base + Own::bytes;
        streamed_scores.base = base + 2 * Own::bytes;
        streamed_values.base = streamed_scores.base + Streamed::bytes;
        bias = reinterpret_cast<float*>(shared_at(base + bias_at));
        nonfinite_scores = reinterpret_cast<int*>(shared_at(base + nonfinite_at));
        nonfinite_values = nonfinite_scores + streamed;
    }
};

// use.template operator()<Tiles>() for the smallest kernel that holds the call's channels, and the card.
template <class Use>
void with_gradient_tiles(const AttentionCall& call, int planes, const Use& use) {
    with_kernel(call, planes, [&]<int p, int columns>() {
        with_room<GradientTiles<p, columns>::shared_bytes>(
            [&]<bool small>() { use.template operator()<GradientTiles<p, columns, small>>(); });
    });
}

// What the gradients need of a query's row.
struct RowTerm {
    float top, log_sum, D;
};

// One head of one sequence.
template <class Tiles, bool by_key>
class ScoreTile {
    static constexpr int planes = Tiles::planes, columns = Tiles::columns, N = Tiles::streamed;

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

    // Brings streamed rows [at, at + N), by all threads of the block. p and dx of these and of own rows [first, …),
    // which are there; ds, without the soft cap, into `ds`.
    __device__ void take(const Tiles& tiles, Index first, Index at, int thread, Acc<16, N>& p, Acc<16, N>& dx,
                         Acc<16, N>& ds) {
        __syncthreads();
        (by_key ? queries_ : keys_).copy(tiles.streamed_scores, at, tiles.nonfinite_scores, thread, Tiles::threads);
        (by_key ? d_o_ : values_).copy(tiles.streamed_values, at, tiles.nonfinite_values, thread, Tiles::threads);
        plain_ = bias_.is_plain(first, at);
        if (!plain_) bias_.fill(first, at, thread, Tiles::threads);
        __syncthreads();
        compute(tiles, first, at, thread / 32, thread % 32, p, dx, ds);
    }

  private:
    __device__ void compute(const Tiles& tiles, Index first, Index at, int warp, int lane, Acc<16, N>& p,
                            Acc<16, N>& dx, Acc<16, N>& ds) const {
        multiply_transposed<planes, Tiles::block_rows, N, columns>(p, tiles.own_scores, 16 * warp,
                                                                   tiles.streamed_scores, call_.channels, lane);
        multiply_transposed<planes, Tiles::block_rows, N, columns>(ds, tiles.own_values, 16 * warp,
                                                                   tiles.streamed_values, call_.value_channels, lane);
        const int own = 16 * warp + lane / 4;
        const RowTerm terms[2] = {by_key ? RowTerm{} : term_of(first + own),
                                  by_key ? RowTerm{} : term_of(first + own + 8)};
        unrolled<N / 8, 2>([&](int n, int c) {
            const int column = 8 * n + own_column(lane) + c;
            const RowTerm of_column = by_key ? term_of(at + column) : RowTerm{};
            const bool nonfinite = tiles.nonfinite_scores[column] != 0 || tiles.nonfinite_values[column] != 0;
            for_rows([&](int half) {
                float &of_p = p.x[n][2 * half + c], &of_ds = ds.x[n][2 * half + c];
                if (nonfinite) take_nonfinite(tiles, column, first + own + 8 * half, at + column, of_p, of_ds);
                const float added = plain_ ? 0.0F : bias_.at(own + 8 * half, column);
                float score = of_p * call_.scale, slope = 1;
                if (call_.softcap != 0) {
                    const float2 capped = soft_cap(score, call_.softcap);
                    score = capped.x, slope = capped.y;
                }
                const RowTerm& of = by_key ? of_column : terms[half];
                const float exponent = score + added - of.top - of.log_sum;
                of_p = added == -INFINITY ? 0.0F : expf(exponent);
                of_ds = of_p != 0 ? of_p * (of_ds - of.D) : 0.0F;
                dx.x[n][2 * half + c] = of_ds != 0 ? of_ds * slope : 0.0F;
            });
        });
    }
    // Products with a row that is not finite: the tile has zeros there.
    __device__ void take_nonfinite(const Tiles& tiles, int column, Index own, Index streamed, float& score,
                                   float& d_p) const {
        const Index i = by_key ? streamed : own, j = by_key ? own : streamed;
        if (i >= s_.q_count || j >= s_.k_count) return;
        if (tiles.nonfinite_scores[column] != 0) score = queries_.dot(i, keys_, j);
        if (tiles.nonfinite_values[column] != 0) d_p = d_o_.dot(i, values_, j);
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
