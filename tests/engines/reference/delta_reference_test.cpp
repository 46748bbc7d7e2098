// The reference's delta rules against the table of the contract, written out in the plainest way.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "engines/reference/reference_calls.h"
#include "support/random_delta.h"

namespace softdelta::test {
namespace {

using Row = std::vector<double>;
using Matrix = std::vector<Row>;

// ---------------------------------------------------------------------------------------------------------------------
// The table, one token and value head at a time, from the operands as they are given.

Row row_of(const Array& t, Index b, Index at, Index head) {
    Row row;
    for (Index i = 0; i < t.view().shape(3); ++i) row.push_back(t.get({b, at, head, i}));
    return row;
}

double dot(const Row& a, const Row& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
}

Row key_of(const RandomDelta& c, const Array& t, Index b, Index at, Index head) {
    Row x = row_of(t, b, at, head);
    const double norm = std::sqrt(dot(x, x) + 1e-6);
    if (c.options.use_qk_l2norm_in_kernel)
        for (double& a : x) a /= norm;
    return x;
}

double beta_of(const RandomDelta& c, Index b, Index at, Index head) {
    if (!c.beta.view()) return 1;
    const double x = c.beta.get({b, at, head});
    if (!c.options.use_beta_sigmoid_in_kernel) return x;
    return (c.options.allow_neg_eigval ? 2 : 1) / (1 + std::exp(-x));
}

double gate_of(const RandomDelta& c, Index b, Index at, Index head, Index i) {
    if (c.g_gamma.view()) return c.g_gamma.get(head);
    if (!c.g.view()) return 0;
    const bool channel = c.g.view().rank() == 4;
    const double x = channel ? c.g.get({b, at, head, i}) : c.g.get({b, at, head});
    if (!c.options.use_gate_in_kernel) return x;
    const double A = std::exp(c.A_log.view() ? c.A_log.get(head) : 0);
    const Index bias = channel ? head * c.q.view().shape(3) + i : head;
    const double y = x + (c.dt_bias.view() ? c.dt_bias.get(bias) : 0);
    if (std::isnan(c.options.lower_bound)) return -A * std::log1p(std::exp(y));
    return c.options.lower_bound / (1 + std::exp(-A * y));
}

Row erased_part(const Matrix& S, const Row& p) {  // Sᵀp
    Row r(S[0].size());
    for (std::size_t i = 0; i < S.size(); ++i)
        for (std::size_t j = 0; j < r.size(); ++j) r[j] += S[i][j] * p[i];
    return r;
}

void decay(Matrix& S, const Row& g) {
    for (std::size_t i = 0; i < S.size(); ++i)
        for (double& s : S[i]) s *= std::exp(g[i]);
}

void add_outer(Matrix& S, const Row& k, const Row& d) {
    for (std::size_t i = 0; i < S.size(); ++i)
        for (std::size_t j = 0; j < d.size(); ++j) S[i][j] += k[i] * d[j];
}

Row correction(const Matrix& S, const Row& p, const Row& v, double beta) {  // β (v − Sᵀp)
    Row d = erased_part(S, p);
    for (std::size_t j = 0; j < d.size(); ++j) d[j] = beta * (v[j] - d[j]);
    return d;
}

Index key_head_of(const RandomDelta& c, Index head) {
    const Index heads = c.q.view().shape(2), group = c.v.view().shape(2) / heads;
    return c.options.head_order == HeadOrder::tiled ? head % heads : head / group;
}

// Step `step` of a token; gives what it writes.
Row take_in(const RandomDelta& c, Matrix& S, Index b, Index token, Index step, Index head) {
    const Index at = token * c.options.steps + step;
    const Index key_head = key_head_of(c, head);
    const Row k = key_of(c, c.k, b, at, key_head), v = row_of(c.v, b, at, head);
    const double beta = beta_of(c, b, at, head);
    Row g;
    for (std::size_t i = 0; i < S.size(); ++i)
        g.push_back(step > 0 ? 0 : gate_of(c, b, token, head, static_cast<Index>(i)));
    switch (c.options.rule) {
        case Rule::delta_rule:
            break;
        case Rule::gated_delta_rule:
        case Rule::kda:
        case Rule::simple_gla:
        case Rule::gla:
        case Rule::gdn2:
        case Rule::gated_delta_product:
            decay(S, g);
            break;
        case Rule::comba:
        case Rule::dplr: {
            const Row d = correction(S, key_of(c, c.p, b, at, key_head), v, beta);
            decay(S, g);
            add_outer(S, k, d);
            return d;
        }
    }
    if (c.options.rule == Rule::simple_gla || c.options.rule == Rule::gla) {
        add_outer(S, k, v);
        return v;
    }
    const Row& p = c.options.rule == Rule::gdn2 ? key_of(c, c.p, b, at, key_head) : k;
    const Row d = correction(S, p, v, beta);
    add_outer(S, k, d);
    return d;
}

Shape state_index(const RandomDelta& c, Shape leading, Index i, Index j) {
    leading.push_back(c.options.state_v_first ? j : i);
    leading.push_back(c.options.state_v_first ? i : j);
    return leading;
}

template <class Visit>
void each_entry(const RandomDelta& c, Matrix& S, const Shape& leading, Visit&& visit) {
    for (std::size_t i = 0; i < S.size(); ++i)
        for (std::size_t j = 0; j < S[i].size(); ++j)
            visit(S[i][j], state_index(c, leading, static_cast<Index>(i), static_cast<Index>(j)));
}

// o, final_state and states of the whole call; and u, if it is wanted.
Results by_the_table(const RandomDelta& c, const Array* u = nullptr) {
    Results results;
    Array& o = results["o"] = Array(DType::f64, c.o_shape());
    Array& final_state = results["final_state"] = Array(DType::f64, c.state_shape());
    Array& states = results["states"] = Array(DType::f64, c.states_shape());
    const Index HV = c.v.view().shape(2), K = c.q.view().shape(3), V = c.v.view().shape(3);
    const double scale = std::isnan(c.options.scale) ? 1 / std::sqrt(static_cast<double>(K)) : c.options.scale;
    Index chunk = 0;
    for (Index n = 0; n < c.sequences; ++n) {
        const Index b = c.batch(n), interval = c.options.state_interval;
        if (!c.cu_seqlens.view()) chunk = 0;
        for (Index head = 0; head < HV; ++head) {
            Matrix S(static_cast<std::size_t>(K), Row(static_cast<std::size_t>(V)));
            if (c.initial_state.view())
                each_entry(c, S, {n, head}, [&](double& s, const Shape& at) { s = c.initial_state.get(at); });
            for (Index t = 0; t < c.length(n); ++t) {
                const Index at = c.begin(n) + t;
                if (t % interval == 0)
                    each_entry(c, S, {b, chunk + t / interval, head},
                               [&](double& s, const Shape& index) { states.set(index, s); });
                for (Index step = 0; step < c.options.steps; ++step) {
                    const Row written = take_in(c, S, b, at, step, head);
                    for (Index j = 0; u != nullptr && j < V; ++j)
                        u->set({b, at * c.options.steps + step, head, j}, written[static_cast<std::size_t>(j)]);
                }
                const Row row = erased_part(S, key_of(c, c.q, b, at, key_head_of(c, head)));
                for (Index j = 0; j < V; ++j) o.set({b, at, head, j}, scale * row[static_cast<std::size_t>(j)]);
            }
            each_entry(c, S, {n, head}, [&](double& s, const Shape& at) { final_state.set(at, s); });
        }
        chunk += (c.length(n) + interval - 1) / interval;
    }
    return results;
}

// ---------------------------------------------------------------------------------------------------------------------

void expect_close(const Results& actual, const Results& expected, double tolerance) {
    for (const auto& [name, e] : expected) {
        const Array& a = actual.at(name);
        double error = 0, size = 0;
        for (Index i = 0; i < e.count(); ++i) {
            ASSERT_TRUE(std::isfinite(a.get(i))) << name << '[' << i << ']';
            error += std::pow(a.get(i) - e.get(i), 2);
            size += std::pow(e.get(i), 2);
        }
        EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(size)) << name;
    }
}

TEST(DeltaReference, FollowsTheTable) {
    std::map<std::string, int> drawn;
    for (std::uint64_t n = 0; n < 200; ++n) {
        const RandomDelta call = draw_any(first_seed() + n, {DType::f64}, true);
        SCOPED_TRACE(call.describe());
        for (const std::string& feature : call.features) ++drawn[feature];
        Results expected, written;
        const Array& u = expected["u"] = Array(DType::f64, call.u_shape());
        expect_close(forward_results(call, reference_engine()), by_the_table(call, &u), 1e-12);
        written["u"] = Array(DType::f64, call.u_shape());
        delta_forward(call.inputs(), {.u = written["u"].view()}, call.options, reference_engine());
        expect_close(written, expected, 1e-12);
    }
    for (const char* feature : {"delta_rule", "gated_delta_rule", "kda", "comba", "simple_gla", "gla", "gdn2",
                                "gated_delta_product", "dplr", "steps", "grouped heads", "tiled heads", "packed",
                                "empty sequence", "T = 0", "T = 1", "wiping gate", "beta = 0", "zero gate"})
        EXPECT_GE(drawn[feature], 3) << feature;
}

void fill(const Array& a, double x) {
    for (Index i = 0; i < a.count(); ++i) a.set(i, x);
}

TEST(DeltaReference, TakesZeroOperands) {
    for (std::uint64_t n = 0; n < 30; ++n)
        for (const DeltaOperand& operand : delta_operands()) {
            const RandomDelta call = draw_any(first_seed() + n);
            SCOPED_TRACE(call.describe() + ", zero " + operand.name);
            fill(call.*operand.array, 0);
            expect_close(forward_results(call, reference_engine()), by_the_table(call), 1e-12);
        }
}

}  // namespace
}  // namespace softdelta::test
