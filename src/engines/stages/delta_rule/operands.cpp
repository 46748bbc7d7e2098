// Loading a head: l2norm, gates, β, and the sums of gates over chunks.
#include <algorithm>
#include <cmath>

#include "engines/stages/delta_rule/gate.h"
#include "engines/stages/delta_rule/heads.h"

namespace softdelta::stages::delta {

namespace {

// e^−750 is 0 in f64. Without the bound one gate of −1e30 would cost the later sums all their digits.
constexpr double lowest_gate = -750;

// Chunks in which G rises by more go token by token: e^rise multiplies the rounding errors of what erasing cancels.
constexpr double highest_rise = 1;

// steps: of a tensor that has only the rows of last steps; others are 0.
template <class T>
void load_rows(const Tensor& t, const core::DeltaSequence& s, Index h, Tile<T>& x, Index steps = 1) {
    x.setZero(s.count, t.shape[3]);
    for (Index i = 0; i < s.count; ++i)
        if (const Index at = core::token_ended(s.begin + i, steps); at >= 0)
            core::load_row(t, t.offset({s.batch, at, h, 0}), 3, x.cols(), x.row(i).data());
}

template <class T>
void load_key_rows(const Tensor& t, const core::DeltaSequence& s, Index h, bool l2norm, Tile<T>& x, Column<T>& norm,
                   Rounding& rounding, Index steps = 1) {
    load_rows(t, s, h, x, steps);
    if (!l2norm) return;
    norm = (x.rowwise().squaredNorm().array() + T(1e-6)).rsqrt();
    for (Index i = 0; i < x.rows(); ++i)
        if (norm[i] == 0) norm[i] = static_cast<T>(1 / x.row(i).template cast<double>().norm());  // Σx² is beyond f32
    x.array().colwise() *= norm.array();
    rounding.operand(x.data(), x.size());
}

// The largest G_i − G_j over i > j in the rows given, j = −1 (G = 0) included.
double find_rise(const double* g, Index n, Index channels) {
    if (std::all_of(g, g + n * channels, [](double x) { return x <= 0; })) return 0;
    double rise = 0;
    for (Index m = 0; m < channels; ++m) {
        double above_lowest = 0;
        for (Index i = 0; i < n; ++i) {
            const double own = g[i * channels + m];
            if (!std::isfinite(own)) continue;  // it does not choose the form of earlier tokens
            above_lowest = std::max(above_lowest, 0.0) + own;
            rise = std::max(rise, above_lowest);
        }
    }
    return rise;
}

std::vector<Piece> cut_pieces(const Tile<double>& g, Index chunk_size) {
    std::vector<Piece> pieces;
    for (Index begin = 0; begin < g.rows(); begin += chunk_size) {
        const Index n = std::min(chunk_size, g.rows() - begin);
        const bool steady = find_rise(g.row(begin).data(), n, g.cols()) <= highest_rise;
        if (steady) pieces.push_back({begin, n});
        for (Index i = 0; !steady && i < n; ++i) pieces.push_back({begin + i, 1});
    }
    return pieces;
}

// Sums of rows as kernels have them that keep them in f32, divided by log 2 where they use 2^x. Summed one after the
// other each carries the errors of those before it; by a parallel scan each has errors of its own, which count between
// neighbours too. Here are both.
template <class Sums>
void sum_in_float(Rounding& rounding, bool base_2, Sums&& rows) {
    const double unit = base_2 ? 0.69314718055994530942 : 1;
    for (Index m = 0; m < rows.cols(); ++m) {
        double exact = 0, chain = 0;
        for (Index i = 0; i < rows.rows(); ++i) {
            const double g = rounding.in_float(rows(i, m) / unit);
            exact += g;
            chain = rounding.in_float(chain + g);
            rows(i, m) = unit * static_cast<double>(static_cast<float>(chain + (rounding.in_float(exact) - exact)));
        }
    }
}

}  // namespace

template <class T>
void KeyHead<T>::load(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaSequence& s,
                      Index h, Rounding& rounding) {
    load_key_rows(in.q, s, h, options.l2norm, q, q_norm, rounding, options.steps);
    load_key_rows(in.k, s, h, options.l2norm, k, k_norm, rounding);
    if (in.p) load_key_rows(in.p, s, h, options.l2norm, p, p_norm, rounding);
}

template <class T>
void ValueHead<T>::load(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaSequence& s,
                        Index hv, const core::Execution& execution, Rounding& rounding) {
    load_rows(in.v, s, hv, v);
    beta.setOnes(s.count);
    for (Index i = 0; in.beta && i < s.count; ++i) beta[i] = static_cast<T>(load_beta(in, options, s, hv, i));
    const GateMaker gate(in, options, hv);
    G.resize(s.count, options.rule.gate == core::Gate::channel ? in.k.shape[3] : 1);
    for (Index i = 0; i < s.count; ++i)
        for (Index m = 0; m < G.cols(); ++m) G(i, m) = std::max(gate.make(s, i, m), lowest_gate);
    pieces = cut_pieces(G, execution.chunk_size);
    if (execution.shortcuts)
        for (Index i = 0; i < G.size(); ++i) G.data()[i] = rounding.in_float(G.data()[i]);
    const bool before_decay = options.rule.erase == core::Erase::from_previous_state;
    for (const Piece& piece : pieces) {
        auto sums = G.middleRows(piece.begin, piece.count);
        if (execution.shortcuts)
            sum_in_float(rounding, execution.rounding_seed % 2 == 1, sums);
        else
            for (Index i = 1; i < piece.count; ++i) sums.row(i) += sums.row(i - 1);
    }
    if (!before_decay) return;
    E.setZero(G.rows(), G.cols());
    for (const Piece& piece : pieces)
        E.middleRows(piece.begin + 1, piece.count - 1) = G.middleRows(piece.begin, piece.count - 1);
}

template struct KeyHead<double>;
template struct KeyHead<float>;
template struct ValueHead<double>;
template struct ValueHead<float>;

}  // namespace softdelta::stages::delta
