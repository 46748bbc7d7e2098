#include "judge/small_delta.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>

#include "core/rule_facts.h"
#include "io/file/core_view.h"
#include "judge/small_delta_chunk.h"

namespace softdelta::test {

namespace {

using M = DeltaMistake;

double sigmoid(double x) {
    return 1 / (1 + std::exp(-x));
}
double softplus(double x) {
    return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

const core::Rule& rule_of(const io::Call& call) {
    return *core::find_rule(call.op);
}

// Tokens of sequence n.
struct Span {
    Index batch, begin, count;
    Index sequence_begin, sequence_count;
};

// A gate and its derivatives by the raw gate and by A_log.
struct Gate {
    double g, raw_slope = 1, A_slope = 0;
};

float inverse_norm(const Matrix& row) {
    return 1 / std::sqrt(row.squaredNorm() + 1e-6f);
}

// Inclusive sums of a column, in place.
template <class Column>
void sum_gates(GateSums how, Column&& x) {
    const Index n = x.size();
    const double unit = how == GateSums::f32_log2 ? 1.4426950408889634 : 1;
    if (how == GateSums::f64 || how == GateSums::f32_rounded) {
        for (Index i = 1; i < n; ++i) x(i) += x(i - 1);
        if (how == GateSums::f32_rounded) x = x.template cast<float>().template cast<double>().eval();
        return;
    }
    Eigen::VectorXf y = (x * unit).template cast<float>();
    if (how == GateSums::f32_scan)
        for (Index step = 1; step < n; step *= 2)
            for (Index i = n; i-- > step;) y(i) += y(i - step);
    else
        for (Index i = 1; i < n; ++i) y(i) += y(i - 1);
    x = y.template cast<double>() / unit;
}

class SmallDelta {
  public:
    SmallDelta(const io::Call& call, DeltaMistake mistake, Index chunk_size, DeltaMistake second, GateSums gate_sums,
               const Fault& fault)
        : call_(call),
          chunk_size_(chunk_size),
          gate_sums_(gate_sums),
          fault_(fault),
          kernel_{rule_of(call), 0, call.delta.q.dtype(), mistake, second, &fault_},
          q_(call.delta.q),
          k_(call.delta.k),
          p_(call.delta.p),
          v_(call.delta.v),
          g_(call.delta.g),
          g_gamma_(call.delta.g_gamma),
          beta_(call.delta.beta),
          initial_state_(call.delta.initial_state),
          A_log_(call.delta.A_log),
          dt_bias_(call.delta.dt_bias),
          do_(call.d_o),
          dfinal_state_(call.dfinal_state),
          sums_(call) {
        const double scale = call.delta_options.scale;
        const Index size = is(M::value_size_in_scale) ? v_.size(3) : q_.size(3);
        fault_.scale = static_cast<float>(std::isnan(scale) ? 1 / std::sqrt(static_cast<double>(size)) : scale);
        fault_.group = static_cast<float>(v_.size(2)) / static_cast<float>(q_.size(2));
        kernel_.scale = fault_.number("scale", fault_.scale);
    }

    Results run() {
        for (Index h = 0; h < v_.size(2); ++h) run_head(h);
        if (call_.delta_options.use_qk_l2norm_in_kernel && sums_.has("dq")) {
            if (!is(M::dq_without_norm)) differentiate_norm("dq", q_);
            if (!is(M::dk_without_norm)) differentiate_norm("dk", k_);
            if (sums_.has("dp")) differentiate_norm("dp", p_);
        }
        write_faulty();
        return sums_.stored();
    }

  private:
    using Chunks = std::vector<DeltaChunk>;

    bool is(DeltaMistake m) const { return kernel_.is(m); }
    Index key_head(Index h) const {
        const Index head = is(M::head_modulo) ? h % q_.size(2) : h / (v_.size(2) / q_.size(2));
        return fault_.at("key head") ? fault_.head(head, q_.size(2)) : head;
    }
    Index channels() const { return kernel_.rule.gate == core::Gate::channel ? q_.size(3) : 1; }

    Index sequence_count() const { return call_.delta.cu_seqlens ? call_.delta.cu_seqlens.count() - 1 : q_.size(0); }
    Span span(Index n) const {
        if (!call_.delta.cu_seqlens) return {n, 0, q_.size(1), 0, q_.size(1)};
        const Floats cumulative(call_.delta.cu_seqlens);
        const auto begin = static_cast<Index>(cumulative[n]);
        const Index count = static_cast<Index>(cumulative[n + 1]) - begin;
        return {0, begin, count, begin, count};
    }
    // States are [K, V] here.
    Matrix state(const Floats& t, Index n, Index h) const {
        if (!t) return Matrix::Zero(q_.size(3), v_.size(3));
        return call_.delta_options.state_v_first ? Matrix(t.block(n, h).transpose()) : Matrix(t.block(n, h));
    }
    void set_state(const std::string& name, Index n, Index h, const Matrix& S) {
        const bool transpose = call_.delta_options.state_v_first != is(M::final_state_transposed);
        sums_[name].block(n, h) = transpose ? Matrix(S.transpose()) : S;
    }

    // An operand's rows, wherever a faulty kernel reads them.
    Matrix rows_of(const char* name, const Floats& t, const Span& s, Index h) const {
        Matrix rows(s.count, t.size(3));
        for (Index i = 0; i < s.count; ++i) rows.row(i) = t.rows(s.batch, row_of(name, s, i), 1, h);
        return rows;
    }
    Index row_of(const char* name, const Span& s, Index i) const {
        return s.sequence_begin + fault_.row(name, s.begin + i - s.sequence_begin, s.sequence_count);
    }

    Matrix key_rows(const char* name, const Floats& t, const Span& s, Index h) const {
        Matrix rows = rows_of(name, t, s, key_head(h));
        const std::string norm = std::string("norm of ") + name;
        if (!call_.delta_options.use_qk_l2norm_in_kernel && !fault_.is(norm.c_str(), "always")) return rows;
        if (fault_.is(norm.c_str(), "missing") || (name == std::string("q") && is(M::q_without_norm))) return rows;
        for (Index i = 0; i < rows.rows(); ++i) rows.row(i) *= inverse_norm(rows.row(i));
        return kernel_.r(rows);
    }

    Gate gate(Index b, Index t, Index h, Index channel) const;
    float beta(Index b, Index t, Index h) const;
    float beta_slope(Index b, Index t, Index h) const;
    DeltaChunk load_chunk(const Span& s, Index h);
    void fill_gate(const Span& s, Index h, DeltaChunk& c);
    void change_operand(const char* name, Matrix& x, const Vector& rows_beta);
    void write_faulty();

    void run_head(Index h);
    void add_key_gradients(const Span& s, Index h, const DeltaChunk& c);
    void add_value_gradients(const Span& s, Index h, const DeltaChunk& c);
    void add_gate_gradients(const Span& s, Index h, const DeltaChunk& c, Eigen::RowVectorXf& running);
    void add_gate_gradient(const Span& s, Index i, Index h, Index channel, float dg);
    void add_to_parameter(const std::string& name, Index i, float d);
    void differentiate_norm(const char* gradient, const Floats& x);

    const io::Call& call_;
    Index chunk_size_;
    GateSums gate_sums_;
    Faulty fault_;
    DeltaKernel kernel_;
    Floats q_, k_, p_, v_, g_, g_gamma_, beta_, initial_state_, A_log_, dt_bias_, do_, dfinal_state_;
    Sums sums_;
    std::map<std::string, std::vector<double>> parameter_sums_;  // over all tokens: too many for f32
};

Gate SmallDelta::gate(Index b, Index t, Index h, Index channel) const {
    if (g_gamma_) return {static_cast<double>(g_gamma_[h])};
    if (!g_) return {0};
    const double x = static_cast<double>(g_.rows(b, t, 1, h)(0, channel));
    if (!call_.delta_options.use_gate_in_kernel) return {x};
    const bool shifted = dt_bias_ && !is(M::dt_bias_ignored);
    const double raw = x + (shifted ? static_cast<double>(dt_bias_[h * channels() + channel]) : 0);
    const double A_log = A_log_ ? static_cast<double>(A_log_[h]) : 0, bound = call_.delta_options.lower_bound;
    const double a = is(M::A_log_without_exp) ? A_log : std::exp(A_log);
    if (std::isnan(bound)) return {-a * softplus(raw), -a * sigmoid(raw), -a * softplus(raw)};
    const double slope = bound * sigmoid(a * raw) * sigmoid(-a * raw) * a;
    return {bound * sigmoid(a * raw), slope, slope == 0 ? 0 : slope * raw};  // raw is −∞ where a step has no gate
}

float SmallDelta::beta(Index b, Index t, Index h) const {
    if (!beta_) return 1;
    const float x = beta_.rows(b, t, 1, h)(0, 0);
    if (!call_.delta_options.use_beta_sigmoid_in_kernel) return x;
    const bool doubled = call_.delta_options.allow_neg_eigval && !is(M::beta_not_doubled);
    return static_cast<float>((doubled ? 2 : 1) * sigmoid(static_cast<double>(x)));
}

// dβ/d(what is stored)
float SmallDelta::beta_slope(Index b, Index t, Index h) const {
    if (!call_.delta_options.use_beta_sigmoid_in_kernel || is(M::beta_logits_without_slope)) return 1;
    return beta(b, t, h) * static_cast<float>(sigmoid(-static_cast<double>(beta_.rows(b, t, 1, h)(0, 0))));
}

// Rows of operands are shifted where they are read.
void SmallDelta::change_operand(const char* name, Matrix& x, const Vector& rows_beta) {
    const Matrix shifted = x;
    fault_.matrix(name, x, rows_beta);
    if (fault_.is(name, "row before") || fault_.is(name, "row after") || fault_.is(name, "two rows before"))
        x = shifted;
}

void SmallDelta::fill_gate(const Span& s, Index h, DeltaChunk& c) {
    constexpr double ln2 = 0.6931471805599453;
    const double unit = is(M::gate_exp2) ? ln2 : is(M::gate_over_ln2) ? 1 / ln2 : 1;
    c.G = c.E = MatrixD::Zero(s.count, channels());
    for (Index channel = 0; channel < channels(); ++channel)
        for (Index i = 0; i < s.count; ++i)
            c.G(i, channel) = unit * std::max(gate(s.batch, row_of("g", s, i), h, channel).g, -750.0);
    if (fault_.at("g")) {
        Matrix g = c.G.cast<float>();
        change_operand("g", g, c.beta);
        c.G = g.cast<double>();
    }
    for (Index channel = 0; channel < channels(); ++channel) sum_gates(gate_sums_, c.G.col(channel));
    c.E = c.G;
    if (kernel_.rule.erase == core::Erase::from_previous_state && !is(M::erase_after_decay)) {
        c.E.row(0).setZero();
        for (Index i = 1; i < s.count; ++i) c.E.row(i) = c.G.row(i - 1);
    }
    c.G = fault_.exponent("G", c.G);
    c.E = fault_.exponent("E", c.E);
}

DeltaChunk SmallDelta::load_chunk(const Span& s, Index h) {
    DeltaChunk c;
    c.q = key_rows("q", q_, s, h);
    c.k = key_rows("k", k_, s, h);
    if (fault_.is("q", "swapped with k")) std::swap(c.q, c.k);
    c.v = rows_of("v", v_, s, h);
    if (do_) c.d_o = do_.rows(s.batch, s.begin, s.count, h);
    Matrix column(s.count, 1);
    for (Index i = 0; i < s.count; ++i) column(i, 0) = beta(s.batch, row_of("β", s, i), h);
    c.beta = column.col(0);
    change_operand("β", column, c.beta);
    c.beta = column.col(0);
    change_operand("q", c.q, c.beta);
    change_operand("k", c.k, c.beta);
    c.p = p_ ? key_rows("p", p_, s, h) : c.k;
    if (p_)
        change_operand("p", c.p, c.beta);
    else
        fault_.matrix("k in L and w", c.p, c.beta);
    fault_.matrix("k in score", c.k, c.beta);
    change_operand("v", c.v, c.beta);
    fill_gate(s, h, c);
    return c;
}

// Forward over the sequences, then backward over them from the last.
void SmallDelta::run_head(Index h) {
    std::vector<Chunks> chunks(static_cast<std::size_t>(sequence_count()));
    const auto part = [&](Index n, std::size_t i) {
        const Span s = span(n);
        const Index at = static_cast<Index>(i) * chunk_size_;
        return Span{s.batch, s.begin + at, std::min(chunk_size_, s.count - at), s.begin, s.count};
    };
    Matrix S;
    for (Index n = 0; n < sequence_count(); ++n) {
        fault_.restart();
        if (!is(M::state_leaks) || n == 0) {
            const Index from = is(M::initial_state_of_first) ? 0 : n;
            S = state(is(M::initial_state_ignored) ? Floats() : initial_state_, from, h);
        }
        Chunks& sequence = chunks[static_cast<std::size_t>(n)];
        for (Index at = 0; at < span(n).count; at += chunk_size_) {
            const Span s = part(n, sequence.size());
            DeltaChunk& c = sequence.emplace_back(load_chunk(s, h));
            c.S = S;
            S = forward(kernel_, c);
            if (is(M::tail_rows_lost)) c.o.bottomRows(s.count % 16).setZero();
            sums_["o"].rows(s.batch, s.begin, s.count, h) = c.o;
        }
        set_state("final_state", n, h, S);
    }
    if (!sums_.has("dq")) return;

    Eigen::RowVectorXf dg_running = Eigen::RowVectorXf::Zero(channels());
    for (Index n = sequence_count(); n-- > 0;) {
        fault_.restart();
        if (!is(M::dg_through_sequences)) dg_running.setZero();
        Matrix dS = state(is(M::dfinal_state_ignored) ? Floats() : dfinal_state_, n, h);
        Chunks& sequence = chunks[static_cast<std::size_t>(n)];
        for (std::size_t i = sequence.size(); i-- > 0;) {
            DeltaChunk& c = sequence[i];
            const Matrix dS_out = dS;
            dS = backward(kernel_, c, dS_out);
            if (i == 0 && is(M::dinitial_state_without_decay))
                dS += (1 - std::exp(static_cast<float>(c.G(c.G.rows() - 1, 0)))) * dS_out;
            const bool restart = i + 1 < sequence.size() && !is(M::dg_through_chunks);
            if (restart) dg_running.setZero();
            add_key_gradients(part(n, i), h, c);
            add_value_gradients(part(n, i), h, c);
            add_gate_gradients(part(n, i), h, c, dg_running);
        }
        set_state("dinitial_state", n, h, dS);
    }
}

// Sums over the value heads of a group.
void SmallDelta::add_key_gradients(const Span& s, Index h, const DeltaChunk& c) {
    const auto add = [&](const char* name, const Matrix& d) {
        const std::string place = std::string("sum over heads of ") + name;
        const Index head = fault_.is(place.c_str(), "in turn") ? h % q_.size(2) : key_head(h);
        Rows rows = sums_[name].rows(s.batch, s.begin, s.count, head);
        const bool first = h == 0 || key_head(h - 1) != key_head(h);
        if (is(M::last_head_of_group) || fault_.is(place.c_str(), "last only"))
            rows = d;
        else if (first || !fault_.is(place.c_str(), "first only"))
            rows += d;
    };
    add("dq", c.dq);
    add("dk", p_ || is(M::dk_without_p_path) ? c.dk : Matrix(c.dk + c.dp));
    if (p_) add("dp", c.dp);
}

void SmallDelta::add_value_gradients(const Span& s, Index h, const DeltaChunk& c) {
    sums_["dv"].rows(s.batch, s.begin, s.count, h) = c.dv;
    if (!sums_.has("dbeta")) return;
    Rows dbeta = sums_["dbeta"].rows(s.batch, s.begin, s.count, h);
    for (Index i = 0; i < s.count; ++i) dbeta(i, 0) = c.dbeta(i, 0) * beta_slope(s.batch, s.begin + i, h);
}

// The reverse sum within the chunk; erasing from the previous state, the gate of a row does not reach its own p.
void SmallDelta::add_gate_gradients(const Span& s, Index h, const DeltaChunk& c, Eigen::RowVectorXf& running) {
    if (!g_ && !g_gamma_) return;
    const bool previous = kernel_.rule.erase == core::Erase::from_previous_state && !is(M::dg_erase_inclusive);
    for (Index from_last = 0; from_last < s.count; ++from_last) {
        const Index i = is(M::dg_forward_sum) ? from_last : s.count - 1 - from_last;
        const Eigen::RowVectorXf later = running;
        if (fault_.is("sum of dg", "not summed") || (fault_.is("sum of dg", "summed by 16 rows") && i % 16 == 15))
            running.setZero();
        running += c.dg.row(i) + c.dg_erase.row(i);
        for (Index channel = 0; channel < channels(); ++channel) {
            const float inclusive = running(channel) - (previous ? c.dg_erase(i, channel) : 0);
            add_gate_gradient(s, i, h, channel, is(M::dg_exclusive) ? later(channel) : inclusive);
        }
    }
}

void SmallDelta::add_gate_gradient(const Span& s, Index i, Index h, Index channel, float dg) {
    if (g_gamma_) return add_to_parameter("dg_gamma", h, dg);
    const Gate at = gate(s.batch, s.begin + i, h, channel);
    const float dx = is(M::raw_gate_without_slope) ? dg : dg * static_cast<float>(at.raw_slope);
    sums_["dg"].rows(s.batch, s.begin + i, 1, h)(0, channel) = dx;
    if (A_log_) add_to_parameter("dA_log", h, is(M::dA_log_without_gate) ? dg : dg * static_cast<float>(at.A_slope));
    if (dt_bias_) add_to_parameter("ddt_bias", h * channels() + channel, is(M::ddt_bias_without_slope) ? dg : dx);
}

void SmallDelta::add_to_parameter(const std::string& name, Index i, float d) {
    std::vector<double>& sum = parameter_sums_[name];
    sum.resize(static_cast<std::size_t>(v_.size(2) * channels()));
    sums_[name][i] = static_cast<float>(sum[static_cast<std::size_t>(i)] += static_cast<double>(d));
}

// What is written, one result after the other: rows of a sequence, or states.
void SmallDelta::write_faulty() {
    for (const std::string& name : io::output_names(call_)) {
        const std::string place = name + ", as written";
        if (!fault_.at(place.c_str())) continue;
        const Floats& x = sums_[name];
        const std::vector<std::int64_t> shape = io::output_shape(call_, name);
        if (shape.size() < 3) {
            for (Index i = 0; i < shape[0]; ++i) x[i] = fault_.number(place.c_str(), x[i]);
            continue;
        }
        const bool state = name == "final_state" || name == "dinitial_state";
        Index total = 1;
        for (const std::int64_t size : shape) total *= size;
        const Floats copy(shape);
        for (Index i = 0; i < total; ++i) copy[i] = x[i];
        const Index heads = shape[state ? 1 : 2];
        for (Index n = 0; n < sequence_count(); ++n)
            for (Index h = 0; h < heads; ++h) {
                const Index from = fault_.head(h, heads);
                const Index m = fault_.change() == "first sequence" ? 0 : n;
                const Span s = span(n);
                Matrix rows = state ? Matrix(copy.block(m, from)) : Matrix(copy.rows(s.batch, s.begin, s.count, from));
                fault_.matrix(place.c_str(), rows);
                if (state)
                    x.block(n, h) = rows;
                else
                    x.rows(s.batch, s.begin, s.count, h) = rows;
            }
    }
}

// y = x r: dx = r (dy − y Σ dy∘y)
void SmallDelta::differentiate_norm(const char* gradient, const Floats& x) {
    for (Index b = 0; b < x.size(0); ++b)
        for (Index t = 0; t < x.size(1); ++t)
            for (Index h = 0; h < x.size(2); ++h) {
                Rows d = sums_[gradient].rows(b, t, 1, h);
                const Matrix row = x.rows(b, t, 1, h);
                const float r = inverse_norm(row);
                const Matrix y = r * row;
                const float along = is(M::norm_without_projection) ? 0 : d.cwiseProduct(y).sum();
                d = Matrix(r * (d - along * y));
            }
}

// A call of several steps as one whose tokens are these steps: queries and do are 0 but in a token's last one, gates
// but in its first.
class StepsAlone {
  public:
    explicit StepsAlone(const io::Call& whole) : call(whole), steps_(whole.delta_options.steps) {
        call.delta_options.steps = 1;
        call.delta.q = among_steps(whole.delta.q, steps_ - 1, 0);
        call.d_o = among_steps(whole.d_o, steps_ - 1, 0);
        const bool raw = whole.delta_options.use_gate_in_kernel;
        call.delta.g = among_steps(whole.delta.g, 0, raw ? -HUGE_VAL : 0);
        call.packing.tokens = whole.packing.steps;
        if (call.packing.tokens.empty()) return;
        memory_.emplace_back(DType::i64, std::vector<std::int64_t>{whole.delta.cu_seqlens.count()});
        std::ranges::copy(whole.packing.steps, static_cast<std::int64_t*>(memory_.back().data()));
        call.delta.cu_seqlens = memory_.back().view();
    }
    Results of_tokens(Results rows) const {
        for (auto& [name, result] : rows)
            if (name == "o" || name == "dq" || name == "dg") {
                std::vector<std::int64_t> shape = result.shape();
                shape[1] /= steps_;
                io::OwnedTensor tokens(result.view().dtype(), shape);
                copy(result.view(), tokens.view(), name == "dg" ? 0 : steps_ - 1, false);
                result = std::move(tokens);
            }
        return rows;
    }

    io::Call call;

  private:
    Tensor among_steps(const Tensor& tokens, Index step, double others) {
        if (!tokens) return {};
        std::vector<std::int64_t> shape(tokens.shape().begin(), tokens.shape().end());
        shape[1] *= steps_;
        const Tensor rows = memory_.emplace_back(tokens.dtype(), shape).view();
        for (Index i = 0; i < rows.count(); ++i) core::store(io::core_row(rows), i, others);
        copy(rows, tokens, step, true);
        return rows;
    }
    void copy(const Tensor& rows, const Tensor& tokens, Index step, bool to_rows) const {
        const Index row = tokens.count() / std::max<Index>(tokens.shape(0) * tokens.shape(1), 1);
        for (Index i = 0; i < tokens.count(); ++i) {
            const Index at = (i / std::max<Index>(row, 1) * steps_ + step) * row + i % std::max<Index>(row, 1);
            if (to_rows)
                core::store(io::core_row(rows), at, core::load(io::core_row(tokens), i));
            else
                core::store(io::core_row(tokens), i, core::load(io::core_row(rows), at));
        }
    }

    Index steps_;
    std::deque<io::OwnedTensor> memory_;
};

}  // namespace

Results run_small_delta(const io::Call& call, DeltaMistake mistake, Index chunk_size, DeltaMistake second,
                        GateSums sums, const Fault& fault) {
    if (call.delta_options.steps > 1) {
        const StepsAlone steps(call);
        return steps.of_tokens(run_small_delta(steps.call, mistake, chunk_size, second, sums, fault));
    }
    return SmallDelta(call, mistake, chunk_size, second, sums, fault).run();
}

}  // namespace softdelta::test
