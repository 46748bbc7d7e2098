// The reference's attention forward against the textbook, written out key by key, over random calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/random_attention.h"

namespace softdelta::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// One query row of one sequence and the keys of that sequence, as the definition of the operation has them.
class TextbookRow {
  public:
    TextbookRow(const RandomAttention& call, Index sequence, Index head, Index query)
        : call_(call), n_(sequence), h_(head), i_(query) {
        const auto entry = [](const Array& a, Index i) { return static_cast<Index>(a.get(i)); };
        batch_ = key_batch_ = n_;
        Lq_ = call.q.view().shape(1), Lk_ = call.k.view().shape(1);
        if (call.cu_seqlens_q.view()) {
            batch_ = 0;
            q_begin_ = entry(call.cu_seqlens_q, n_);
            Lq_ = entry(call.cu_seqlens_q, n_ + 1) - q_begin_;
        }
        if (call.cu_seqlens_k.view()) {
            key_batch_ = 0;
            k_begin_ = entry(call.cu_seqlens_k, n_);
            Lk_ = entry(call.cu_seqlens_k, n_ + 1) - k_begin_;
        }
        if (call.cache_seqlens.view()) Lk_ = entry(call.cache_seqlens, n_);
        H_ = call.q.view().shape(2);
        hk_ = h_ / (H_ / call.k.view().shape(2));
    }

    bool exists() const { return i_ < Lq_; }
    Shape lse_index() const { return {batch_, h_, q_begin_ + i_}; }
    Shape o_index(Index c) const { return {batch_, q_begin_ + i_, h_, c}; }

    void compute() {
        double sum = call_.sink.view() ? std::exp(call_.sink.get(h_)) : 0;
        o.assign(static_cast<std::size_t>(call_.o_shape()[3]), 0.0);
        for (Index j = 0; j < Lk_; ++j) {
            if (!kept(j)) continue;
            const double weight = std::exp(score(j));
            sum += weight;
            for (std::size_t c = 0; c < o.size(); ++c) o[c] += weight * value(j, static_cast<Index>(c));
        }
        for (double& x : o) x = sum > 0 ? x / sum : 0;
        const double conventions[] = {-infinity, infinity, 0};
        lse = sum > 0 ? std::log(sum) : conventions[static_cast<int>(call_.options.empty_row)];
    }

    double lse = 0;
    std::vector<double> o;

  private:
    double at(const Array& a, Index j) const {
        const auto size = [&a](std::size_t dim) { return a.view().shape(dim); };
        return a.get({size(0) == 1 ? 0 : n_, h_ * size(1) / H_, size(2) == 1 ? 0 : i_, size(3) == 1 ? 0 : j});
    }

    double bias(Index j) const {
        double sum = call_.bias.view() ? at(call_.bias, j) : 0;
        if (call_.bias_slopes.view() && sum != -infinity) sum *= call_.bias_slopes.get(h_);
        const auto distance = static_cast<double>(std::abs(i_ + Lk_ - Lq_ - j));
        return call_.alibi_slopes.view() ? sum - call_.alibi_slopes.get(h_) * distance : sum;
    }

    bool seen(Index j) const {
        const AttentionOptions& o_ = call_.options;
        const Index diagonal = o_.causal == Causal::top_left ? i_ : i_ + Lk_ - Lq_;
        if (o_.causal != Causal::none && j > diagonal) return false;
        if (o_.window_left >= 0 && diagonal - j > o_.window_left) return false;
        if (o_.window_right >= 0 && j - diagonal > o_.window_right) return false;
        return !(call_.mask.view() && at(call_.mask, j) == 0) && bias(j) != -infinity;
    }

    bool kept(Index j) const {
        if (!seen(j) || call_.options.top_w < 0) return seen(j);
        Index ahead = 0;
        for (Index other = 0; other < Lk_; ++other)
            ahead += seen(other) && (bias(other) > bias(j) || (bias(other) == bias(j) && other < j));
        return ahead < call_.options.top_w;
    }

    // Where element c of key j is; key j of a cache in blocks is in row j % rows of the table's block j / rows.
    Shape key(Index j, Index c) const {
        if (!call_.block_table.view()) return {key_batch_, k_begin_ + j, hk_, c};
        const Index rows = call_.k.view().shape(1);
        return {static_cast<Index>(call_.block_table.get({n_, j / rows})), j % rows, hk_, c};
    }

    double value(Index j, Index c) const { return (call_.v_in_k ? call_.k : call_.v).get(key(j, c)); }

    double score(Index j) const {
        const Index D = call_.q.view().shape(3);
        double dot = 0;
        for (Index c = 0; c < D; ++c) dot += call_.q.get({batch_, q_begin_ + i_, h_, c}) * call_.k.get(key(j, c));
        const double scale = call_.options.scale, cap = call_.options.softcap;
        const double x = dot * (std::isnan(scale) ? 1 / std::sqrt(static_cast<double>(D)) : scale);
        return (cap != 0 ? cap * std::tanh(x / cap) : x) + bias(j);
    }

    const RandomAttention& call_;
    Index n_, h_, i_, batch_, key_batch_, Lq_, Lk_, q_begin_ = 0, k_begin_ = 0, H_, hk_;
};

void expect_textbook(const RandomAttention& call) {
    SCOPED_TRACE(call.describe());
    const Array o(DType::f64, call.o_shape()), lse(DType::f64, call.lse_shape());
    Execution execution;
    execution.engine = "reference";
    execution.threads = 1;  // most calls are tiny
    attention_forward(call.inputs, {o.view(), lse.view()}, call.options, execution);

    const Index sequences = call.cu_seqlens_q.view() ? call.cu_seqlens_q.count() - 1 : call.q.view().shape(0);
    for (Index n = 0; n < sequences; ++n)
        for (Index h = 0; h < call.q.view().shape(2); ++h)
            for (Index i = 0;; ++i) {
                TextbookRow row(call, n, h, i);
                if (!row.exists()) break;
                row.compute();
                if (std::isinf(row.lse))
                    ASSERT_EQ(lse.get(row.lse_index()), row.lse);
                else
                    ASSERT_NEAR(lse.get(row.lse_index()), row.lse, 1e-12 * std::max(1.0, std::abs(row.lse)));
                for (std::size_t c = 0; c < row.o.size(); ++c)
                    ASSERT_NEAR(o.get(row.o_index(static_cast<Index>(c))), row.o[c], 1e-12);
            }
}

TEST(AttentionReference, EqualsTheTextbook) {
    const std::uint64_t seed = first_seed();
    AttentionRanges ranges;
    ranges.pages = ranges.repeats = ranges.quantised = true;
    for (std::uint64_t n = 0; n < 500; ++n) expect_textbook(draw_attention(seed + n, ranges));
}

// Beyond one block of rows and one tile of keys.
TEST(AttentionReference, EqualsTheTextbookForLongSequences) {
    const AttentionRanges ranges{2, 150, 170, 2, 2, 9, 65, {DType::f64}, true};
    const std::uint64_t seed = first_seed();
    for (std::uint64_t n = 0; n < 12; ++n) expect_textbook(draw_attention(seed + n, ranges));
}

}  // namespace
}  // namespace softdelta::test
