#include "support/attention_terms.h"

#include <algorithm>
#include <cmath>

#include "support/attention_seen.h"

namespace softdelta::test {

namespace {

using Numbers = std::vector<double>;

// Rows of a [.., H, C] tensor as absolute or plain numbers.
struct Rows {
    Numbers values;
    Index heads = 0, width = 0;

    Rows() = default;
    Rows(const Numbers& all, const Tensor& t) : values(all), heads(t.shape(2)), width(t.shape(3)) {}
    const double* row(Index row, Index head) const { return values.data() + (row * heads + head) * width; }
};

class Terms {
  public:
    explicit Terms(const RandomAttention& call)
        : call_(call),
          D_(call.inputs.q.shape(3)),
          Dv_(call.o_shape()[3]),
          scale_(std::isnan(call.options.scale) ? 1 / std::sqrt(static_cast<double>(D_)) : call.options.scale),
          q_(call.q.values(), call.inputs.q),
          k_(call.k.values(), call.k.view()),
          v_(values_of_v(), call.v_in_k ? call.inputs.v : call.v.view()),
          d_o_(call.d_o.values(), call.d_o.view()) {
        o_ = make("o", call.d_o.count());
        lse_ = make("lse", o_->empty() ? 0 : call.d_o.count() / Dv_);
        dq_ = make("dq", call.q.count());
        dk_ = make("dk", call.k.count());
        dv_ = make("dv", call.v_in_k ? call.inputs.v.count() : call.v.count());
        dbias_ = make("dbias", call.bias.count());
        dsink_ = make("dsink", call.sink.count());
    }

    std::map<std::string, Numbers> run() {
        for (const SeenRow& row : seen_rows(call_)) add(row);
        return std::move(terms_);
    }

    Array kept_bias() {
        Array bias(DType::f64, call_.score_shape);
        for (Index i = 0; i < bias.count(); ++i) bias.set(i, -INFINITY);
        for (const SeenRow& row : seen_rows(call_)) {
            products(row);
            for (std::size_t x = 0; x < row.keys.size(); ++x) {
                const double given = addend_of(call_, row, row.keys[x]);
                bias.set({row.sequence, row.head, row.query, row.keys[x]}, add_bias(score_[x], given) - score_[x]);
            }
        }
        return bias;
    }

  private:
    Numbers* make(const char* name, Index count) { return &(terms_[name] = Numbers(static_cast<std::size_t>(count))); }

    Numbers values_of_v() const {
        if (!call_.v_in_k) return call_.v.values();
        const Numbers k = call_.k.values();
        Numbers v;
        for (std::size_t i = 0; i < k.size(); ++i)
            if (static_cast<Index>(i) % D_ < Dv_) v.push_back(k[i]);
        return v;
    }

    // Scores before the bias, and sizes of their terms.
    void products(const SeenRow& row) {
        const std::size_t n = row.keys.size();
        score_.assign(n, 0), size_.assign(n, 0);
        for (std::size_t x = 0; x < n; ++x) {
            const double *q = q_.row(row.row, row.head), *k = k_.row(row.key_rows[x], row.key_head);
            for (Index c = 0; c < D_; ++c)
                score_[x] += scale_ * q[c] * k[c], size_[x] += std::abs(scale_ * q[c] * k[c]);
            const double cap = call_.options.softcap;
            if (cap > 0) score_[x] = cap * std::tanh(score_[x] / cap);
        }
    }

    // Of a far bias f32 keeps the sum rounded; the f64 truth has an error of its own where it is not swallowed whole.
    double add_bias(double score, double bias) const {
        return call_.far_bias ? static_cast<double>(static_cast<float>(score + bias)) : score + bias;
    }
    // Of an addend that is the sum of two: what f32 loses when it adds them.
    double parts_of(double addend, const SeenRow& row, Index key) const {
        if (!call_.alibi_slopes.view()) return 0;
        const auto distance = static_cast<double>(std::abs(row.diagonal - key));
        const double alibi = std::abs(call_.alibi_slopes.get(row.head) * distance);
        return call_.far_bias ? 0 : alibi + std::abs(addend);
    }
    double size_of(double bias) const {
        const double size = std::abs(bias);
        return !call_.far_bias || size < 1e5 ? size : size < 1e15 ? 0x1p-29 * size : 0;
    }

    // Scores, sizes of their terms, and the softmax.
    void softmax(const SeenRow& row) {
        products(row);
        const double sink = call_.sink.view() ? call_.sink.get(row.head) : -INFINITY;
        double highest = sink, largest = std::isfinite(sink) ? std::abs(sink) : 0;
        for (std::size_t x = 0; x < row.keys.size(); ++x) {
            const double addend = addend_of(call_, row, row.keys[x]);
            score_[x] = add_bias(score_[x], addend), size_[x] += size_of(addend) + parts_of(addend, row, row.keys[x]);
            highest = std::max(highest, score_[x]);
            largest = std::max(largest, size_[x]);
        }
        // Equal weights, which a far bias makes, have their sums rounded alike again and again.
        const double sums = call_.far_bias ? std::sqrt(static_cast<double>(row.keys.size())) : 0;
        lse_size_ = exponent_ = 1 + sums + largest;
        if (std::isinf(highest)) {  // the sink has all, or there is nothing
            sink_share_ = highest > 0 ? 1 : 0;
            score_.assign(score_.size(), 0);
            return;
        }
        double sum = std::exp(sink - highest);
        for (const double s : score_) sum += std::exp(s - highest);
        lse_size_ += std::abs(highest) + std::abs(std::log(sum));
        exponent_ += size_of(highest) + std::abs(std::log(sum));
        for (double& s : score_) s = std::exp(s - highest) / sum;
        sink_share_ = std::exp(sink - highest) / sum;
    }

    void add(const SeenRow& row) {
        if (row.keys.empty() && !call_.sink.view()) return;
        softmax(row);
        const Index H = q_.heads, Lq = call_.inputs.q.shape(1);
        const Index lse = (row.row / Lq * H + row.head) * Lq + row.row % Lq;
        at(lse_, lse) = lse_size_;
        const Index value_row = (row.row * H + row.head) * Dv_, query_row = (row.row * H + row.head) * D_;
        const double *d_o = d_o_.row(row.row, row.head), *q = q_.row(row.row, row.head);
        const double d_lse = call_.dlse.view() ? std::abs(call_.dlse.get(lse)) : 0;
        double delta = d_lse;
        for (Index c = 0; c < Dv_; ++c) {
            for (std::size_t x = 0; x < row.keys.size(); ++x)
                at(o_, value_row + c) += exponent_ * score_[x] * std::abs(v_.row(row.key_rows[x], row.key_head)[c]);
            if (!row.keys.empty()) delta += std::abs(d_o[c]) * at(o_, value_row + c) / exponent_;
        }
        for (std::size_t x = 0; x < row.keys.size(); ++x) {
            const Index key = row.key_rows[x] * k_.heads + row.key_head;
            const double *v = v_.row(row.key_rows[x], row.key_head), *k = k_.row(row.key_rows[x], row.key_head);
            double dp = 0;
            for (Index c = 0; c < Dv_; ++c) {
                dp += std::abs(d_o[c] * v[c]);
                at(dv_, key * Dv_ + c) += exponent_ * score_[x] * std::abs(d_o[c]);
            }
            const double ds = exponent_ * score_[x] * (dp + delta);
            for (Index c = 0; c < D_; ++c) {
                at(dq_, query_row + c) += std::abs(scale_ * ds * k[c]);
                at(dk_, key * D_ + c) += std::abs(scale_ * ds * q[c]);
            }
            if (call_.bias.view()) at(dbias_, bias_element(row, row.keys[x])) += slope_of(row) * ds;
        }
        const double share = exponent_ * sink_share_;
        if (call_.sink.view()) at(dsink_, row.head) += share * delta;
        if (call_.bias.view() && call_.bias.view().shape(3) == 1 && !row.keys.empty())
            at(dbias_, bias_element(row, 0)) +=
                slope_of(row) * share * (delta - d_lse);  // what keys have of dlse is in their ds
    }

    double slope_of(const SeenRow& row) const {
        return call_.bias_slopes.view() ? std::abs(call_.bias_slopes.get(row.head)) : 1;
    }

    Index bias_element(const SeenRow& row, Index key) const {
        const Tensor& t = call_.bias.view();
        const Index head = row.head * t.shape(1) / q_.heads, n = t.shape(0) == 1 ? 0 : row.sequence;
        return ((n * t.shape(1) + head) * t.shape(2) + (t.shape(2) == 1 ? 0 : row.query)) * t.shape(3) +
               (t.shape(3) == 1 ? 0 : key);
    }

    static double& at(Numbers* numbers, Index i) { return (*numbers)[static_cast<std::size_t>(i)]; }

    const RandomAttention& call_;
    Index D_, Dv_;
    double scale_;
    Rows q_, k_, v_, d_o_;
    std::map<std::string, Numbers> terms_;
    Numbers *o_, *lse_, *dq_, *dk_, *dv_, *dbias_, *dsink_;
    Numbers score_, size_;  // of a row's keys; scores become probabilities
    double exponent_ = 0, lse_size_ = 0, sink_share_ = 0;
};

}  // namespace

std::map<std::string, Numbers> attention_terms(const RandomAttention& call) {
    return Terms(call).run();
}

Array kept_bias(const RandomAttention& call) {
    return call.far_bias ? Terms(call).kept_bias() : Array();
}

}  // namespace softdelta::test
