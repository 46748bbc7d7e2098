#include "diagnose/replay/delta_results.h"

namespace softdelta::diagnose {

namespace {

using M = Mistake;

}  // namespace

void DeltaResults::set_output(const Place& at, Index hv, const Matrix& o) {
    View to = results_.at("o").rows(at.batch, at.begin, at.count, hv);
    to = o;
    constexpr Index tile = 16;
    if (has(M::tail_rows_lost)) to.bottomRows(at.count % tile).setZero();
}

void DeltaResults::set_state(const char* name, Index n, Index hv, const Matrix& S) {
    const auto found = results_.find(name);
    if (found == results_.end()) return;
    const bool transposed = in_.call.delta_options.state_v_first != has(M::final_state_transposed);
    const Matrix written = transposed ? Matrix(S.transpose()) : S;
    View to = found->second.block(n, hv);
    to = written.reshaped<Eigen::RowMajor>(to.rows(), to.cols());
}

void DeltaResults::add_gradients(const Place& at, Index hv, const DeltaBackward& chunk) {
    const auto add = [&](const char* name, const Matrix& d) {
        const std::string place = std::string("sum over heads of ") + name;
        const bool in_turn = mistakes_.has(Point{place, Change::modulo});
        const Index h = in_turn ? hv % in_.q.size(2) : in_.key_head(hv, mistakes_);
        View to = results_.at(name).rows(at.batch, at.begin, at.count, h);
        if (has(M::last_value_head_of_group) || mistakes_.has(Point{place, Change::last_only})) to.setZero();
        const bool first = hv == 0 || in_.key_head(hv - 1, mistakes_) != h;
        if (first || !mistakes_.has(Point{place, Change::first_only})) to += d;
    };
    add("dq", chunk.dq);
    add("dk", in_.p || has(M::dk_without_p_path) ? chunk.dk : Matrix(chunk.dk + chunk.dp));
    if (in_.p) add("dp", chunk.dp);
    results_.at("dv").rows(at.batch, at.begin, at.count, hv) = chunk.dv;
    if (in_.beta) {
        View dbeta = results_.at("dbeta").rows(at.batch, at.begin, at.count, hv);
        for (Index i = 0; i < at.count; ++i)
            dbeta(i, 0) = chunk.dbeta[i] * in_.beta_slope(at.batch, at.begin + i, hv, mistakes_);
    }
    if (in_.has_gate()) add_gate_gradients(at, hv, chunk);
}

// Of a rule that erases from the previous state, the gate of a row does not reach its own p.
void DeltaResults::add_gate_gradients(const Place& at, Index hv, const DeltaBackward& chunk) {
    const bool through = at.last ? has(M::dg_through_sequences) : has(M::dg_through_chunks);
    if (running_head_ != hv || !through) running_ = Eigen::RowVectorXd::Zero(in_.channels());
    running_head_ = hv;
    const bool previous = in_.rule.erase == core::Erase::from_previous_state && !has(M::dg_erase_inclusive);
    for (Index row = at.count; row-- > 0;) {
        const Index i = has(M::dg_forward_sum) ? at.count - 1 - row : row;
        const Eigen::RowVectorXd later = running_;
        if (mistakes_.has(Point{"sum of dg", Change::unsummed}) ||
            (mistakes_.has(Point{"sum of dg", Change::summed_by_tile}) && (i + 1) % 16 == 0))
            running_.setZero();
        running_ += chunk.dG.row(i) + chunk.dE.row(i);
        for (Index c = 0; c < in_.channels(); ++c) {
            const double inclusive = running_[c] - (previous ? chunk.dE(i, c) : 0);
            add_gate_gradient(at.batch, at.begin + i, hv, c, has(M::dg_exclusive) ? later[c] : inclusive);
        }
    }
}

void DeltaResults::add_gate_gradient(Index b, Index t, Index hv, Index channel, double dg) {
    if (!in_.is_gated(t)) return;
    if (in_.g_gamma) {
        results_.at("dg_gamma")[hv] += dg;
        return;
    }
    const GateValue at = in_.gate(b, t, hv, channel, mistakes_);
    const double dx = has(M::raw_gate_without_slope) ? dg : dg * at.raw_slope;
    results_.at("dg").rows(b, t / in_.steps, 1, hv)(0, channel) = dx;
    if (in_.A_log) results_.at("dA_log")[hv] += has(M::dA_log_without_gate) ? dg : dg * at.A_slope;
    if (in_.gate_bias)
        results_.at("ddt_bias")[hv * in_.channels() + channel] += has(M::gate_bias_without_slope) ? dg : dx;
}

// y = x r: dx = r (dy − y Σ dy∘y)
void DeltaResults::differentiate_norm(const char* name, const Dense& x, bool projected) {
    for (Index b = 0; b < x.size(0); ++b)
        for (Index h = 0; h < x.size(2); ++h) {
            View d = results_.at(name).rows(b, 0, x.size(1), h);
            const ConstView rows = x.rows(b, 0, x.size(1), h);
            for (Index t = 0; t < x.size(1); ++t) {
                const double r = inverse_norm(rows.row(t));
                const double along = projected ? r * r * rows.row(t).dot(d.row(t)) : 0;
                d.row(t) = (r * (d.row(t) - along * rows.row(t))).eval();
            }
        }
}

Results DeltaResults::finish() {
    if (in_.call.delta_options.use_qk_l2norm_in_kernel && results_.count("dq") != 0) {
        const bool projected = !has(M::norm_without_projection);
        if (!has(M::dq_without_norm)) differentiate_norm("dq", in_.q, projected);
        if (!has(M::dk_without_norm)) differentiate_norm("dk", in_.k, projected);
        if (in_.p) differentiate_norm("dp", in_.p, projected);
    }
    for (const char* name : {"o", "dq"})
        if (const auto found = results_.find(name); found != results_.end())
            found->second = of_last_steps(found->second, in_.steps);
    return std::move(results_);
}

}  // namespace softdelta::diagnose
