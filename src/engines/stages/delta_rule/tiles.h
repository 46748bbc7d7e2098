// Tiles of the delta rules: row-major Eigen matrices, safe exponentials of gate sums, and products with a gate's decay.
#pragma once

#include <Eigen/Core>
#include <limits>

#include "core/tensor.h"
#include "engines/stages/products.h"

namespace softdelta::stages::delta {

using core::Index;
using core::Tensor;

// A matrix with its own memory. Eigen's gives its memory back before it takes more, and still points there when it gets
// none: its destructor then frees it a second time. This one is empty by then.
template <class Plain>
class Owned : public Plain {
    struct NoAlias {
        Owned& x;
        template <class X>
        void operator=(const Eigen::MatrixBase<X>& y) {
            x.resize(y.rows(), y.cols());
            x.Plain::noalias() = y;
        }
        template <class X>
        void operator+=(const Eigen::MatrixBase<X>& y) {
            x.Plain::noalias() += y;
        }
        template <class X>
        void operator-=(const Eigen::MatrixBase<X>& y) {
            x.Plain::noalias() -= y;
        }
    };

  public:
    Owned() = default;
    Owned(const Owned&) = default;
    Owned(Owned&&) noexcept = default;
    template <class X>
    Owned(const Eigen::EigenBase<X>& x) : Plain(x.derived()) {}

    Owned& operator=(Owned&&) noexcept = default;
    Owned& operator=(const Owned& x) { return *this = static_cast<const Eigen::DenseBase<Plain>&>(x); }
    template <class X>
    Owned& operator=(const Eigen::DenseBase<X>& x) {
        resize(x.rows(), x.cols());
        Plain::operator=(x.derived());
        return *this;
    }
    NoAlias noalias() { return {*this}; }

    void resize(Index rows, Index cols) {
        if (rows * cols != this->size()) Plain().swap(*this);
        Plain::resize(rows, cols);
    }
    void resize(Index n) { resize(rows_of(n), cols_of(n)); }  // a vector
    using Plain::setZero;
    void setZero(Index rows, Index cols) { *this = Plain::Zero(rows, cols); }
    void setZero(Index n) { *this = Plain::Zero(n); }
    void setOnes(Index n) { *this = Plain::Ones(n); }
    void setIdentity(Index rows, Index cols) { *this = Plain::Identity(rows, cols); }

  private:
    static constexpr Index rows_of(Index n) { return Plain::RowsAtCompileTime == 1 ? 1 : n; }
    static constexpr Index cols_of(Index n) { return Plain::ColsAtCompileTime == 1 ? 1 : n; }
};

template <class T>
using Vector = Eigen::Matrix<T, Eigen::Dynamic, 1>;
template <class T>
using Tile = Owned<Matrix<T>>;
template <class T>
using Column = Owned<Vector<T>>;
template <class T>
using Line = Owned<Eigen::Matrix<T, 1, Eigen::Dynamic>>;
template <class T>
using Rows = Eigen::Map<const Matrix<T>>;  // some rows of a longer tile
template <class T>
using Numbers = Eigen::Map<const Vector<T>>;

// x ← e^x. What is below the smallest normal number becomes 0: a wiped state is wiped, and no product has subnormals.
// What is beyond the largest number becomes that number, so that a state of 0 stays 0.
template <class T>
void exponentiate(T* x, Index n) {
    constexpr T smallest = std::numeric_limits<T>::min(), largest = std::numeric_limits<T>::max();
    Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>> all(x, n);
    all = all.exp();
    for (Index i = 0; i < n; ++i) x[i] = x[i] < smallest ? T(0) : x[i] > largest ? largest : x[i];
}

// out ← a − b, taken in f64 and rounded once.
template <class T>
void subtract(const double* a, const double* b, Index n, T* out) {
    for (Index i = 0; i < n; ++i) out[i] = static_cast<T>(a[i] - b[i]);
}

// A gate is [n, K], or [n, 1] when all channels share it; so is everything below called decay or gate.

// out ← x∘decay.
template <class T, class X, class D>
void decay_rows(const Eigen::MatrixBase<X>& x, const Eigen::MatrixBase<D>& decay, Tile<T>& out) {
    if (decay.cols() == 1)
        out = x.array().colwise() * decay.col(0).array();
    else
        out = x.cwiseProduct(decay);
}

// x∘y as the gate sees it: summed over the channels that share one.
template <class T, class X, class Y>
void multiply_for_gate(const Eigen::MatrixBase<X>& x, const Eigen::MatrixBase<Y>& y, Index channels, Tile<T>& out) {
    if (channels == 1)
        out = x.cwiseProduct(y).rowwise().sum();
    else
        out = x.cwiseProduct(y);
}

// The gate of row s decays what rows before it send to rows from it on. terms.row(j): the sum over pairs of row j with
// later ones, and with the state that leaves. It counts for every s > j.
template <class X, class Y>
void add_spans_after(const Eigen::MatrixBase<X>& terms, Y&& spans) {
    Line<typename X::Scalar> sum = Line<typename X::Scalar>::Zero(terms.cols());
    for (Index s = 0; s < terms.rows(); ++s) {
        spans.row(s) += sum;
        sum += terms.row(s);
    }
}

// terms.row(i): the sum over pairs of row i with earlier ones, and with the state that enters. It counts for every
// s ≤ i, or s < i when row i reads the state before its own decay.
template <class X, class Y>
void add_spans_up_to(const Eigen::MatrixBase<X>& terms, bool before_decay, Y&& spans) {
    Line<typename X::Scalar> sum = Line<typename X::Scalar>::Zero(terms.cols());
    for (Index s = terms.rows() - 1; s >= 0; --s) {
        if (before_decay) spans.row(s) += sum;
        sum += terms.row(s);
        if (!before_decay) spans.row(s) += sum;
    }
}

}  // namespace softdelta::stages::delta
