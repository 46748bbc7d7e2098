#include "judge/small_delta_chunk.h"

#include <algorithm>

namespace softdelta::test {

namespace {

using M = DeltaMistake;

Matrix tril(const Matrix& x) {
    return x.triangularView<Eigen::Lower>();
}
Matrix stril(const Matrix& x) {
    return x.triangularView<Eigen::StrictlyLower>();
}

// e^X, a gate channel's number for each of its columns: [n, K]
Matrix decay_rows(const MatrixD& X, Index K) {
    return X.array().exp().cast<float>().matrix().replicate(1, K / X.cols());
}

// e^(X_i − Y_j) of one gate channel, [n, n]; what lies above the diagonal is masked by the factor beside it.
Matrix decay_pairs(const MatrixD& X, const MatrixD& Y, Index channel) {
    Matrix d(X.rows(), Y.rows());
    for (Index i = 0; i < d.rows(); ++i)
        for (Index j = 0; j < d.cols(); ++j)
            d(i, j) = static_cast<float>(std::exp(std::min(X(i, channel) - Y(j, channel), 0.0)));
    return d;
}

// Σ_m x_im y_jm e^(X_im − Y_jm)
Matrix pair_products(const Matrix& x, const MatrixD& X, const Matrix& y, const MatrixD& Y) {
    const Index width = x.cols() / X.cols();
    Matrix products = Matrix::Zero(x.rows(), y.rows());
    for (Index c = 0; c < X.cols(); ++c) {
        const Matrix product = x.middleCols(c * width, width) * y.middleCols(c * width, width).transpose();
        products += product.cwiseProduct(decay_pairs(X, Y, c));
    }
    return products;
}

// Σ_j m_ij y_j e^(X_i − Y_j), the gradient of x in pair_products
Matrix pair_sums_over_keys(const Matrix& m, const MatrixD& X, const Matrix& y, const MatrixD& Y) {
    const Index width = y.cols() / Y.cols();
    Matrix sums(m.rows(), y.cols());
    for (Index c = 0; c < Y.cols(); ++c)
        sums.middleCols(c * width, width) = m.cwiseProduct(decay_pairs(X, Y, c)) * y.middleCols(c * width, width);
    return sums;
}

// Σ_i m_ij x_i e^(X_i − Y_j), the gradient of y
Matrix pair_sums_over_queries(const Matrix& m, const Matrix& x, const MatrixD& X, const MatrixD& Y) {
    const Index width = x.cols() / X.cols();
    Matrix sums(m.cols(), x.cols());
    for (Index c = 0; c < X.cols(); ++c)
        sums.middleCols(c * width, width) =
            m.cwiseProduct(decay_pairs(X, Y, c)).transpose() * x.middleCols(c * width, width);
    return sums;
}

// [n, K] → [n, Kg]: a channel's columns together
Matrix sum_columns(const Matrix& x, Index channels) {
    const Index width = x.cols() / channels;
    Matrix sums(x.rows(), channels);
    for (Index c = 0; c < channels; ++c) sums.col(c) = x.middleCols(c * width, width).rowwise().sum();
    return sums;
}

MatrixD up_to_last(const MatrixD& G) {
    return G.bottomRows(1).replicate(G.rows(), 1) - G;
}

void forward_inverse(const DeltaKernel& x, DeltaChunk& c) {
    const Index n = c.q.rows(), K = c.k.cols();
    const Matrix erase_score = c.beta.asDiagonal() * pair_products(c.p, c.E, c.k, c.G);
    const Matrix L = x.is(M::erase_with_diagonal) ? tril(erase_score) : stril(erase_score);
    const Matrix one = Matrix::Identity(n, n);
    const Matrix one_and_L = one + L;
    c.A = x.r(x.is(M::inverse_first_order) ? Matrix(one - L)
                                           : Matrix(one_and_L.triangularView<Eigen::Lower>().solve(one)));
    const Matrix decayed_p = x.is(M::w_without_decay) ? c.p : Matrix(c.p.cwiseProduct(decay_rows(c.E, K)));
    c.erase_key = x.r(x.is(M::w_without_beta) ? decayed_p : Matrix(c.beta.asDiagonal() * decayed_p));
    c.beta_v = x.is(M::u_without_beta) ? c.v : x.r(c.beta.asDiagonal() * c.v);
}

}  // namespace

Matrix forward(const DeltaKernel& x, DeltaChunk& c) {
    const Index K = c.k.cols();
    const Matrix score = x.scale * pair_products(c.q, c.G, c.k, c.G);
    c.score = x.r(x.is(M::score_without_diagonal) ? stril(score) : tril(score));
    const Matrix h = x.r(c.S);
    if (x.rule.erase == core::Erase::nothing) {
        c.v_new = c.v;
    } else {
        forward_inverse(x, c);
        c.u = x.r(c.A * c.beta_v);
        c.w = x.r(c.A * c.erase_key);
        c.v_new = x.is(M::v_new_ignores_state) ? c.u : x.r(c.u - c.w * h);
    }
    const Matrix qg = x.is(M::read_query_without_decay) ? c.q : x.r(c.q.cwiseProduct(decay_rows(c.G, K)));
    c.o = c.score * c.v_new;
    if (!x.is(M::o_without_state)) c.o += (x.is(M::o_without_scale) ? 1 : x.scale) * (qg * h);
    const Matrix to_last = decay_rows(up_to_last(c.G), K);
    const Matrix kg = x.is(M::write_key_without_decay) ? c.k : x.r(c.k.cwiseProduct(to_last));
    const double times = x.is(M::state_decayed_twice) ? 2 : x.is(M::state_not_decayed) ? 0 : 1;
    const Matrix state_decay = decay_rows(times * c.G.bottomRows(1), K).transpose();  // [K, 1]
    const Matrix S = state_decay.col(0).asDiagonal() * c.S + kg.transpose() * c.v_new;
    return x.is(M::state_bf16) ? round_to(DType::bf16, S) : S;
}

namespace {

// What reaches an erasing chunk's p, k, v and beta by way of A.
struct ErasePath {
    Matrix dS;  // [K, V] of the state entering
    Matrix e;   // [n, K] dp without its factor β
    Matrix dk;  // [n, K]
};

Matrix inverse_gradient(const DeltaKernel& x, const DeltaChunk& c, const Matrix& dA) {
    const Matrix At = c.A.transpose();
    const bool left = x.is(M::dL_left_not_transposed) || x.is(M::dL_not_transposed);
    const bool right = x.is(M::dL_right_not_transposed) || x.is(M::dL_not_transposed);
    const Matrix product = x.r((left ? c.A : At) * x.r(dA)) * (right ? c.A : At);
    const Matrix dL = x.r(-product);
    return x.is(M::dL_unmasked) ? dL : x.is(M::dL_with_diagonal) ? tril(dL) : stril(dL);
}

ErasePath backward_inverse(const DeltaKernel& x, DeltaChunk& c, const Matrix& du) {
    const Index K = c.k.cols();
    const Matrix h = x.r(c.S);
    const Matrix dw = x.r((x.is(M::dw_sign) ? 1 : -1) * (du * h.transpose()));
    Matrix dA = du * c.beta_v.transpose();
    if (!x.is(M::dA_without_w)) dA += dw * c.erase_key.transpose();
    const Matrix dL = inverse_gradient(x, c, dA);
    const Matrix dbeta_v = c.A.transpose() * du, derase_key = c.A.transpose() * dw;
    const Matrix beta_p = c.beta.asDiagonal() * c.p;

    ErasePath path;
    path.dS = -(c.w.transpose() * du);
    if (x.is(M::dstate_without_erase)) path.dS.setZero();
    path.e = derase_key.cwiseProduct(decay_rows(c.E, K)) + pair_sums_over_keys(dL, c.E, c.k, c.G);
    path.dk = pair_sums_over_queries(dL, beta_p, c.E, c.G);
    if (x.is(M::dk_without_erase_scores)) path.dk.setZero();
    c.dp = c.beta.asDiagonal() * path.e;
    c.dv = dbeta_v;
    if (!x.is(M::dv_without_beta)) c.dv = c.beta.asDiagonal() * dbeta_v;
    c.dbeta = dbeta_v.cwiseProduct(c.v).rowwise().sum();
    if (x.is(M::dbeta_without_value_path)) c.dbeta.setZero();
    if (!x.is(M::dbeta_without_key_path)) c.dbeta += path.e.cwiseProduct(c.p).rowwise().sum();
    if (x.is(M::dbeta_with_beta)) c.dbeta = c.beta.asDiagonal() * c.dbeta;
    return path;
}

// dg = q∘dq − k∘dk + p∘dp, and in the last row what e^(G_last) rules.
void differentiate_gate(const DeltaKernel& x, DeltaChunk& c, const Matrix& kw, const Matrix& dS_out) {
    const Index channels = c.G.cols(), last = c.G.rows() - 1;
    c.dg = sum_columns(c.q.cwiseProduct(c.dq) - c.k.cwiseProduct(c.dk), channels);
    c.dg_erase = sum_columns(c.p.cwiseProduct(c.dp), channels);
    if (x.is(M::dg_without_erase_path)) c.dg_erase.setZero();
    const Matrix state_decay = decay_rows(c.G.bottomRows(1), c.k.cols());
    Matrix state = c.S.cwiseProduct(dS_out).rowwise().sum().transpose();  // [1, K]
    if (!x.is(M::dg_last_row_without_decay)) state = state.cwiseProduct(state_decay);
    const Matrix last_row = sum_columns(c.k.cwiseProduct(kw).colwise().sum() + state, channels);
    if (x.is(M::dg_without_last_row)) return;
    if (x.is(M::dg_last_row_everywhere))
        c.dg.rowwise() += last_row.row(0);
    else
        c.dg.row(last) += last_row.row(0);
}

}  // namespace

Matrix backward(const DeltaKernel& x, DeltaChunk& c, const Matrix& dS_out) {
    const Index K = c.k.cols();
    const Matrix h = x.r(c.S), dh = x.r(dS_out);
    const Matrix to_last = decay_rows(up_to_last(c.G), K);
    const Matrix kg = x.r(c.k.cwiseProduct(to_last)), qg = x.r(c.q.cwiseProduct(decay_rows(c.G, K)));
    const Matrix dv_local = x.r(c.score.transpose() * c.d_o);
    const Matrix du = x.is(M::du_without_state) ? dv_local : x.r(dv_local + kg * dh);
    const Matrix dscore = x.r(tril(c.d_o * c.v_new.transpose()));
    const Matrix state_decay = decay_rows(c.G.bottomRows(1), K).transpose();
    Matrix dS = dS_out;
    if (!x.is(M::dstate_without_decay)) dS = state_decay.col(0).asDiagonal() * dS_out;
    dS += x.scale * (qg.transpose() * c.d_o);

    const Matrix kw = (c.v_new * dh.transpose()).cwiseProduct(to_last);
    const Matrix by_state = (c.d_o * h.transpose()).cwiseProduct(decay_rows(c.G, K));
    const Matrix by_scores = pair_sums_over_keys(dscore, c.G, c.k, c.G);
    c.dq = x.is(M::dq_without_state) ? by_scores : x.is(M::dq_without_scores) ? by_state : by_state + by_scores;
    if (!x.is(M::dq_without_scale)) c.dq *= x.scale;
    const float dk_scale = x.is(M::dk_without_scale) ? 1 : x.is(M::dk_scaled_twice) ? x.scale * x.scale : x.scale;
    c.dk = dk_scale * pair_sums_over_queries(dscore, c.q, c.G, c.G);
    if (!x.is(M::dk_without_write)) c.dk += kw;
    if (x.rule.erase == core::Erase::nothing) {
        c.dp = Matrix::Zero(c.k.rows(), K);
        c.dv = du;
    } else {
        const ErasePath path = backward_inverse(x, c, du);
        dS += path.dS;
        c.dk += path.dk;
    }
    differentiate_gate(x, c, kw, dS_out);
    return dS;
}

}  // namespace softdelta::test
