#include "judge/small_attention.h"

#include <algorithm>
#include <limits>

#include "core/attention.h"

namespace softdelta::test {

namespace {

using M = AttentionMistake;
using Vector = Eigen::VectorXf;
using Allowed = Eigen::Matrix<bool, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr Index tile = 64;

// Rows of sequence n: where they lie, and its index into mask and bias.
struct Span {
    Index batch, index;
    Index q_begin, q_count, k_begin, k_count;
};

// One query head of one sequence.
struct Head {
    Span span;
    Index h, hk;
    Matrix q, k, v, d_o;      // [Lq, D], [Lk, D], [Lk, Dv], [Lq, Dv]
    Allowed allowed;          // [Lq, Lk]
    Matrix s, slope;          // [Lq, Lk] and ds / d(scale q kᵀ)
    Matrix o;                 // [Lq, Dv]
    Vector lse;               // [Lq]
    Vector largest, log_sum;  // [Lq] of lse
};

class SmallAttention {
  public:
    SmallAttention(const io::Call& call, AttentionMistake mistake, AttentionMistake second, const Fault& fault)
        : call_(call),
          mistake_(mistake),
          second_(second),
          q_(call.attention.q),
          k_(call.attention.k),
          v_(call.attention.v),
          mask_(call.attention.mask),
          bias_(call.attention.bias),
          sink_(call.attention.sink),
          alibi_(call.attention.alibi_slopes),
          slopes_(call.attention.bias_slopes),
          do_(call.d_o),
          dlse_(call.dlse),
          scale_(static_cast<float>(std::isnan(call.attention_options.scale)
                                        ? 1 / std::sqrt(static_cast<double>(q_.size(3)))
                                        : call.attention_options.scale)),
          sums_(call),
          fault_(fault) {
        fault_.scale = scale_;
        fault_.group = static_cast<float>(q_.size(2)) / static_cast<float>(k_.size(2));
        scale_ = fault_.number("scale", scale_);
    }

    Results run() {
        for (Index n = 0; n < sequence_count(); ++n)
            for (Index h = 0; h < q_.size(2); ++h) {
                Head x = load(span(n), h);
                score(x);
                forward(x);
                if (sums_.has("dq")) backward(x);
            }
        write_faulty();
        return sums_.stored();
    }

  private:
    bool is(AttentionMistake m) const { return mistake_ == m || second_ == m; }
    Matrix r(const Matrix& x) const { return round_to(call_.attention.q.dtype(), x); }
    bool packed() const { return static_cast<bool>(call_.attention.cu_seqlens_q); }
    Index sequence_count() const { return packed() ? call_.attention.cu_seqlens_q.count() - 1 : q_.size(0); }

    // Where row (i, j) of query head h lies in a mask or bias, whatever it is broadcast over; a mistaken index stays
    // within.
    static Index place(const Floats& t, Index n, Index h, Index heads, Index i, Index j) {
        const auto in = [&](std::size_t dim, Index index) { return std::min(index, t.size(dim) - 1); };
        const Index head = t.size(1) == 1 ? 0 : h / (heads / t.size(1));
        return ((in(0, n) * t.size(1) + head) * t.size(2) + in(2, i)) * t.size(3) + in(3, j);
    }
    float bias(const Head& x, Index i, Index j) const {
        float b = bias_ ? bias_[place(bias_, x.span.index, x.h, q_.size(2), i, j)] : 0;
        if (slopes_) b *= slopes_[x.h];
        const auto distance = static_cast<float>(std::abs(x.span.k_count - x.span.q_count + i - j));
        return alibi_ ? b - alibi_[x.h] * distance : b;
    }

    Span span(Index n) const;
    Head load(const Span& s, Index h);
    bool is_allowed(const Head& x, Index i, Index j) const;
    void keep_largest(Head& x) const;
    void lose_tiles(Head& x) const;
    void lose_blocks(Head& x) const;
    void score(Head& x);
    void forward(Head& x);
    void backward(Head& x);
    void add_bias_gradient(const Head& x, const Matrix& ds);
    void sum_by_tiles(const Head& x, Index i, float largest, Eigen::RowVectorXf& of_o, Eigen::RowVectorXf& of_l) const;
    void write_faulty();

    const io::Call& call_;
    AttentionMistake mistake_, second_;
    Floats q_, k_, v_, mask_, bias_, sink_, alibi_, slopes_, do_, dlse_;
    float scale_;
    Sums sums_;
    Faulty fault_;
};

Span SmallAttention::span(Index n) const {
    if (!packed()) return {n, n, 0, q_.size(1), 0, k_.size(1)};
    const Floats queries(call_.attention.cu_seqlens_q), keys(call_.attention.cu_seqlens_k);
    const auto at = [](const Floats& t, Index i) { return static_cast<Index>(t[i]); };
    Span s{0, n, at(queries, n), at(queries, n + 1), at(keys, n), at(keys, n + 1)};
    s.q_count -= s.q_begin;
    s.k_count -= s.k_begin;
    if (is(M::sequences_leak)) s.k_count = std::min(s.k_count + 3, k_.size(1) - s.k_begin);
    return s;
}

// Causal, window and mask, of one key.
bool SmallAttention::is_allowed(const Head& x, Index i, Index j) const {
    const AttentionOptions& options = call_.attention_options;
    Causal causal = options.causal;
    if (causal == Causal::bottom_right && is(M::top_left_for_bottom_right)) causal = Causal::top_left;
    const Index diagonal = i + (causal == Causal::top_left ? 0 : x.span.k_count - x.span.q_count);
    const Index last = diagonal - is(M::causal_strict) + is(M::causal_one_more);
    if (causal != Causal::none && j > last) return false;
    const Index near = is(M::window_from_top_left) ? i : diagonal;
    if (options.window_left >= 0 && near - j - is(M::window_left_off_by_one) > options.window_left) return false;
    if (options.window_right >= 0 && j - near - is(M::window_right_off_by_one) > options.window_right) return false;
    const Index n = is(M::mask_of_first_batch) ? 0 : x.span.index;
    return !mask_ || mask_[place(mask_, n, x.h, q_.size(2), i, j)] != 0;
}

// Dynamic mask: the top_w largest biases of a row, ties to the lower index.
void SmallAttention::keep_largest(Head& x) const {
    const Index w = call_.attention_options.top_w;
    std::vector<Index> order;
    for (Index i = 0; i < x.span.q_count; ++i) {
        order.clear();
        for (Index j = 0; j < x.span.k_count; ++j)
            if (x.allowed(i, j)) order.push_back(j);
        std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return bias(x, i, a) > bias(x, i, b); });
        for (std::size_t rank = static_cast<std::size_t>(w); rank < order.size(); ++rank)
            x.allowed(i, order[rank]) = false;
    }
}

void SmallAttention::lose_tiles(Head& x) const {
    for (Index i = 0; i < x.span.q_count; ++i)
        for (Index j = tile; j < x.span.k_count; j += tile)
            if (!x.allowed.row(i).segment(j - tile, tile).any())
                x.allowed.row(i).segment(j, std::min(tile, x.span.k_count - j)).setConstant(false);
}

void SmallAttention::lose_blocks(Head& x) const {
    const auto right = x.allowed;
    for (Index i = 0; i < x.span.q_count; i += tile)
        for (Index j = tile; j < x.span.k_count; j += tile) {
            const Index rows = std::min(tile, x.span.q_count - i);
            if (!right.block(i, j - tile, rows, tile).any())
                x.allowed.block(i, j, rows, std::min(tile, x.span.k_count - j)).setConstant(false);
        }
}

Head SmallAttention::load(const Span& s, Index h) {
    const Index heads = k_.size(2);
    Head x{s, h, is(M::head_modulo) ? h % heads : h / (q_.size(2) / heads), {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}};
    if (fault_.at("key head")) x.hk = fault_.head(x.hk, heads);
    x.q = q_.rows(s.batch, s.q_begin, s.q_count, h);
    x.k = k_.rows(s.batch, s.k_begin, s.k_count, x.hk);
    x.v = v_.rows(s.batch, s.k_begin, s.k_count, x.hk);
    fault_.matrix("q", x.q);
    fault_.matrix("k", x.k);
    fault_.matrix("v", x.v);
    if (do_) x.d_o = do_.rows(s.batch, s.q_begin, s.q_count, h);
    x.allowed.resize(s.q_count, s.k_count);
    for (Index i = 0; i < s.q_count; ++i)
        for (Index j = 0; j < s.k_count; ++j) x.allowed(i, j) = is_allowed(x, i, j);
    if (call_.attention_options.top_w >= 0) keep_largest(x);
    if (is(M::tile_lost_after_empty_one)) lose_tiles(x);
    if (fault_.is("tile seen", "of the chunk before")) lose_blocks(x);
    for (Index i = 0; fault_.is("p of rows without a key", "not masked") && i < s.q_count; ++i)
        if (!x.allowed.row(i).any()) x.allowed.row(i).setConstant(true);
    return x;
}

// s = softcap(scale q kᵀ) + bias
void SmallAttention::score(Head& x) {
    const auto cap = is(M::softcap_ignored) ? 0 : static_cast<float>(call_.attention_options.softcap);
    x.s = x.q * x.k.transpose();
    if (is(M::value_size_in_scale))
        x.s *= 1 / std::sqrt(static_cast<float>(v_.size(3)));
    else if (!is(M::scores_without_scale))
        x.s *= scale_;
    fault_.matrix("q kᵀ", x.s);
    x.slope = Matrix::Ones(x.s.rows(), x.s.cols());
    for (Index i = 0; i < x.s.rows(); ++i)
        for (Index j = 0; j < x.s.cols(); ++j) {
            const float b = fault_.number("bias", (is(M::bias_scaled) ? scale_ : 1) * bias(x, i, j));
            if (is(M::softcap_after_bias)) x.s(i, j) += b;
            if (cap > 0) {
                const float y = std::tanh(x.s(i, j) / cap);
                x.s(i, j) = cap * y;
                x.slope(i, j) = 1 - y * y;
            }
            if (!is(M::softcap_after_bias)) x.s(i, j) += b;
        }
    fault_.matrix("slope", x.slope);
}

// Key tile by key tile, as a kernel that keeps a maximum, a sum and an o: of_o and of_l are the weights in either.
void SmallAttention::sum_by_tiles(const Head& x, Index i, float largest, Eigen::RowVectorXf& of_o,
                                  Eigen::RowVectorXf& of_l) const {
    const Eigen::RowVectorXf rescaled = of_o;
    Eigen::RowVectorXf kept = of_o;
    float top = sink_ ? sink_[x.h] : -infinity;
    const Index keys = x.span.k_count, last = (keys - 1) / tile;
    for (Index t = 0; t * tile < keys; ++t) {
        const Index end = std::min((t + 1) * tile, keys);
        for (Index j = t * tile; j < end; ++j)
            if (x.allowed(i, j)) top = std::max(top, x.s(i, j));
        for (Index j = t * tile; j < end; ++j) kept(j) = x.allowed(i, j) ? rescaled(j) * std::exp(largest - top) : 0;
    }
    const auto choose = [&](const char* place, Eigen::RowVectorXf& weights) {
        if (fault_.is(place, "not rescaled")) weights = kept;
        for (Index j = 0; j < keys; ++j)
            if ((fault_.is(place, "last only") && j / tile != last) || (fault_.is(place, "first only") && j >= tile))
                weights(j) = 0;
    };
    choose("sum of o", of_o);
    choose("sum of l", of_l);
}

void SmallAttention::forward(Head& x) {
    const Index rows = x.span.q_count;
    x.o = Matrix::Zero(rows, v_.size(3));
    x.lse = x.largest = x.log_sum = Vector::Constant(rows, -infinity);
    for (Index i = 0; i < rows; ++i) {
        float largest = sink_ ? sink_[x.h] : -infinity;
        for (Index j = 0; j < x.span.k_count; ++j)
            if (x.allowed(i, j)) largest = std::max(largest, x.s(i, j));
        if (largest == -infinity && (is(M::dead_row_nan) || fault_.is("p of rows without a key", "NaN")))
            x.o.row(i).setConstant(std::nanf(""));
        if (largest == -infinity && is(M::dead_row_mean)) x.o.row(i) = x.v.colwise().mean();
        if (largest == -infinity) continue;
        Eigen::RowVectorXf p = (x.s.row(i).array() - largest).exp();
        p = x.allowed.row(i).select(p, Eigen::RowVectorXf::Zero(p.size()));
        Eigen::RowVectorXf of_l = p;
        sum_by_tiles(x, i, largest, p, of_l);
        const float keys = fault_.number("l", of_l.sum()), sink = sink_ ? std::exp(sink_[x.h] - largest) : 0;
        const float sum = keys + (is(M::sink_not_in_sum) ? 0 : sink);
        x.largest(i) = largest, x.log_sum(i) = std::log(sum);
        Matrix weights = p;
        fault_.matrix("p", weights);
        p = weights.row(0);
        x.o.row(i) = r(p) * x.v / (is(M::o_not_normalised) ? 1 : sum);
        x.lse(i) = fault_.number("m in lse", is(M::lse_without_maximum) ? 0 : largest) +
                   fault_.number("ln l in lse", std::log(is(M::sink_not_in_lse) ? keys : sum));
    }
    fault_.matrix("o", x.o);
    x.o = r(x.o);
    sums_["o"].rows(x.span.batch, x.span.q_begin, rows, x.h) = x.o;
    const Index first = (x.span.batch * q_.size(2) + x.h) * q_.size(1) + x.span.q_begin;
    for (Index i = 0; i < rows; ++i) sums_["lse"][first + i] = x.lse(i) / (is(M::lse_log2) ? std::log(2.0f) : 1);
}

void SmallAttention::backward(Head& x) {
    const Span& s = x.span;
    const Index first = (s.batch * q_.size(2) + x.h) * q_.size(1) + s.q_begin;
    Matrix p = Matrix::Zero(s.q_count, s.k_count), ds = p;
    fault_.matrix("do", x.d_o);
    Matrix dp = x.d_o * x.v.transpose();
    fault_.matrix("dp", dp);
    Matrix D = x.d_o.cwiseProduct(x.o).rowwise().sum();
    fault_.matrix("D", D);
    bool lost = false;
    for (Index i = 0; i < s.q_count; ++i) {
        if (i % tile == 0 && is(M::rows_lost_after_dead_tile))
            lost = lost || !x.allowed.middleRows(i, std::min(tile, s.q_count - i)).any();
        if (x.lse(i) == -infinity && fault_.is("p of rows without a key", "NaN"))
            p.row(i).setConstant(std::nanf("")), ds.row(i).setConstant(std::nanf(""));
        if (x.lse(i) == -infinity || lost) continue;
        const float dlse = fault_.number("dlse", dlse_ ? dlse_[first + i] : 0);
        float delta = D(i, 0);
        if (is(M::without_delta)) delta = 0;
        if (!is(M::dlse_ignored)) delta += is(M::dlse_sign) ? dlse : -dlse;
        const bool large = std::abs(x.lse(i)) > 1e5f;  // in f32 it has lost the logarithm of the sum
        for (Index j = 0; j < s.k_count; ++j) {
            if (!x.allowed(i, j) && !is(M::mask_ignored_backward)) continue;
            p(i, j) = large ? std::exp(x.s(i, j) - x.largest(i) - x.log_sum(i)) : std::exp(x.s(i, j) - x.lse(i));
            ds(i, j) = fault_.number("p in ds", p(i, j)) * (dp(i, j) - delta);
        }
        if (!sink_) continue;
        const float weight = is(M::dsink_without_p) ? 1 : std::exp(sink_[x.h] - x.lse(i));
        sums_["dsink"][x.h] += (is(M::dsink_sign) ? 1 : -1) * weight * delta;
    }
    if (bias_) add_bias_gradient(x, ds);
    if (!is(M::without_softcap_slope)) ds = ds.cwiseProduct(x.slope);
    fault_.matrix("ds", ds);
    ds = r(ds);
    const float dq_scale = is(M::dq_without_scale) ? 1 : is(M::dq_scaled_twice) ? scale_ * scale_ : scale_;
    const float dk_scale = is(M::dk_without_scale) ? 1 : is(M::dk_scaled_twice) ? scale_ * scale_ : scale_;
    Matrix for_q = ds, for_k = ds, for_v = is(M::dv_from_ds) ? ds : p;
    fault_.matrix("ds in dq", for_q);
    fault_.matrix("ds in dk", for_k);
    fault_.matrix("p in dv", for_v);
    if (!is(M::dv_from_ds)) for_v = r(for_v);
    for (Index i = 0; i < s.q_count; ++i)
        for (Index j = 0; j < s.k_count; ++j) {
            const bool first_keys = j < tile, last_keys = j / tile == (s.k_count - 1) / tile;
            const bool first_rows = i < tile, last_rows = i / tile == (s.q_count - 1) / tile;
            const auto skips = [&](const char* place, bool is_first, bool is_last) {
                return (fault_.is(place, "first only") && !is_first) || (fault_.is(place, "last only") && !is_last);
            };
            if (skips("sum of dq", first_keys, last_keys)) for_q(i, j) = 0;
            if (skips("sum of dk", first_rows, last_rows)) for_k(i, j) = 0;
            if (skips("sum of dv", first_rows, last_rows)) for_v(i, j) = 0;
        }
    sums_["dq"].rows(s.batch, s.q_begin, s.q_count, x.h) = dq_scale * (for_q * x.k);
    const auto add = [&](const char* name, const Matrix& d) {
        const std::string place = std::string("sum over heads of ") + name;
        const Index head = fault_.is(place.c_str(), "in turn") ? x.h % k_.size(2) : x.hk;
        Rows rows = sums_[name].rows(s.batch, s.k_begin, s.k_count, head);
        if (is(M::last_head_of_group) || fault_.is(place.c_str(), "last only"))
            rows = d;
        else if (x.h % (q_.size(2) / k_.size(2)) == 0 || !fault_.is(place.c_str(), "first only"))
            rows += d;
    };
    add("dk", dk_scale * (for_k.transpose() * x.q));
    add("dv", for_v.transpose() * x.d_o);
}

// What is written, rows of a sequence after another.
void SmallAttention::write_faulty() {
    for (const std::string& name : io::output_names(call_)) {
        const std::string place = name + ", as written";
        if (!fault_.at(place.c_str())) continue;
        const Floats& x = sums_[name];
        const std::vector<std::int64_t> shape = io::output_shape(call_, name);
        Index total = 1;
        for (const std::int64_t size : shape) total *= size;
        const Floats copy(shape);
        for (Index i = 0; i < total; ++i) copy[i] = x[i];
        if (shape.size() < 3 || name == "dbias") {
            for (Index i = 0; i < total; ++i) x[i] = fault_.number(place.c_str(), x[i]);
            continue;
        }
        const bool lse = name == "lse", keys = name == "dk" || name == "dv";
        const Index heads = shape[lse ? 1 : 2];
        for (Index n = 0; n < sequence_count(); ++n)
            for (Index h = 0; h < heads; ++h) {
                const Index from = fault_.head(h, heads);
                const Span s = span(n);
                const Index begin = keys ? s.k_begin : s.q_begin, count = keys ? s.k_count : s.q_count;
                if (!lse) {
                    Matrix rows = copy.rows(s.batch, begin, count, from);
                    fault_.matrix(place.c_str(), rows);
                    x.rows(s.batch, begin, count, h) = rows;
                    continue;
                }
                Matrix column(count, 1);
                for (Index i = 0; i < count; ++i) column(i, 0) = copy[(s.batch * heads + from) * shape[2] + begin + i];
                fault_.matrix(place.c_str(), column);
                for (Index i = 0; i < count; ++i) x[(s.batch * heads + h) * shape[2] + begin + i] = column(i, 0);
            }
    }
}

void SmallAttention::add_bias_gradient(const Head& x, const Matrix& ds) {
    const Floats& dbias = sums_["dbias"];
    for (Index i = 0; i < x.span.q_count; ++i)
        for (Index j = 0; j < x.span.k_count; ++j) {
            float& to = dbias[place(dbias, x.span.index, x.h, q_.size(2), i, is(M::dbias_over_keys) ? i : j)];
            if (is(M::dbias_last_tile) && i % tile == 0) to = 0;
            if (is(M::dbias_last_head) && (i == 0 || dbias.size(2) > 1)) to = 0;
            to += (is(M::dbias_scaled) ? scale_ : 1) * (slopes_ ? slopes_[x.h] : 1) * ds(i, j);
        }
}

}  // namespace

Results run_small_attention(const io::Call& call, AttentionMistake mistake, AttentionMistake second,
                            const Fault& fault) {
    return SmallAttention(call, mistake, second, fault).run();
}

}  // namespace softdelta::test
