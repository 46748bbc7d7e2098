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
    Faulty& at = *x.fault;
    const Matrix erase_score =
        c.beta.asDiagonal() * pair_products(c.p, at.exponent("L.decay", c.E), c.k, at.exponent("L.decay", c.G));
    Matrix L = x.is(M::erase_with_diagonal) ? tril(erase_score) : stril(erase_score);
    at.matrix("L", L, c.beta);
    const Matrix one = Matrix::Identity(n, n);
    const Matrix one_and_L = one + L;
    c.A = x.is(M::inverse_first_order) ? Matrix(one - L) : Matrix(one_and_L.triangularView<Eigen::Lower>().solve(one));
    at.matrix("A", c.A, c.beta);
    c.A = x.r(c.A);
    const Matrix decay = decay_rows(at.exponent("erase_key.decay", c.E), K);
    const Matrix decayed_p = x.is(M::w_without_decay) ? c.p : Matrix(c.p.cwiseProduct(decay));
    c.erase_key = x.is(M::w_without_beta) ? decayed_p : Matrix(c.beta.asDiagonal() * decayed_p);
    at.matrix("erase_key", c.erase_key, c.beta);
    c.erase_key = x.r(c.erase_key);
    c.beta_v = x.is(M::u_without_beta) ? c.v : Matrix(c.beta.asDiagonal() * c.v);
    at.matrix("beta_v", c.beta_v, c.beta);
    c.beta_v = x.r(c.beta_v);
}

}  // namespace

Matrix forward(const DeltaKernel& x, DeltaChunk& c) {
    const Index K = c.k.cols();
    Faulty& at = *x.fault;
    at.matrix("S", c.S);
    const MatrixD G = at.exponent("score.decay", c.G);
    const Matrix score = x.scale * pair_products(c.q, G, c.k, G);
    c.score = at.is("score", "not masked") ? score : x.is(M::score_without_diagonal) ? stril(score) : tril(score);
    at.matrix("score", c.score, c.beta);
    c.score = x.r(c.score);
    const Matrix h = x.r(c.S);
    if (!x.rule.erases()) {
        c.v_new = c.v;
    } else {
        forward_inverse(x, c);
        c.u = c.A * c.beta_v;
        at.matrix("u", c.u, c.beta);
        c.u = x.r(c.u);
        c.w = c.A * c.erase_key;
        at.matrix("w", c.w, c.beta);
        c.w = x.r(c.w);
        Matrix read = h;
        at.matrix("S in w S", read);
        Matrix erased = c.w * read;
        at.matrix("w S", erased, c.beta);
        c.v_new = x.is(M::v_new_ignores_state) ? c.u : Matrix(c.u - erased);
    }
    at.matrix("v_new", c.v_new, c.beta);
    if (x.rule.erases()) c.v_new = x.r(c.v_new);
    const Matrix decay = decay_rows(at.exponent("read_query.decay", c.G), K);
    const Matrix qg = x.is(M::read_query_without_decay) ? c.q : x.r(c.q.cwiseProduct(decay));
    Matrix v_new = c.v_new, read = h;
    at.matrix("v_new in o", v_new, c.beta);
    at.matrix("S in o", read);
    c.o = c.score * v_new;
    at.matrix("score v_new", c.o, c.beta);
    Matrix by_state = (x.is(M::o_without_scale) ? 1 : x.scale) * (qg * read);
    at.matrix("read_query S", by_state, c.beta);
    if (!x.is(M::o_without_state)) c.o += by_state;
    at.matrix("o", c.o, c.beta);
    const Matrix to_last = decay_rows(at.exponent("write_key.decay", up_to_last(c.G)), K);
    Matrix kg = x.is(M::write_key_without_decay) ? c.k : Matrix(c.k.cwiseProduct(to_last));
    at.matrix("write_key", kg, c.beta);
    kg = x.r(kg);
    const double times = x.is(M::state_decayed_twice) ? 2 : x.is(M::state_not_decayed) ? 0 : 1;
    const MatrixD last = times * c.G.bottomRows(1);
    const Matrix state_decay = decay_rows(at.exponent("state_decay", last), K).transpose();  // [K, 1]
    v_new = c.v_new;
    at.matrix("v_new in S'", v_new, c.beta);
    Matrix kept = state_decay.col(0).asDiagonal() * c.S, written = kg.transpose() * v_new;
    at.matrix("state_decay∘S", kept);
    at.matrix("write_keyᵀ v_new", written);
    Matrix S = kept + written;
    at.matrix("S'", S);
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
    Faulty& at = *x.fault;
    Matrix h = x.r(c.S);
    at.matrix("S in dw", h);
    Matrix dw = (x.is(M::dw_sign) ? 1 : -1) * (du * h.transpose());
    at.matrix("dw", dw, c.beta);
    dw = x.r(dw);
    Matrix dA = du * c.beta_v.transpose(), dA_w = dw * c.erase_key.transpose();
    at.matrix("du (β v)ᵀ", dA, c.beta);
    at.matrix("dw erase_keyᵀ", dA_w, c.beta);
    if (!x.is(M::dA_without_w)) dA += dA_w;
    at.matrix("dA", dA, c.beta);
    Matrix dL = inverse_gradient(x, c, dA);
    at.matrix("dL", dL, c.beta);
    Matrix dbeta_v = c.A.transpose() * du, derase_key = c.A.transpose() * dw;
    at.matrix("Aᵀ du", dbeta_v, c.beta);
    at.matrix("Aᵀ dw", derase_key, c.beta);
    const Matrix beta_p = c.beta.asDiagonal() * c.p;

    ErasePath path;
    path.dS = -(c.w.transpose() * du);
    at.matrix("wᵀ dU", path.dS);
    if (x.is(M::dstate_without_erase)) path.dS.setZero();
    path.e = derase_key.cwiseProduct(decay_rows(at.exponent("e from S.decay", c.E), K));
    at.matrix("e from S", path.e, c.beta);
    Matrix by_L = pair_sums_over_keys(dL, at.exponent("e from L.decay", c.E), c.k, at.exponent("e from L.decay", c.G));
    at.matrix("e from L", by_L, c.beta);
    path.e += by_L;
    at.matrix("e", path.e, c.beta);
    path.dk =
        pair_sums_over_queries(dL, beta_p, at.exponent("dk from L.decay", c.E), at.exponent("dk from L.decay", c.G));
    at.matrix("dk from L", path.dk, c.beta);
    if (x.is(M::dk_without_erase_scores)) path.dk.setZero();
    c.dp = c.beta.asDiagonal() * path.e;
    at.matrix("dp", c.dp, c.beta);
    c.dv = dbeta_v;
    if (!x.is(M::dv_without_beta)) c.dv = c.beta.asDiagonal() * dbeta_v;
    at.matrix("dv", c.dv, c.beta);
    c.dbeta = dbeta_v.cwiseProduct(c.v).rowwise().sum();
    at.matrix("rowsum(dR∘v)", c.dbeta, c.beta);
    if (x.is(M::dbeta_without_value_path)) c.dbeta.setZero();
    Matrix by_key = path.e.cwiseProduct(c.p).rowwise().sum();
    at.matrix("rowsum(p∘e)", by_key, c.beta);
    if (!x.is(M::dbeta_without_key_path)) c.dbeta += by_key;
    if (x.is(M::dbeta_with_beta)) c.dbeta = c.beta.asDiagonal() * c.dbeta;
    at.matrix("dβ", c.dbeta, c.beta);
    return path;
}

// dg = q∘dq − k∘dk + p∘dp, and in the last row what e^(G_last) rules.
void differentiate_gate(const DeltaKernel& x, DeltaChunk& c, const Matrix& kw, const Matrix& dS_out) {
    const Index channels = c.G.cols(), last = c.G.rows() - 1;
    Faulty& at = *x.fault;
    c.dg = sum_columns(c.q.cwiseProduct(c.dq), channels);
    at.matrix("q∘dq", c.dg, c.beta);
    Matrix by_key = sum_columns(c.k.cwiseProduct(c.dk), channels);
    at.matrix("k∘dk", by_key, c.beta);
    c.dg -= by_key;
    c.dg_erase = sum_columns(c.p.cwiseProduct(c.dp), channels);
    at.matrix("p∘dp", c.dg_erase, c.beta);
    if (x.is(M::dg_without_erase_path)) c.dg_erase.setZero();
    const MatrixD G_last = c.G.bottomRows(1);
    const Matrix state_decay = decay_rows(at.exponent("S∘dS'.decay", G_last), c.k.cols());
    Matrix state = c.S.cwiseProduct(dS_out).rowwise().sum().transpose();  // [1, K]
    if (!x.is(M::dg_last_row_without_decay)) state = state.cwiseProduct(state_decay);
    at.matrix("S∘dS'", state);
    Matrix written = c.k.cwiseProduct(kw).colwise().sum();
    at.matrix("Σ k∘kw", written);
    const Matrix last_row = sum_columns(written + state, channels);
    if (x.is(M::dg_without_last_row)) return;
    if (x.is(M::dg_last_row_everywhere))
        c.dg.rowwise() += last_row.row(0);
    else
        c.dg.row(last) += last_row.row(0);
}

}  // namespace

Matrix backward(const DeltaKernel& x, DeltaChunk& c, const Matrix& given) {
    const Index K = c.k.cols();
    Faulty& at = *x.fault;
    Matrix dS_out = given;
    at.matrix("dS'", dS_out);
    Matrix d_o = c.d_o;
    at.matrix("do", d_o, c.beta);
    const Matrix h = x.r(c.S), dh = x.r(dS_out);
    const MatrixD to_last = up_to_last(c.G);
    const Matrix kg = x.r(c.k.cwiseProduct(decay_rows(at.exponent("write_key dS'.decay", to_last), K)));
    const Matrix qg = x.r(c.q.cwiseProduct(decay_rows(at.exponent("read_queryᵀ do.decay", c.G), K)));
    Matrix dv_local = c.score.transpose() * d_o;
    if (at.at("scoreᵀ do.decay")) {
        const MatrixD G = at.exponent("scoreᵀ do.decay", c.G);
        dv_local = tril(x.scale * pair_products(c.q, G, c.k, G)).transpose() * d_o;
    }
    at.matrix("scoreᵀ do", dv_local, c.beta);
    dv_local = x.r(dv_local);
    Matrix by_dh = kg * dh;
    at.matrix("write_key dS'", by_dh, c.beta);
    Matrix du = x.is(M::du_without_state) ? dv_local : Matrix(dv_local + by_dh);
    at.matrix("dU", du, c.beta);
    du = x.r(du);
    Matrix v_new = c.v_new;
    at.matrix("v_new in dscore", v_new, c.beta);
    Matrix dscore = d_o * v_new.transpose();
    if (!at.is("dscore", "not masked")) dscore = tril(dscore);
    at.matrix("dscore", dscore, c.beta);
    dscore = x.r(dscore);
    const MatrixD G_last = c.G.bottomRows(1);
    const Matrix state_decay = decay_rows(at.exponent("dS'.decay", G_last), K).transpose();
    Matrix dS = dS_out;
    if (!x.is(M::dstate_without_decay)) dS = state_decay.col(0).asDiagonal() * dS_out;
    at.matrix("state_decay∘dS'", dS);
    Matrix by_read = x.scale * (qg.transpose() * d_o);
    at.matrix("read_queryᵀ do", by_read);
    dS += by_read;

    v_new = c.v_new;
    at.matrix("v_new in kw", v_new, c.beta);
    Matrix kw = (v_new * dh.transpose()).cwiseProduct(decay_rows(at.exponent("kw.decay", to_last), K));
    at.matrix("kw", kw, c.beta);
    Matrix S = h;
    at.matrix("S in dq", S);
    Matrix by_state = (d_o * S.transpose()).cwiseProduct(decay_rows(at.exponent("dq from S.decay", c.G), K));
    at.matrix("dq from S", by_state, c.beta);
    const MatrixD G_q = at.exponent("dq from scores.decay", c.G), G_k = at.exponent("dk from scores.decay", c.G);
    Matrix by_scores = pair_sums_over_keys(dscore, G_q, c.k, G_q);
    at.matrix("dq from scores", by_scores, c.beta);
    c.dq = x.is(M::dq_without_state) ? by_scores : x.is(M::dq_without_scores) ? by_state : by_state + by_scores;
    if (!x.is(M::dq_without_scale)) c.dq *= x.scale;
    at.matrix("dq", c.dq, c.beta);
    const float dk_scale = x.is(M::dk_without_scale) ? 1 : x.is(M::dk_scaled_twice) ? x.scale * x.scale : x.scale;
    c.dk = dk_scale * pair_sums_over_queries(dscore, c.q, G_k, G_k);
    at.matrix("dk from scores", c.dk, c.beta);
    if (!x.is(M::dk_without_write)) c.dk += kw;
    if (!x.rule.erases()) {
        c.dp = Matrix::Zero(c.k.rows(), K);
        c.dv = du;
        at.matrix("dv", c.dv, c.beta);
    } else {
        const ErasePath path = backward_inverse(x, c, du);
        dS += path.dS;
        c.dk += path.dk;
    }
    at.matrix("dk", c.dk, c.beta);
    differentiate_gate(x, c, kw, dS_out);
    at.matrix("dS", dS);
    return dS;
}

}  // namespace softdelta::test
