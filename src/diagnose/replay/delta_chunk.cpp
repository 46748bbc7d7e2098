#include "diagnose/replay/delta_chunk.h"

#include "diagnose/replay/decay.h"

namespace softdelta::diagnose {

namespace {

using M = Mistake;

// e^(G_last − G), [n, K]
Matrix decay_to_last(const DeltaKernel& kernel, const char* place, const DeltaOperands& in) {
    const Matrix exponents = in.G.bottomRows(1).replicate(in.G.rows(), 1) - in.G;
    return decay_rows(kernel.at.exponents(place, exponents), in.k.cols());
}

// e^(times · G_last) of each row of the state.
Vector state_decay(const DeltaKernel& kernel, const char* place, const DeltaOperands& in, double times = 1) {
    return decay_rows(kernel.at.exponents(place, times * in.G.bottomRows(1)), in.k.cols()).transpose();
}

void solve(const DeltaKernel& kernel, const DeltaOperands& in, DeltaForward& out) {
    const Index n = in.k.rows();
    Changer& at = kernel.at;
    const Matrix E = at.exponents("L.decay", in.E), G = at.exponents("L.decay", in.G);
    const Matrix pairs = in.beta.asDiagonal() * Pairs{E, G}.products(in.p, in.k);
    Matrix L = kernel.has(M::erase_with_diagonal) ? tril(pairs) : stril(pairs);
    at.value("L", L, &in.beta);
    out.A = Matrix::Identity(n, n) - L;
    if (!kernel.has(M::inverse_first_order))
        out.A = (Matrix::Identity(n, n) + L).triangularView<Eigen::Lower>().solve(Matrix::Identity(n, n));
    at.value("A", out.A, &in.beta);
    out.erase_key = in.p;
    const Matrix decay = decay_rows(at.exponents("erase_key.decay", in.E), in.p.cols());
    if (!kernel.has(M::w_without_decay)) out.erase_key = in.p.cwiseProduct(decay);
    if (!kernel.has(M::w_without_beta)) out.erase_key = in.beta.asDiagonal() * out.erase_key;
    at.value("erase_key", out.erase_key, &in.beta);
    out.beta_v = in.v;
    if (!kernel.has(M::u_without_beta)) out.beta_v = in.beta.asDiagonal() * in.v;
    at.value("beta_v", out.beta_v, &in.beta);
    out.w = multiply(out.A, out.erase_key);
    at.value("w", out.w, &in.beta);
    out.v_new = multiply(out.A, out.beta_v);
    at.value("u", out.v_new, &in.beta);
    Matrix S = out.S;
    at.value("S in w S", S);
    Matrix erased = multiply(out.w, S);
    at.value("w S", erased, &in.beta);
    if (!kernel.has(M::v_new_ignores_state)) out.v_new -= erased;
}

// dL = −stril(Aᵀ dA Aᵀ)
Matrix inverse_gradient(const DeltaKernel& kernel, const Matrix& A, const Matrix& dA) {
    const bool left = kernel.has(M::dL_left_not_transposed) || kernel.has(M::dL_not_transposed);
    const bool right = kernel.has(M::dL_right_not_transposed) || kernel.has(M::dL_not_transposed);
    const Matrix At = A.transpose();
    Matrix dL = -multiply(multiply(left ? A : At, dA), right ? A : At);
    if (kernel.has(M::dL_unmasked)) return dL;
    return kernel.has(M::dL_with_diagonal) ? tril(dL) : stril(dL);
}

// What goes through A: to p, k, v, β, and the state that entered.
void unsolve(const DeltaKernel& kernel, const DeltaOperands& in, const DeltaForward& kept, const Matrix& du,
             DeltaBackward& out) {
    Changer& at = kernel.at;
    const double sign = kernel.has(M::dw_sign) ? 1 : -1;
    Matrix S = kept.S;
    at.value("S in dw", S);
    Matrix dw = multiply_bt(du, S, sign);
    at.value("dw", dw, &in.beta);
    Matrix dA = multiply_bt(du, kept.beta_v), dA_of_w = multiply_bt(dw, kept.erase_key);
    at.value("du (β v)ᵀ", dA, &in.beta);
    at.value("dw erase_keyᵀ", dA_of_w, &in.beta);
    if (!kernel.has(M::dA_without_w)) dA += dA_of_w;
    at.value("dA", dA, &in.beta);
    Matrix dL = inverse_gradient(kernel, kept.A, dA);
    at.value("dL", dL, &in.beta);
    Matrix dbeta_v = multiply_at(kept.A, du), derase_key = multiply_at(kept.A, dw);
    at.value("Aᵀ du", dbeta_v, &in.beta);
    at.value("Aᵀ dw", derase_key, &in.beta);

    const auto pairs = [&](const char* place) {
        return Pairs{at.exponents(place, in.E), at.exponents(place, in.G), kernel.has(M::dL_unmasked)};
    };
    Matrix e = derase_key.cwiseProduct(decay_rows(at.exponents("e from S.decay", in.E), in.p.cols()));
    at.value("e from S", e, &in.beta);
    Matrix e_of_scores = pairs("e from L.decay").sum_earlier(dL, in.k);
    at.value("e from L", e_of_scores, &in.beta);
    e += e_of_scores;
    at.value("e", e, &in.beta);
    if (!kernel.has(M::dk_without_erase_scores)) {
        Matrix dk = pairs("dk from L.decay").sum_later(dL, in.beta.asDiagonal() * in.p);
        at.value("dk from L", dk, &in.beta);
        out.dk += dk;
    }
    out.dp = in.beta.asDiagonal() * e;
    at.value("dp", out.dp, &in.beta);
    out.dv = dbeta_v;
    if (!kernel.has(M::dv_without_beta)) out.dv = in.beta.asDiagonal() * dbeta_v;
    at.value("dv", out.dv, &in.beta);
    out.dbeta = Vector::Zero(in.v.rows());
    if (!kernel.has(M::dbeta_without_value_path)) out.dbeta = dbeta_v.cwiseProduct(in.v).rowwise().sum();
    at.value("rowsum(dR∘v)", out.dbeta, &in.beta);
    Vector by_key = e.cwiseProduct(in.p).rowwise().sum();
    at.value("rowsum(p∘e)", by_key, &in.beta);
    if (!kernel.has(M::dbeta_without_key_path)) out.dbeta += by_key;
    if (kernel.has(M::dbeta_with_beta)) out.dbeta = out.dbeta.cwiseProduct(in.beta).eval();
    at.value("dβ", out.dbeta, &in.beta);
    Matrix erased = multiply_at(kept.w, du);
    at.value("wᵀ dU", erased);
    if (!kernel.has(M::dstate_without_erase)) out.dS -= erased;
}

// dG = q∘dq − k∘dk, and in the last row what e^G_last rules; dE = p∘dp.
void gate_gradient(const DeltaKernel& kernel, const DeltaOperands& in, const DeltaForward& kept, const Matrix& dS,
                   const Matrix& kw, DeltaBackward& out) {
    const Index channels = in.G.cols(), last = in.G.rows() - 1;
    Changer& at = kernel.at;
    out.dG = sum_channels(in.q.cwiseProduct(out.dq), channels);
    at.value("q∘dq", out.dG, &in.beta);
    Matrix by_key = sum_channels(in.k.cwiseProduct(out.dk), channels);
    at.value("k∘dk", by_key, &in.beta);
    out.dG -= by_key;
    out.dE = sum_channels(in.p.cwiseProduct(out.dp), channels);
    at.value("p∘dp", out.dE, &in.beta);
    if (kernel.has(M::dg_without_erase_path)) out.dE.setZero();
    Matrix by_write = in.k.cwiseProduct(kw).colwise().sum();
    at.value("Σ k∘kw", by_write);
    Matrix by_decay = kept.S.cwiseProduct(dS).rowwise().sum().transpose();
    if (!kernel.has(M::dg_last_row_without_decay))
        by_decay = by_decay.cwiseProduct(state_decay(kernel, "S∘dS'.decay", in).transpose()).eval();
    at.value("S∘dS'", by_decay);
    const Matrix last_row = sum_channels(Matrix(by_write + by_decay), channels);
    if (kernel.has(M::dg_last_row_everywhere))
        out.dG.rowwise() += last_row.row(0);
    else if (!kernel.has(M::dg_without_last_row))
        out.dG.row(last) += last_row.row(0);
}

}  // namespace

void forward(const DeltaKernel& kernel, const DeltaOperands& in, Matrix& S, DeltaForward& out) {
    const Index K = in.k.cols();
    Changer& at = kernel.at;
    at.value("S", S);
    out.S = S;
    const Matrix G = at.exponents("score.decay", in.G);
    const bool unmasked = at.has("score", Change::unmasked);
    const Matrix score = kernel.scale * Pairs{G, G, unmasked}.products(in.q, in.k);
    out.score = unmasked ? score : kernel.has(M::score_without_diagonal) ? stril(score) : tril(score);
    at.value("score", out.score, &in.beta);
    if (!kernel.rule.erases())
        out.v_new = in.v;
    else
        solve(kernel, in, out);
    const double scale = kernel.has(M::o_without_scale) ? 1 : kernel.scale;
    at.value("v_new", out.v_new, &in.beta);
    Matrix v_new = out.v_new;
    at.value("v_new in o", v_new, &in.beta);
    out.o = multiply(out.score, v_new);
    at.value("score v_new", out.o, &in.beta);
    const Matrix from_first = decay_rows(at.exponents("read_query.decay", in.G), K);
    const Matrix read = kernel.has(M::read_query_without_decay) ? in.q : in.q.cwiseProduct(from_first);
    Matrix from = S;
    at.value("S in o", from);
    Matrix by_state = multiply(read, from, scale);
    at.value("read_query S", by_state, &in.beta);
    if (!kernel.has(M::o_without_state)) out.o += by_state;
    at.value("o", out.o, &in.beta);
    const double times = kernel.has(M::state_decayed_twice) ? 2 : kernel.has(M::state_not_decayed) ? 0 : 1;
    Matrix write_key = in.k;
    if (!kernel.has(M::write_key_without_decay))
        write_key = in.k.cwiseProduct(decay_to_last(kernel, "write_key.decay", in));
    at.value("write_key", write_key, &in.beta);
    v_new = out.v_new;
    at.value("v_new in S'", v_new, &in.beta);
    S = state_decay(kernel, "state_decay", in, times).asDiagonal() * S;
    at.value("state_decay∘S", S);
    Matrix written = multiply_at(write_key, v_new);
    at.value("write_keyᵀ v_new", written);
    S += written;
    at.value("S'", S);
    if (kernel.has(M::state_bf16)) S = S.unaryExpr(&to_bf16_and_back);
}

void backward(const DeltaKernel& kernel, const DeltaOperands& in, const DeltaForward& kept, const Matrix& given_dS,
              DeltaBackward& out) {
    const Index K = in.k.cols();
    Changer& at = kernel.at;
    Matrix dS = given_dS;
    at.value("dS'", dS);
    Matrix d_o = in.d_o;
    at.value("do", d_o, &in.beta);
    Matrix du = multiply_at(kept.score, d_o);
    if (kernel.mistakes.changes("scoreᵀ do.decay")) {
        const Matrix G = at.exponents("scoreᵀ do.decay", in.G);
        du = kernel.scale * multiply_at(tril(Pairs{G, G, false}.products(in.q, in.k)), d_o);
    }
    at.value("scoreᵀ do", du, &in.beta);
    if (!kernel.has(M::du_without_state)) {
        Matrix by_state = multiply(in.k.cwiseProduct(decay_to_last(kernel, "write_key dS'.decay", in)), dS);
        at.value("write_key dS'", by_state, &in.beta);
        du += by_state;
    }
    at.value("dU", du, &in.beta);
    Matrix v_new = kept.v_new;
    at.value("v_new in dscore", v_new, &in.beta);
    const bool unmasked = at.has("dscore", Change::unmasked);
    Matrix dscore = multiply_bt(d_o, v_new);
    if (!unmasked) dscore = tril(dscore);
    at.value("dscore", dscore, &in.beta);
    const auto pairs = [&](const char* place) {
        const Matrix G = at.exponents(place, in.G);
        return Pairs{G, G, unmasked};
    };

    out.dS = state_decay(kernel, "dS'.decay", in, kernel.has(M::dstate_without_decay) ? 0 : 1).asDiagonal() * dS;
    at.value("state_decay∘dS'", out.dS);
    const Matrix read = in.q.cwiseProduct(decay_rows(at.exponents("read_queryᵀ do.decay", in.G), K));
    Matrix by_read = multiply_at(read, d_o, kernel.scale);
    at.value("read_queryᵀ do", by_read);
    out.dS += by_read;
    out.dq = Matrix::Zero(in.q.rows(), K);
    Matrix S = kept.S;
    at.value("S in dq", S);
    Matrix by_state = multiply_bt(d_o, S).cwiseProduct(decay_rows(at.exponents("dq from S.decay", in.G), K));
    at.value("dq from S", by_state, &in.beta);
    Matrix by_scores = pairs("dq from scores.decay").sum_earlier(dscore, in.k);
    at.value("dq from scores", by_scores, &in.beta);
    if (!kernel.has(M::dq_without_state)) out.dq += by_state;
    if (!kernel.has(M::dq_without_scores)) out.dq += by_scores;
    if (!kernel.has(M::delta_dq_without_scale)) out.dq *= kernel.scale;
    at.value("dq", out.dq, &in.beta);
    const double dk_scale = kernel.has(M::delta_dk_without_scale)  ? 1
                            : kernel.has(M::delta_dk_scaled_twice) ? kernel.scale * kernel.scale
                                                                   : kernel.scale;
    v_new = kept.v_new;
    at.value("v_new in kw", v_new, &in.beta);
    Matrix kw = multiply_bt(v_new, dS).cwiseProduct(decay_to_last(kernel, "kw.decay", in));
    at.value("kw", kw, &in.beta);
    out.dk = dk_scale * pairs("dk from scores.decay").sum_later(dscore, in.q);
    at.value("dk from scores", out.dk, &in.beta);
    if (!kernel.has(M::dk_without_write)) out.dk += kw;
    if (!kernel.rule.erases()) {
        out.dp = Matrix::Zero(in.k.rows(), K);
        out.dv = du;
        at.value("dv", out.dv);
        out.dbeta = Vector::Zero(in.k.rows());
    } else {
        unsolve(kernel, in, kept, du, out);
    }
    at.value("dk", out.dk, &in.beta);
    gate_gradient(kernel, in, kept, dS, kw, out);
    at.value("dS", out.dS);
}

}  // namespace softdelta::diagnose
