#include "engines/reference/delta_rule/fold.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "engines/reference/sigmoid.h"

namespace softdelta::reference {

using core::DeltaGradients;
using core::DeltaInputs;
using core::DeltaOptions;
using core::RawBeta;
using core::RawGate;
using core::Tensor;

namespace {

// e^g. 0·e^g is 0, however large g: e^700 times any other number of f32 is beyond f32.
double decay_of(double g) {
    return std::exp(std::min(g, 700.0));
}

// A derivative that has vanished beats the infinite argument it belongs to.
double product(double derivative, double x) {
    return derivative == 0 ? 0 : derivative * x;
}

double l2norm_factor(const double* x, Index n) {
    return 1 / std::sqrt(std::inner_product(x, x + n, x, 0.0) + 1e-6);
}

double load_bias(const Tensor& t, Index i) {
    return t ? load(t, t.offset({i})) : 0;
}

// How one channel of a value head's gate depends on its input x.
struct Gate {
    RawGate raw;
    double rate;  // e^A_log
    double bias;
    double lower_bound;

    // The natural logarithm of the decay.
    double value(double x) const {
        switch (raw) {
            case RawGate::softplus:
                return -rate * softplus(x + bias);
            case RawGate::lower_bound:
                return lower_bound * sigmoid(rate * (x + bias));
            case RawGate::none:
                break;
        }
        return x;
    }

    // From dg to dx; adds the part of dA_log.
    double adjoint(double x, double dg, double& dA_log) const {
        if (raw == RawGate::none) return dg;
        if (raw == RawGate::softplus) {
            dA_log += product(dg, value(x));
            return -rate * sigmoid(x + bias) * dg;
        }
        const double y = rate * (x + bias);
        const double dx = dg * lower_bound * sigmoid(y) * sigmoid(-y) * rate;
        dA_log += product(dx, x + bias);
        return dx;
    }
};

// The gate of channel i of a value head.
Gate gate_of(const DeltaInputs& in, const DeltaOptions& options, Index head, Index i) {
    const auto [A_log, bias] = core::gate_parameters(in);
    return {options.raw_gate, std::exp(load_bias(A_log, head)), load_bias(bias, head * gate_channels(in, options) + i),
            options.lower_bound};
}

// The offset of channel i of the gate of a token, in g or dg.
Index gate_offset(const Tensor& g, Index batch, Index token, Index head, Index i) {
    return g.rank == 4 ? g.offset({batch, token, head, i}) : g.offset({batch, token, head});
}

// decay [count, K] = e^g
void fold_gate(const DeltaInputs& in, const DeltaOptions& options, const Segment& s, Index head, double* decay) {
    const Index K = in.q.shape[3], channels = gate_channels(in, options);
    std::fill_n(decay, s.count * K, 1.0);
    if (!in.g) {
        const double gamma = in.g_gamma ? decay_of(load(in.g_gamma, in.g_gamma.offset({head}))) : 1.0;
        for (Index t = 0; t < s.count; ++t)
            if (core::token_begun(s.begin + t, options.steps) >= 0) std::fill_n(decay + t * K, K, gamma);
        return;
    }
    for (Index i = 0; i < channels; ++i) {
        const Gate gate = gate_of(in, options, head, i);
        for (Index t = 0; t < s.count; ++t) {
            const Index token = core::token_begun(s.begin + t, options.steps);
            if (token < 0) continue;
            const double x = load(in.g, gate_offset(in.g, s.batch, token, head, i));
            std::fill_n(decay + t * K + i, channels == 1 ? K : 1, decay_of(gate.value(x)));
        }
    }
}

// From dg [count, K], per row of the state.
void unfold_gate(const DeltaInputs& in, const DeltaOptions& options, const Segment& s, Index head, const double* dg,
                 const DeltaGradients& grad, GateSums& sums) {
    const Index K = in.q.shape[3], channels = gate_channels(in, options);
    if (!in.g) {
        for (Index t = 0; t < s.count; ++t)
            if (core::token_begun(s.begin + t, options.steps) >= 0)
                sums.g_gamma = std::accumulate(dg + t * K, dg + (t + 1) * K, sums.g_gamma);
        return;
    }
    for (Index i = 0; i < channels; ++i) {
        const Gate gate = gate_of(in, options, head, i);
        double& dbias = sums.bias[static_cast<std::size_t>(i)];
        for (Index t = 0; t < s.count; ++t) {
            const Index token = core::token_begun(s.begin + t, options.steps);
            if (token < 0) continue;
            const double* rows = dg + t * K + i;
            const double dgate = std::accumulate(rows, rows + (channels == 1 ? K : 1), 0.0);
            const double x = load(in.g, gate_offset(in.g, s.batch, token, head, i));
            const double dx = gate.adjoint(x, dgate, sums.A_log);
            dbias += dx;
            if (grad.dg) store(grad.dg, gate_offset(grad.dg, s.batch, token, head, i), dx);
        }
    }
}

double fold_beta(double x, RawBeta raw) {
    if (raw == RawBeta::none) return x;
    return (raw == RawBeta::doubled_logits ? 2 : 1) * sigmoid(x);
}

// From dβ to dx; σ(−x) where 1 − σ(x) would lose its digits.
double unfold_beta(double x, double dbeta, RawBeta raw) {
    return raw == RawBeta::none ? dbeta : dbeta * fold_beta(x, raw) * sigmoid(-x);
}

// A row of q, k or p: normalised if asked for, times factor.
void fold_key(const Tensor& x, const DeltaOptions& options, Index offset, double factor, double* row) {
    const Index K = x.shape[3];
    load_row(x, offset, 3, K, row);
    if (options.l2norm) factor *= l2norm_factor(row, K);
    std::transform(row, row + K, row, [factor](double y) { return y * factor; });
}

// From the gradient of such a row, in place, to dx = r (dy − y Σ dy∘y) with y = x r.
void unfold_key(const Tensor& x, const DeltaOptions& options, Index offset, double factor, double* d) {
    const Index K = x.shape[3];
    std::transform(d, d + K, d, [factor](double y) { return y * factor; });
    if (!options.l2norm) return;
    std::vector<double> y(static_cast<std::size_t>(K));
    load_row(x, offset, 3, K, y.data());
    const double r = l2norm_factor(y.data(), K);
    for (double& a : y) a *= r;
    const double along = std::inner_product(y.begin(), y.end(), d, 0.0);
    std::transform(d, d + K, y.begin(), d, [=](double dy, double a) { return r * (dy - a * along); });
}

}  // namespace

KeyRows::KeyRows(Index tokens, Index K) : q(static_cast<std::size_t>(tokens * K)), k(q), p(q) {}

void KeyRows::clear() {
    for (auto* rows : {&q, &k, &p}) std::fill(rows->begin(), rows->end(), 0.0);
}

ValueRows::ValueRows(Index tokens, Index K, Index V)
    : gate(static_cast<std::size_t>(tokens * K)),
      beta(static_cast<std::size_t>(tokens)),
      v(static_cast<std::size_t>(tokens * columns_of(V))) {}

void ValueRows::clear() {
    for (auto* rows : {&gate, &beta, &v}) std::fill(rows->begin(), rows->end(), 0.0);
}

Index gate_channels(const DeltaInputs& in, const DeltaOptions& options) {
    return options.rule.gate == core::Gate::channel ? in.q.shape[3] : 1;
}

Token token_at(const DeltaInputs& in, const KeyRows& keys, const ValueRows& values, Index t, Index tile) {
    const Index row = t * in.q.shape[3], v_row = t * columns_of(in.v.shape[3]);
    return {keys.q.data() + row,
            keys.k.data() + row,
            (in.p ? keys.p : keys.k).data() + row,
            values.gate.data() + row,
            values.v.data() + v_row + tile * tile_columns,
            values.beta[static_cast<std::size_t>(t)]};
}

TokenGradients gradients_at(const DeltaInputs& in, KeyRows& keys, ValueRows& values, Index t, Index tile) {
    const Index row = t * in.q.shape[3], v_row = t * columns_of(in.v.shape[3]);
    return {keys.q.data() + row,
            keys.k.data() + row,
            keys.p.data() + row,
            values.gate.data() + row,
            values.v.data() + v_row + tile * tile_columns,
            values.beta.data() + t};
}

void load_values(const Tensor& t, const Segment& s, Index head, std::vector<double>& rows, Index steps) {
    const Index V = t.shape[3], columns = columns_of(V);
    for (Index i = 0; i < s.count; ++i) {
        const Index at = core::token_ended(s.begin + i, steps);
        double* row = rows.data() + i * columns;
        if (at >= 0)
            load_row(t, t.offset({s.batch, at, head}), 3, V, row);
        else
            std::fill_n(row, V, 0.0);
    }
}

void store_values(const Tensor& t, const Segment& s, Index head, const std::vector<double>& rows, Index steps) {
    const Index V = t.shape[3], columns = columns_of(V);
    for (Index i = 0; i < s.count; ++i)
        if (const Index at = core::token_ended(s.begin + i, steps); at >= 0)
            store_row(t, t.offset({s.batch, at, head}), 3, V, rows.data() + i * columns);
}

void fold_keys(const DeltaInputs& in, const DeltaOptions& options, const Segment& s, Index head, KeyRows& rows) {
    const Index K = in.q.shape[3];
    const auto fold = [&](const Tensor& x, double factor, std::vector<double>& out, Index steps = 1) {
        for (Index t = 0; t < s.count; ++t) {
            const Index at = core::token_ended(s.begin + t, steps);
            if (at >= 0)
                fold_key(x, options, x.offset({s.batch, at, head}), factor, out.data() + t * K);
            else
                std::fill_n(out.data() + t * K, K, 0.0);
        }
    };
    fold(in.q, options.scale, rows.q, options.steps);
    fold(in.k, 1, rows.k);
    if (in.p) fold(in.p, 1, rows.p);
}

void unfold_keys(const DeltaInputs& in, const DeltaOptions& options, const Segment& s, Index head, KeyRows& d,
                 const DeltaGradients& grad) {
    const Index K = in.q.shape[3];
    const auto unfold = [&](const Tensor& x, const Tensor& dx, double factor, std::vector<double>& rows,
                            Index steps = 1) {
        for (Index t = 0; dx && t < s.count; ++t) {
            const Index at = core::token_ended(s.begin + t, steps);
            if (at < 0) continue;
            double* row = rows.data() + t * K;
            unfold_key(x, options, x.offset({s.batch, at, head}), factor, row);
            store_row(dx, dx.offset({s.batch, at, head}), 3, K, row);
        }
    };
    if (!in.p) std::transform(d.k.begin(), d.k.end(), d.p.begin(), d.k.begin(), std::plus<>{});
    unfold(in.q, grad.dq, options.scale, d.q, options.steps);
    unfold(in.k, grad.dk, 1, d.k);
    unfold(in.p, grad.dp, 1, d.p);
}

void fold_values(const DeltaInputs& in, const DeltaOptions& options, const Segment& s, Index head, ValueRows& rows) {
    fold_gate(in, options, s, head, rows.gate.data());
    load_values(in.v, s, head, rows.v);
    for (Index t = 0; t < s.count; ++t) {
        const double x = in.beta ? load(in.beta, in.beta.offset({s.batch, s.begin + t, head})) : 1;
        rows.beta[static_cast<std::size_t>(t)] = fold_beta(x, options.raw_beta);
    }
}

void unfold_values(const DeltaInputs& in, const DeltaOptions& options, const Segment& s, Index head, const ValueRows& d,
                   const DeltaGradients& grad, GateSums& sums) {
    unfold_gate(in, options, s, head, d.gate.data(), grad, sums);
    if (grad.dv) store_values(grad.dv, s, head, d.v);
    for (Index t = 0; grad.dbeta && t < s.count; ++t) {
        const double x = load(in.beta, in.beta.offset({s.batch, s.begin + t, head}));
        const double dx = unfold_beta(x, d.beta[static_cast<std::size_t>(t)], options.raw_beta);
        store(grad.dbeta, grad.dbeta.offset({s.batch, s.begin + t, head}), dx);
    }
}

}  // namespace softdelta::reference
