// Sums over pairs of rows of a chunk, each decayed by the gates between them.
#pragma once

#include "diagnose/replay/dense.h"

namespace softdelta::diagnose {

// x, X belong to the later row i of a pair, y, Y to the earlier row j; X and Y are sums of Kg gates, 1 or K.
struct Pairs {
    Matrix X;            // [n, Kg]
    Matrix Y;            // [n, Kg]
    bool above = false;  // pairs with j > i count too, undecayed

    Matrix products(const Matrix& x, const Matrix& y) const;     // Σ_m x_im y_jm e^(X_im − Y_jm), [n, n]
    Matrix sum_earlier(const Matrix& m, const Matrix& y) const;  // Σ_j m_ij y_j e^(X_i − Y_j), [n, K]
    Matrix sum_later(const Matrix& m, const Matrix& x) const;    // Σ_i m_ij x_i e^(X_i − Y_j), [n, K]
};

// e^X with a gate's number in each of the K columns that it rules: [n, K]
Matrix decay_rows(const Matrix& X, Index K);

// Columns of one gate channel added up: [n, Kg]
Matrix sum_channels(const Matrix& x, Index channels);

inline Matrix tril(const Matrix& x) {
    return x.triangularView<Eigen::Lower>();
}
inline Matrix stril(const Matrix& x) {
    return x.triangularView<Eigen::StrictlyLower>();
}

}  // namespace softdelta::diagnose
