#include "diagnose/replay/delta_operands.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/rule_facts.h"
#include "judge/sigmoid.h"

namespace softdelta::diagnose {

namespace {

using M = Mistake;
using judge::sigmoid;
using judge::softplus;

}  // namespace

double inverse_norm(const Eigen::Ref<const Eigen::RowVectorXd>& x) {
    return 1 / std::sqrt(x.squaredNorm() + 1e-6);
}

namespace {

// The same elements of a token's last step in both.
template <class Copy>
void for_each_last_step(const Dense& tokens, Index steps, const Copy& copy) {
    const Index rows = tokens.size(0) * tokens.size(1), size = tokens.count() / std::max<Index>(rows, 1);
    for (Index row = 0; row < rows; ++row)
        for (Index i = 0; i < size; ++i) copy(row * size + i, (row * steps + steps - 1) * size + i);
}

std::vector<std::int64_t> with_rows(const Dense& x, Index rows) {
    std::vector<std::int64_t> shape = x.shape();
    shape[1] = rows;
    return shape;
}

}  // namespace

Dense in_last_steps(const Dense& tokens, Index steps) {
    if (!tokens || steps == 1) return tokens;
    Dense rows(with_rows(tokens, tokens.size(1) * steps));
    for_each_last_step(tokens, steps, [&](Index token, Index row) { rows[row] = tokens[token]; });
    return rows;
}

Dense of_last_steps(const Dense& rows, Index steps) {
    if (steps == 1) return rows;
    Dense tokens(with_rows(rows, rows.size(1) / steps));
    for_each_last_step(tokens, steps, [&](Index token, Index row) { tokens[token] = rows[row]; });
    return tokens;
}

DeltaInputs64::DeltaInputs64(const io::Call& c)
    : call(c),
      rule(*core::find_rule(c.op)),
      steps(c.delta_options.steps),
      q(in_last_steps(Dense(c.delta.q), steps)),
      k(c.delta.k),
      p(c.delta.p),
      v(c.delta.v),
      g(c.delta.g),
      g_gamma(c.delta.g_gamma),
      beta(c.delta.beta),
      initial_state(c.delta.initial_state),
      A_log(c.delta.A_log),
      gate_bias(c.gate_bias()),
      d_o(in_last_steps(Dense(c.d_o), steps)),
      dfinal_state(c.dfinal_state) {
    const double given = c.delta_options.scale;
    scale = std::isnan(given) ? 1 / std::sqrt(static_cast<double>(q.size(3))) : given;
    scale_of_value_size = std::isnan(given) ? 1 / std::sqrt(static_cast<double>(v.size(3))) : given;
    const io::Bounds& bounds = c.packing.steps;
    const bool packed = !bounds.empty();
    sequences_ = packed ? static_cast<Index>(bounds.size()) - 1 : q.size(0);
    for (Index n = 0; n < sequences_; ++n) {
        const auto i = static_cast<std::size_t>(n);
        const Index begin = packed ? bounds[i] : 0, end = packed ? bounds[i + 1] : q.size(1);
        for (Index t = begin; t < end; t += c.chunk_size)
            chunks_.push_back(
                {n, packed ? 0 : n, t, std::min(c.chunk_size, end - t), t == begin, t + c.chunk_size >= end});
    }
}

Index DeltaInputs64::key_head(Index hv, const Mistakes& mistakes) const {
    const bool tiled = (call.delta_options.head_order == HeadOrder::tiled) != mistakes.has(M::value_head_modulo);
    Index h = tiled ? hv % q.size(2) : hv / (value_heads() / q.size(2));
    for (const Point& point : mistakes.points())
        if (point.place == "key head") h = other_head(point.change, h, q.size(2));
    return h;
}

Matrix DeltaInputs64::state(const Dense& t, Index n, Index hv) const {
    if (!t) return Matrix::Zero(q.size(3), v.size(3));
    return call.delta_options.state_v_first ? Matrix(t.block(n, hv).transpose()) : Matrix(t.block(n, hv));
}

namespace {

// The row that row i of a chunk is read from: its own, if the other is not of its sequence. Chunks have two rows or
// more before the last, which one row after reaches.
Index row_of(const Place& at, Index i, Index offset) {
    const Index row = at.begin + i + offset, first = at.begin + (at.first ? 0 : offset);
    return row < std::min(first, at.begin) || row >= at.begin + at.count + (at.last ? 0 : 1) ? at.begin + i : row;
}

Matrix rows_of(const Dense& t, const Place& at, Index h, Index offset) {
    if (offset == 0) return t.rows(at.batch, at.begin, at.count, h);
    Matrix rows(at.count, t.size(3));
    for (Index i = 0; i < at.count; ++i) rows.row(i) = t.rows(at.batch, row_of(at, i, offset), 1, h);
    return rows;
}

}  // namespace

Matrix DeltaInputs64::key_rows(const Dense& t, const Place& at, Index h, bool norm, Index offset) const {
    Matrix rows = rows_of(t, at, h, offset);
    if (norm)
        for (Index i = 0; i < rows.rows(); ++i) rows.row(i) *= inverse_norm(rows.row(i));
    return rows;
}

GateValue DeltaInputs64::gate(Index b, Index t, Index hv, Index channel, const Mistakes& mistakes) const {
    if (!is_gated(t)) return {};
    if (g_gamma) return {g_gamma[hv]};
    if (!g) return {};
    const double given = g.rows(b, t / steps, 1, hv)(0, channel);
    if (!call.delta_options.use_gate_in_kernel) return {given};
    const bool shifted = gate_bias && !mistakes.has(M::gate_bias_ignored);
    const double x = given + (shifted ? gate_bias[hv * channels() + channel] : 0);
    const double rate = !A_log ? 1 : mistakes.has(M::A_log_without_exp) ? A_log[hv] : std::exp(A_log[hv]);
    const double bound = call.delta_options.lower_bound;
    if (std::isnan(bound)) return {-rate * softplus(x), -rate * sigmoid(x), -rate * softplus(x)};
    const double slope = bound * sigmoid(rate * x) * sigmoid(-rate * x) * rate;
    return {bound * sigmoid(rate * x), slope, slope * x};
}

double DeltaInputs64::beta_of(Index b, Index t, Index hv, const Mistakes& mistakes) const {
    if (!beta) return 1;
    const double x = beta.rows(b, t, 1, hv)(0, 0);
    if (!call.delta_options.use_beta_sigmoid_in_kernel) return x;
    const bool doubled = call.delta_options.allow_neg_eigval && !mistakes.has(M::beta_not_doubled);
    return (doubled ? 2 : 1) * sigmoid(x);
}

double DeltaInputs64::beta_slope(Index b, Index t, Index hv, const Mistakes& mistakes) const {
    if (!call.delta_options.use_beta_sigmoid_in_kernel || mistakes.has(M::beta_logits_without_slope)) return 1;
    return beta_of(b, t, hv, mistakes) * sigmoid(-beta.rows(b, t, 1, hv)(0, 0));
}

void DeltaInputs64::fill_gates(const Place& at, Index hv, const Mistakes& mistakes, Changer& changer,
                               DeltaOperands& out) const {
    constexpr double least = -750;  // e^-750 is 0
    const double log_of_base = mistakes.has(M::gate_exp2)       ? std::numbers::ln2
                               : mistakes.has(M::gate_over_ln2) ? 1 / std::numbers::ln2
                                                                : 1;
    const bool previous = rule.erase == core::Erase::from_previous_state && !mistakes.has(M::erase_after_decay);
    Matrix gates(at.count, channels());
    for (Index i = 0; i < at.count; ++i)
        for (Index c = 0; c < channels(); ++c)
            gates(i, c) = log_of_base *
                          std::max(gate(at.batch, row_of(at, i, changer.row_offset("g")), hv, c, mistakes).g, least);
    changer.value("g", gates, nullptr, true);
    out.G = out.E = Matrix::Zero(at.count, channels());
    for (Index i = 0; i < at.count; ++i) {
        if (i > 0) out.G.row(i) = out.G.row(i - 1);
        out.E.row(i) = out.G.row(i);
        out.G.row(i) += gates.row(i);
        if (!previous) out.E.row(i) = out.G.row(i);
    }
    out.G = changer.exponents("G", out.G);
    out.E = changer.exponents("E", out.E);
}

DeltaOperands DeltaInputs64::operands(const Place& at, Index hv, const Mistakes& mistakes, Changer& changer) const {
    const Index h = key_head(hv, mistakes);
    DeltaOperands out;
    const bool swapped = changer.has("q", Change::swapped);
    const auto norm = [&](const char* place) {
        return changer.has(place, Change::always) ||
               (call.delta_options.use_qk_l2norm_in_kernel && !changer.has(place, Change::missing));
    };
    out.q = key_rows(swapped ? k : q, at, h, norm("norm of q") && !mistakes.has(M::q_without_norm),
                     changer.row_offset("q"));
    out.k = key_rows(swapped ? q : k, at, h, norm("norm of k"), changer.row_offset("k"));
    out.p = p ? key_rows(p, at, h, call.delta_options.use_qk_l2norm_in_kernel, changer.row_offset("p")) : out.k;
    out.v = rows_of(v, at, hv, changer.row_offset("v"));
    out.d_o = Matrix::Zero(out.v.rows(), out.v.cols());
    if (d_o) out.d_o = d_o.rows(at.batch, at.begin, at.count, hv);
    out.beta.resize(at.count);
    for (Index i = 0; i < at.count; ++i)
        out.beta[i] = beta_of(at.batch, row_of(at, i, changer.row_offset("β")), hv, mistakes);
    const Vector beta_of_rows = out.beta;
    changer.value("β", out.beta, &beta_of_rows, true);
    changer.value("q", out.q, &out.beta, true);
    changer.value("k", out.k, &out.beta, true);
    if (p)
        changer.value("p", out.p, &out.beta, true);
    else
        changer.value("k in L and w", out.p = out.k, &out.beta);
    changer.value("k in score", out.k, &out.beta);
    changer.value("v", out.v, &out.beta, true);
    fill_gates(at, hv, mistakes, changer, out);
    return out;
}

}  // namespace softdelta::diagnose
