#include "judge/lost_scores.h"

#include <algorithm>
#include <cmath>

#include "core/tensor.h"
#include "io/file/core_view.h"

namespace softdelta::judge {

namespace {

using std::int64_t;

// f32 keeps a score of this size to 1/64: from here on rounding changes probabilities by percents.
constexpr double large = 0x1p18;

// Visits every element of a tensor: its index in the last two dimensions, and its value.
template <class Visit>
void for_each(const Tensor& t, Visit&& visit) {
    if (t.count() == 0) return;
    const core::Tensor from = io::core_view(t);
    std::vector<int64_t> at(t.rank());
    for (int64_t i = 0, n = t.count(); i < n; ++i) {
        int64_t offset = 0;
        for (std::size_t d = 0; d < at.size(); ++d) offset += at[d] * t.stride()[d];
        visit(at, core::load(from, offset));
        for (std::size_t d = at.size(); d-- > 0;) {
            if (++at[d] < t.shape(d)) break;
            at[d] = 0;
        }
    }
}

double largest(const Tensor& t) {
    double most = 0;
    if (t)
        for_each(t, [&](const auto&, double x) {
            if (std::isfinite(x)) most = std::max(most, std::abs(x));
        });
    return most;
}

// The largest norm of the rows of each head of [B, T, H, W].
std::vector<double> largest_norms(const Tensor& t) {
    std::vector<double> norms(static_cast<std::size_t>(t.shape(2)));
    double square = 0;
    for_each(t, [&](const auto& at, double x) {
        square = (at[3] == 0 ? 0 : square) + (std::isfinite(x) ? x * x : 0);
        double& norm = norms[static_cast<std::size_t>(at[2])];
        norm = std::max(norm, std::sqrt(square));
    });
    return norms;
}

double most_of(const std::vector<double>& x) {
    return x.empty() ? 0 : *std::max_element(x.begin(), x.end());
}

// At most, of a sequence.
int64_t keys_of(const io::Call& call) {
    const Tensor& table = call.attention.block_table;
    return call.attention.k.shape(1) * (table ? table.shape(1) : 1);
}

}  // namespace

double scale_of(const io::Call& call) {
    const double scale = call.is_attention ? call.attention_options.scale : call.delta_options.scale;
    const Tensor& q = call.is_attention ? call.attention.q : call.delta.q;
    return std::abs(std::isnan(scale) ? 1 / std::sqrt(static_cast<double>(q.shape(3))) : scale);
}

double largest_norm(const Tensor& t) {
    return most_of(largest_norms(t));
}

double largest_score(const io::Call& call) {
    const AttentionInputs& in = call.attention;
    double score = scale_of(call) * largest_norm(in.q) * largest_norm(in.k);
    if (call.attention_options.softcap > 0) score = std::min(score, call.attention_options.softcap);
    const auto farthest = static_cast<double>(in.q.shape(1) + keys_of(call));
    const double bias = in.bias_slopes ? largest(in.bias_slopes) * largest(in.bias) : largest(in.bias);
    return score + bias + largest(in.alibi_slopes) * farthest;
}

LostScores find_lost_scores(const io::Call& call, int threads) {
    LostScores lost;
    if (!call.is_attention || largest_score(call) < large / 2) return lost;
    const Tensor& q = call.attention.q;
    lost.shape = {q.shape(0), q.shape(2), q.shape(1)};
    const io::OwnedTensor lse(DType::f64, lost.shape);
    Execution execution;
    execution.engine = "reference";
    execution.threads = threads;
    io::execute(call, {{"lse", lse.view()}}, execution);
    const auto* x = static_cast<const double*>(lse.data());
    lost.rows.resize(static_cast<std::size_t>(lse.count()));
    for (std::size_t i = 0; i < lost.rows.size(); ++i) {
        if (!std::isfinite(x[i]) || !(std::abs(x[i]) >= large)) continue;
        lost.rows[i] = 1;
        ++lost.count;
        lost.largest = std::max(lost.largest, std::abs(x[i]));
    }
    return lost;
}

std::vector<char> LostScores::marks(const std::string& result) const {
    if (!any() || (result != "o" && result != "lse" && result != "dq")) return {};
    if (result == "lse") return rows;
    std::vector<char> marks(rows.size());
    std::size_t from = 0;
    for (int64_t b = 0; b < shape[0]; ++b)
        for (int64_t h = 0; h < shape[1]; ++h)
            for (int64_t i = 0; i < shape[2]; ++i)
                marks[static_cast<std::size_t>((b * shape[2] + i) * shape[1] + h)] = rows[from++];
    return marks;
}

// dq = scale·Σ p_j (do·v_j − D) k_j with D within the range of do·v_j, or off by dlse: with norms,
// |dq| ≤ scale·(2 |do| |v| + |dlse|)·|k|.
RowBounds::RowBounds(const io::Call& call) {
    const AttentionInputs& in = call.attention;
    const auto Dv = static_cast<std::size_t>(in.v.shape(3)), heads = static_cast<std::size_t>(in.k.shape(2));
    key_heads_ = in.k.shape(2), group_ = in.q.shape(2) / std::max<int64_t>(key_heads_, 1);
    const double start = in.sink ? 0 : HUGE_VAL;
    low_.assign(heads * Dv, start), high_.assign(heads * Dv, -start);
    for_each(in.v, [&](const auto& at, double x) {
        const std::size_t i = static_cast<std::size_t>(at[2]) * Dv + static_cast<std::size_t>(at[3]);
        low_[i] = std::min(low_[i], x), high_[i] = std::max(high_[i], x);
    });
    dq_.assign(heads, 0.0);
    if (!call.d_o) return;
    const std::vector<double> k = largest_norms(in.k), v = largest_norms(in.v);
    const double d_o = largest_norm(call.d_o), dlse = largest(call.dlse);
    for (std::size_t h = 0; h < heads; ++h) dq_[h] = scale_of(call) * (2 * d_o * v[h] + dlse) * k[h];
}

int64_t RowBounds::first_outside(const std::string& result, const Tensor& tensor,
                                 const std::vector<char>& marks) const {
    if (result != "o" && result != "dq") return -1;
    constexpr double slack = 4;  // in ulp
    const double tolerance = slack * core::epsilon_of(io::core_type(tensor.dtype()));
    const int64_t width = tensor.shape(3), heads = tensor.shape(2);
    int64_t first = -1, flat = 0;
    for_each(tensor, [&](const auto& at, double x) {
        const int64_t i = flat++;
        if (first >= 0 || marks[static_cast<std::size_t>(i / width)] == 0) return;
        const auto h = static_cast<std::size_t>(at[2] % heads / group_);
        const auto c = h * static_cast<std::size_t>(width) + static_cast<std::size_t>(at[3]);
        const double low = result == "o" ? low_[c] : -dq_[h], high = result == "o" ? high_[c] : dq_[h];
        const double rounding = tolerance * std::max(std::abs(low), std::abs(high));
        if (!(x >= low - rounding && x <= high + rounding)) first = i;
    });
    return first;
}

}  // namespace softdelta::judge
