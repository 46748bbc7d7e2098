// The adjoint of loading a head: through l2norm, β's logits and the raw gate, and out to the caller's tensors.
#include "engines/stages/delta_rule/gate.h"
#include "engines/stages/delta_rule/heads.h"

namespace softdelta::stages::delta {

namespace {

// y = x r, r = (Σx² + 1e-6)^-1/2:  dx = r (dy − y Σ dy∘y). Kernels store dy; so does the low-precision run.
template <class T>
void store_key_gradient(const Tensor& t, const core::DeltaSequence& s, Index h, const Tile<T>& y, const Column<T>& norm,
                        Tile<T>& dy, Rounding& rounding, Index steps = 1) {
    if (!t) return;
    if (norm.size() > 0) {
        rounding.stored(dy.data(), dy.size(), t.dtype);
        for (Index i = 0; i < dy.rows(); ++i) dy.row(i) = norm[i] * (dy.row(i) - y.row(i) * dy.row(i).dot(y.row(i)));
    }
    store_rows(t, s, h, 0, dy, rounding, steps);
}

template <class T>
void multiply_by_gate_slope(const GateMaker& gate, const core::DeltaSequence& s, Tile<T>& dg) {
    for (Index i = 0; i < dg.rows(); ++i)
        for (Index m = 0; m < dg.cols(); ++m) {
            const double slope = gate.slope(s, i, m);
            dg(i, m) = static_cast<T>(static_cast<double>(dg(i, m)) * slope);
        }
}

// A wiped state (dg = 0) sends nothing to A_log, however large its gate.
template <class T>
double sum_dA_log(const GateMaker& gate, const core::DeltaSequence& s, const Tile<T>& dg) {
    double sum = 0;
    for (Index i = 0; i < dg.rows(); ++i)
        for (Index m = 0; m < dg.cols(); ++m)
            if (dg(i, m) != 0) sum += static_cast<double>(dg(i, m)) * gate.slope_of_A_log(s, i, m);
    return sum;
}

}  // namespace

template <class T>
void KeyGradients<T>::clear(const KeyHead<T>& head) {
    dq.setZero(head.q.rows(), head.q.cols());
    dk.setZero(head.k.rows(), head.k.cols());
    dp.setZero(head.p.rows(), head.p.cols());
}

template <class T>
void KeyGradients<T>::store(const core::DeltaGradients& grad, const core::DeltaSequence& s, Index h,
                            const KeyHead<T>& head, Rounding& rounding, Index steps) {
    store_key_gradient(grad.dq, s, h, head.q, head.q_norm, dq, rounding, steps);
    store_key_gradient(grad.dk, s, h, head.k, head.k_norm, dk, rounding);
    store_key_gradient(grad.dp, s, h, head.p, head.p_norm, dp, rounding);
}

template <class T>
GateSums ValueGradients<T>::store(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                  const core::DeltaGradients& grad, const core::DeltaSequence& s, Index hv,
                                  Rounding& rounding) {
    store_rows(grad.dv, s, hv, 0, dv, rounding);
    if (grad.dbeta) {
        for (Index i = 0; i < s.count; ++i) dbeta[i] *= static_cast<T>(slope_of_beta(in, options, s, hv, i));
        rounding.stored(dbeta.data(), dbeta.size(), grad.dbeta.dtype);
        core::store_row(grad.dbeta, grad.dbeta.offset({s.batch, s.begin, hv}), 1, s.count, dbeta.data());
    }
    GateSums sums;
    const GateMaker gate(in, options, hv);
    for (Index i = 0; i < s.count; ++i)
        if (!gate.has(s, i)) dg.row(i).setZero();
    sums.dg_gamma = dg.template cast<double>().sum();
    if (options.raw_gate != core::RawGate::none) {  // kernels store the gate's gradient before they sum it
        Tile<T> stored = dg;
        rounding.stored(stored.data(), stored.size(), in.g.dtype);
        if (grad.dA_log) sums.dA_log = sum_dA_log(gate, s, stored);
        multiply_by_gate_slope(gate, s, dg);
    }
    if (in.g) rounding.stored(dg.data(), dg.size(), in.g.dtype);
    sums.dbias = dg.template cast<double>().colwise().sum();
    if (grad.dg) {
        const bool channel = grad.dg.rank == 4;
        for (Index i = 0; i < s.count; ++i) {
            const Index token = core::token_begun(s.begin + i, options.steps);
            if (token < 0) continue;
            if (channel)
                core::store_row(grad.dg, grad.dg.offset({s.batch, token, hv, 0}), 3, dg.cols(), dg.row(i).data());
            else
                core::store(grad.dg, grad.dg.offset({s.batch, token, hv}), static_cast<double>(dg(i, 0)));
        }
    }
    return sums;
}

template struct KeyGradients<double>;
template struct KeyGradients<float>;
template struct ValueGradients<double>;
template struct ValueGradients<float>;

}  // namespace softdelta::stages::delta
