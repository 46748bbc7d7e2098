#include "diagnose/replay/decay.h"

#include <algorithm>
#include <cmath>

namespace softdelta::diagnose {

namespace {

// e^(X_i − Y_j) of one gate. Erasing from the previous state, a row of itself has a positive exponent; only a mistake
// counts that pair, undecayed.
Matrix decay_pairs(const Pairs& pairs, Index channel) {
    const Index n = pairs.X.rows();
    Matrix d = Matrix::Zero(n, n);
    for (Index i = 0; i < n; ++i) {
        for (Index j = 0; j < i; ++j) d(i, j) = std::exp(pairs.X(i, channel) - pairs.Y(j, channel));
        for (Index j = i; j < (pairs.above ? n : i + 1); ++j)
            d(i, j) = std::exp(std::min(pairs.X(i, channel) - pairs.Y(j, channel), 0.0));
    }
    return d;
}

// Where sums of gates span less than f64's exponents, e^(X − Y) is a product: e^(X − m) e^(m − Y).
struct Factors {
    bool exist = false;
    Matrix of_x, of_y;
};

Factors factors(const Pairs& pairs) {
    constexpr double most = 600;
    const auto top = pairs.X.colwise().maxCoeff().cwiseMax(pairs.Y.colwise().maxCoeff()).eval();
    const auto bottom = pairs.X.colwise().minCoeff().cwiseMin(pairs.Y.colwise().minCoeff()).eval();
    if (pairs.above || !((top - bottom).maxCoeff() < most)) return {};
    const Eigen::RowVectorXd middle = (top + bottom) / 2;
    return {true, (pairs.X.rowwise() - middle).array().exp(), (-(pairs.Y.rowwise() - middle)).array().exp()};
}

}  // namespace

Matrix Pairs::products(const Matrix& x, const Matrix& y) const {
    if (X.cols() == 1) return multiply_bt(x, y).cwiseProduct(decay_pairs(*this, 0));
    if (const Factors f = factors(*this); f.exist)
        return tril(multiply_bt(x.cwiseProduct(f.of_x), y.cwiseProduct(f.of_y)));
    Matrix sum = Matrix::Zero(x.rows(), y.rows());
    for (Index c = 0; c < X.cols(); ++c) sum += (x.col(c) * y.col(c).transpose()).cwiseProduct(decay_pairs(*this, c));
    return sum;
}

Matrix Pairs::sum_earlier(const Matrix& m, const Matrix& y) const {
    if (X.cols() == 1) return multiply(m.cwiseProduct(decay_pairs(*this, 0)), y);
    if (const Factors f = factors(*this); f.exist)
        return multiply(tril(m), y.cwiseProduct(f.of_y)).cwiseProduct(f.of_x);
    Matrix sum(m.rows(), y.cols());
    for (Index c = 0; c < X.cols(); ++c) sum.col(c) = m.cwiseProduct(decay_pairs(*this, c)) * y.col(c);
    return sum;
}

Matrix Pairs::sum_later(const Matrix& m, const Matrix& x) const {
    if (X.cols() == 1) return multiply_at(m.cwiseProduct(decay_pairs(*this, 0)), x);
    if (const Factors f = factors(*this); f.exist)
        return multiply_at(tril(m), x.cwiseProduct(f.of_x)).cwiseProduct(f.of_y);
    Matrix sum(m.cols(), x.cols());
    for (Index c = 0; c < X.cols(); ++c) sum.col(c) = m.cwiseProduct(decay_pairs(*this, c)).transpose() * x.col(c);
    return sum;
}

Matrix decay_rows(const Matrix& X, Index K) {
    return X.array().exp().matrix().replicate(1, K / X.cols());
}

Matrix sum_channels(const Matrix& x, Index channels) {
    return channels == 1 ? Matrix(x.rowwise().sum()) : x;
}

}  // namespace softdelta::diagnose
