#include "diagnose/replay/delta_chunk.h"

#include "diagnose/replay/decay.h"

namespace softdelta::diagnose {

namespace {

using M = Mistake;

// e^(G_last − G), [n, K]
Matrix decay_to_last(const DeltaOperands& in) {
    return decay_rows(in.G.bottomRows(1).replicate(in.G.rows(), 1) - in.G, in.k.cols());
}

// e^(times · G_last) of each row of the state.
Vector state_decay(const DeltaOperands& in, double times = 1) {
    return decay_rows(times * in.G.bottomRows(1), in.k.cols()).transpose();
}

double to_bf16_and_back(double x) {
    return static_cast<double>(core::to_float(core::to_bf16(x)));
}

void solve(const DeltaKernel& kernel, const DeltaOperands& in, DeltaForward& out) {
    const Index n = in.k.rows();
    const Matrix pairs = in.beta.asDiagonal() * Pairs{in.E, in.G}.products(in.p, in.k);
    const Matrix L = kernel.has(M::erase_with_diagonal) ? tril(pairs) : stril(pairs);
    out.A = Matrix::Identity(n, n) - L;
    if (!kernel.has(M::inverse_first_order))
        out.A = (Matrix::Identity(n, n) + L).triangularView<Eigen::Lower>().solve(Matrix::Identity(n, n));
    out.erase_key = in.p;
    if (!kernel.has(M::w_without_decay)) out.erase_key = in.p.cwiseProduct(decay_rows(in.E, in.p.cols()));
    if (!kernel.has(M::w_without_beta)) out.erase_key = in.beta.asDiagonal() * out.erase_key;
    out.beta_v = in.v;
    if (!kernel.has(M::u_without_beta)) out.beta_v = in.beta.asDiagonal() * in.v;
    out.w = out.A * out.erase_key;
    out.v_new = out.A * out.beta_v;
    if (!kernel.has(M::v_new_ignores_state)) out.v_new -= out.w * out.S;
}

// dL = −stril(Aᵀ dA Aᵀ)
Matrix inverse_gradient(const DeltaKernel& kernel, const Matrix& A, const Matrix& dA) {
    const bool left = kernel.has(M::dL_left_not_transposed) || kernel.has(M::dL_not_transposed);
    const bool right = kernel.has(M::dL_right_not_transposed) || kernel.has(M::dL_not_transposed);
    const Matrix At = A.transpose();
    Matrix dL = -((left ? A : At) * dA * (right ? A : At));
    if (kernel.has(M::dL_unmasked)) return dL;
    return kernel.has(M::dL_with_diagonal) ? tril(dL) : stril(dL);
}

// What goes through A: to p, k, v, β, and the state that entered.
void unsolve(const DeltaKernel& kernel, const DeltaOperands& in, const DeltaForward& kept, const Matrix& du,
             DeltaBackward& out) {
    const double sign = kernel.has(M::dw_sign) ? 1 : -1;
    const Matrix dw = sign * (du * kept.S.transpose());
    Matrix dA = du * kept.beta_v.transpose();
    if (!kernel.has(M::dA_without_w)) dA += dw * kept.erase_key.transpose();
    const Matrix dL = inverse_gradient(kernel, kept.A, dA);
    const Matrix dbeta_v = kept.A.transpose() * du, derase_key = kept.A.transpose() * dw;

    const Pairs pairs{in.E, in.G, kernel.has(M::dL_unmasked)};
    const Matrix e = derase_key.cwiseProduct(decay_rows(in.E, in.p.cols())) + pairs.sum_earlier(dL, in.k);
    if (!kernel.has(M::dk_without_erase_scores)) out.dk += pairs.sum_later(dL, in.beta.asDiagonal() * in.p);
    out.dp = in.beta.asDiagonal() * e;
    out.dv = dbeta_v;
    if (!kernel.has(M::dv_without_beta)) out.dv = in.beta.asDiagonal() * dbeta_v;
    out.dbeta = Vector::Zero(in.v.rows());
    if (!kernel.has(M::dbeta_without_value_path)) out.dbeta = dbeta_v.cwiseProduct(in.v).rowwise().sum();
    if (!kernel.has(M::dbeta_without_key_path)) out.dbeta += e.cwiseProduct(in.p).rowwise().sum();
    if (kernel.has(M::dbeta_with_beta)) out.dbeta = out.dbeta.cwiseProduct(in.beta).eval();
    if (!kernel.has(M::dstate_without_erase)) out.dS -= kept.w.transpose() * du;
}

// dG = q∘dq − k∘dk, and in the last row what e^G_last rules; dE = p∘dp.
void gate_gradient(const DeltaKernel& kernel, const DeltaOperands& in, const DeltaForward& kept, const Matrix& dS,
                   const Matrix& kw, DeltaBackward& out) {
    const Index channels = in.G.cols(), last = in.G.rows() - 1;
    out.dG = sum_channels(in.q.cwiseProduct(out.dq) - in.k.cwiseProduct(out.dk), channels);
    out.dE = sum_channels(in.p.cwiseProduct(out.dp), channels);
    if (kernel.has(M::dg_without_erase_path)) out.dE.setZero();
    Vector by_decay = kept.S.cwiseProduct(dS).rowwise().sum();
    if (!kernel.has(M::dg_last_row_without_decay)) by_decay = by_decay.cwiseProduct(state_decay(in)).eval();
    const Matrix last_row =
        sum_channels(Matrix(in.k.cwiseProduct(kw).colwise().sum() + by_decay.transpose()), channels);
    if (kernel.has(M::dg_last_row_everywhere))
        out.dG.rowwise() += last_row.row(0);
    else if (!kernel.has(M::dg_without_last_row))
        out.dG.row(last) += last_row.row(0);
}

}  // namespace

void forward(const DeltaKernel& kernel, const DeltaOperands& in, Matrix& S, DeltaForward& out) {
    const Index K = in.k.cols();
    const Matrix score = kernel.scale * Pairs{in.G, in.G}.products(in.q, in.k);
    out.S = S;
    out.score = kernel.has(M::score_without_diagonal) ? stril(score) : tril(score);
    if (!kernel.rule.erases())
        out.v_new = in.v;
    else
        solve(kernel, in, out);
    const double scale = kernel.has(M::o_without_scale) ? 1 : kernel.scale;
    out.o = out.score * out.v_new;
    const Matrix read = kernel.has(M::read_query_without_decay) ? in.q : in.q.cwiseProduct(decay_rows(in.G, K));
    if (!kernel.has(M::o_without_state)) out.o += scale * (read * S);
    const double times = kernel.has(M::state_decayed_twice) ? 2 : kernel.has(M::state_not_decayed) ? 0 : 1;
    const Matrix write_key = kernel.has(M::write_key_without_decay) ? in.k : in.k.cwiseProduct(decay_to_last(in));
    S = state_decay(in, times).asDiagonal() * S;
    S += write_key.transpose() * out.v_new;
    if (kernel.has(M::state_bf16)) S = S.unaryExpr(&to_bf16_and_back);
}

void backward(const DeltaKernel& kernel, const DeltaOperands& in, const DeltaForward& kept, const Matrix& dS,
              DeltaBackward& out) {
    const Index K = in.k.cols();
    const Matrix to_last = decay_to_last(in), from_first = decay_rows(in.G, K);
    Matrix du = kept.score.transpose() * in.d_o;
    if (!kernel.has(M::du_without_state)) du += in.k.cwiseProduct(to_last) * dS;
    const Matrix dscore = tril(in.d_o * kept.v_new.transpose());
    const Pairs pairs{in.G, in.G};

    out.dS = state_decay(in, kernel.has(M::dstate_without_decay) ? 0 : 1).asDiagonal() * dS;
    out.dS += kernel.scale * (in.q.cwiseProduct(from_first).transpose() * in.d_o);
    out.dq = Matrix::Zero(in.q.rows(), K);
    if (!kernel.has(M::dq_without_state)) out.dq += (in.d_o * kept.S.transpose()).cwiseProduct(from_first);
    if (!kernel.has(M::dq_without_scores)) out.dq += pairs.sum_earlier(dscore, in.k);
    if (!kernel.has(M::delta_dq_without_scale)) out.dq *= kernel.scale;
    const double dk_scale = kernel.has(M::delta_dk_without_scale)  ? 1
                            : kernel.has(M::delta_dk_scaled_twice) ? kernel.scale * kernel.scale
                                                                   : kernel.scale;
    const Matrix kw = (kept.v_new * dS.transpose()).cwiseProduct(to_last);
    out.dk = dk_scale * pairs.sum_later(dscore, in.q);
    if (!kernel.has(M::dk_without_write)) out.dk += kw;
    if (!kernel.rule.erases()) {
        out.dp = Matrix::Zero(in.k.rows(), K);
        out.dv = du;
        out.dbeta = Vector::Zero(in.k.rows());
    } else {
        unsolve(kernel, in, kept, du, out);
    }
    gate_gradient(kernel, in, kept, dS, kw, out);
}

}  // namespace softdelta::diagnose
