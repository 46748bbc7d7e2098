// Gradients of the reference's attention against central differences of its forward pass, over random calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engines/reference/reference_calls.h"
#include "support/random_attention.h"

namespace softdelta::test {
namespace {

// An input that may change, and its gradient. Elements that are −∞ stay as they are and have gradient 0.
struct Variable {
    std::string name;
    const Array* input;
    Array gradient;
};

class Case {
  public:
    explicit Case(RandomAttention&& drawn) : call_(std::move(drawn)), o_(DType::f64, call_.o_shape()) {
        lse_ = Array(DType::f64, call_.lse_shape());
        add("dq", call_.q);
        add("dk", call_.k);
        if (!call_.v_in_k) add("dv", call_.v);
        if (call_.bias.view()) add("dbias", call_.bias);
        if (call_.sink.view()) add("dsink", call_.sink);
    }

    const RandomAttention& call() const { return call_; }
    const std::vector<Variable>& variables() const { return variables_; }

    // <o, do> + <lse, dlse>; an lse that is a convention is no function of the inputs.
    double loss() const {
        attention_forward(call_.inputs, {o_.view(), lse_.view()}, call_.options, execution_);
        double sum = 0;
        for (Index i = 0; i < o_.count(); ++i) sum += o_.get(i) * call_.d_o.get(i);
        for (Index i = 0; i < call_.dlse.count(); ++i)
            if (std::isfinite(lse_.get(i))) sum += lse_.get(i) * call_.dlse.get(i);
        return sum;
    }

    void compute_gradients() {
        AttentionGradients g;
        g.d_o = call_.d_o.view();
        g.dlse = call_.dlse.view();
        Array dv_of_view;
        if (call_.v_in_k) {
            const auto shape = call_.inputs.v.shape();
            dv_of_view = Array(DType::f64, Shape(shape.begin(), shape.end()));
            g.dv = dv_of_view.view();
        }
        for (const Variable& x : variables_) {
            const Tensor& t = x.gradient.view();
            (x.name == "dq"      ? g.dq
             : x.name == "dk"    ? g.dk
             : x.name == "dv"    ? g.dv
             : x.name == "dbias" ? g.dbias
                                 : g.dsink) = t;
        }
        attention_backward(call_.inputs, g, call_.options, execution_);
        if (call_.v_in_k) add_gradient_of_view(dv_of_view);
    }

    // Rows whose lse is a convention, and rows that have the sink alone (with o = 0).
    Index rows_without_key() const {
        Index rows = 0;
        for (Index n = 0; n < lse_.view().shape(0); ++n)
            for (Index h = 0; h < lse_.view().shape(1); ++h)
                for (Index i = 0; i < lse_.view().shape(2); ++i) {
                    bool zero = true;
                    for (Index c = 0; c < o_.view().shape(3); ++c) zero = zero && o_.get({n, i, h, c}) == 0;
                    rows += zero;
                }
        return rows;
    }

  private:
    void add(const char* name, const Array& input) {
        const auto shape = input.view().shape();
        variables_.push_back({name, &input, Array(DType::f64, Shape(shape.begin(), shape.end()))});
    }

    // v is the first channels of k: what changes there changes both.
    void add_gradient_of_view(const Array& dv) {
        const Array& dk = variables_[1].gradient;
        const Index D = dk.view().shape(3), Dv = dv.view().shape(3);
        for (Index i = 0; i < dv.count(); ++i) {
            const Index at = i / Dv * D + i % Dv;
            dk.set(at, dk.get(at) + dv.get(i));
        }
    }

    RandomAttention call_;
    Array o_, lse_;
    std::vector<Variable> variables_;
    Execution execution_ = reference_engine();
};

// d/dt f(t) at 0, error O(step⁴).
double central_difference(const std::function<double(double)>& f, double step) {
    return (8 * (f(step) - f(-step)) - (f(2 * step) - f(-2 * step))) / (12 * step);
}

constexpr double step = 2e-3;

TEST(AttentionGradients, EqualCentralDifferencesForEveryElement) {
    constexpr int draws = 1000;
    const std::uint64_t seed = first_seed();
    std::map<std::string, int> drawn;
    for (std::uint64_t n = 0; n < draws; ++n) {
        Case c(draw_attention(seed + n));
        SCOPED_TRACE(c.call().describe());
        for (const std::string& feature : c.call().features) ++drawn[feature];
        c.loss();
        drawn["row without key"] += c.rows_without_key() > 0 && !c.call().sink.view();
        drawn["sink without key"] += c.rows_without_key() > 0 && c.call().sink.view();
        c.compute_gradients();
        for (const Variable& x : c.variables()) {
            double largest = 0, error = 0;
            for (Index i = 0; i < x.input->count(); ++i) {
                const double at = x.input->get(i), gradient = x.gradient.get(i);
                const auto loss_at = [&](double t) {
                    x.input->set(i, at + t);
                    return c.loss();
                };
                const double difference = central_difference(loss_at, step);
                x.input->set(i, at);
                largest = std::max(largest, std::abs(difference));
                error = std::max(error, std::abs(gradient - difference));
                ASSERT_TRUE(std::isfinite(gradient)) << x.name << '[' << i << ']';
            }
            ASSERT_LE(error, 1e-6 * largest + 1e-9) << x.name;
        }
    }
    for (const char* feature : {"grouped heads",
                                "multi-query",
                                "Dv other than D",
                                "packed",
                                "packed with caches",
                                "Lq = 0",
                                "Lk = 0",
                                "cache_seqlens",
                                "strided",
                                "v in k",
                                "scale",
                                "causal top-left",
                                "causal bottom-right",
                                "window left",
                                "window right",
                                "softcap",
                                "mask",
                                "mask shared batch",
                                "mask own batch",
                                "mask shared heads",
                                "mask own heads",
                                "mask heads Hk",
                                "mask shared queries",
                                "mask own queries",
                                "mask shared keys",
                                "mask own keys",
                                "bias",
                                "bias shared batch",
                                "bias own batch",
                                "bias shared heads",
                                "bias own heads",
                                "bias heads Hk",
                                "bias shared queries",
                                "bias own queries",
                                "bias shared keys",
                                "bias own keys",
                                "mask and bias",
                                "bias of -inf",
                                "top_w",
                                "alibi_slopes",
                                "bias_slopes",
                                "sink",
                                "dlse",
                                "row without key",
                                "sink without key"})
        EXPECT_GE(drawn[feature], 4) << feature;
}

// Shapes beyond one block of rows, one tile of keys and one wave: one random direction through each input.
TEST(AttentionGradients, EqualDirectionalDifferencesForLongSequences) {
    constexpr int draws = 12;
    const AttentionRanges ranges{2, 500, 300, 2, 3, 9, 65};
    const std::uint64_t seed = first_seed();
    for (std::uint64_t n = 0; n < draws; ++n) {
        Case c(draw_attention(seed + n, ranges));
        SCOPED_TRACE(c.call().describe());
        c.compute_gradients();
        Random random(seed + n);
        for (const Variable& x : c.variables()) {
            const std::vector<double> at = x.input->values();
            Array direction(DType::f64, {x.input->count()});
            fill_normal(direction, random);
            double slope = 0, size = 0;
            for (Index i = 0; i < x.input->count(); ++i) {
                slope += x.gradient.get(i) * direction.get(i);
                size += x.gradient.get(i) * x.gradient.get(i);
            }
            const auto loss_at = [&](double t) {
                for (Index i = 0; i < x.input->count(); ++i)
                    x.input->set(i, at[static_cast<std::size_t>(i)] + t * direction.get(i));
                return c.loss();
            };
            const double difference = central_difference(loss_at, 1e-3);
            loss_at(0);
            EXPECT_NEAR(slope, difference, 1e-6 * std::sqrt(size) + 1e-9) << x.name;
        }
    }
}

}  // namespace
}  // namespace softdelta::test
