// Products of row-major tiles. Eigen's code of one is long, and so each is compiled once. Operands and out are tiles or
// blocks of them.
#pragma once

#include <Eigen/Core>
#include <type_traits>

namespace softdelta::stages {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class Out>
using ScalarOf = typename std::decay_t<Out>::Scalar;
template <class T>
using Operand = Eigen::Ref<const Matrix<T>>;
template <class Out>
using OperandOf = Operand<ScalarOf<Out>>;

namespace products {

// out += factor·a·b, and with aᵀ, or bᵀ.
template <class T>
void add(T factor, const Operand<T>& a, const Operand<T>& b, Eigen::Ref<Matrix<T>> out);
template <class T>
void add_at(T factor, const Operand<T>& a, const Operand<T>& b, Eigen::Ref<Matrix<T>> out);
template <class T>
void add_bt(T factor, const Operand<T>& a, const Operand<T>& b, Eigen::Ref<Matrix<T>> out);

template <class Out>
void clear(Out&& out, Eigen::Index rows, Eigen::Index cols) {
    out.resize(rows, cols);
    out.setZero();
}

}  // namespace products

template <class Out>
void add_product(ScalarOf<Out> factor, const OperandOf<Out>& a, const OperandOf<Out>& b, Out&& out) {
    products::add<ScalarOf<Out>>(factor, a, b, out);
}
template <class Out>
void add_product_at(ScalarOf<Out> factor, const OperandOf<Out>& a, const OperandOf<Out>& b, Out&& out) {
    products::add_at<ScalarOf<Out>>(factor, a, b, out);
}
template <class Out>
void add_product_bt(ScalarOf<Out> factor, const OperandOf<Out>& a, const OperandOf<Out>& b, Out&& out) {
    products::add_bt<ScalarOf<Out>>(factor, a, b, out);
}

// The same, with nothing in out before.
template <class Out>
void multiply(ScalarOf<Out> factor, const OperandOf<Out>& a, const OperandOf<Out>& b, Out&& out) {
    products::clear(out, a.rows(), b.cols());
    products::add<ScalarOf<Out>>(factor, a, b, out);
}
template <class Out>
void multiply_at(ScalarOf<Out> factor, const OperandOf<Out>& a, const OperandOf<Out>& b, Out&& out) {
    products::clear(out, a.cols(), b.cols());
    products::add_at<ScalarOf<Out>>(factor, a, b, out);
}
template <class Out>
void multiply_bt(ScalarOf<Out> factor, const OperandOf<Out>& a, const OperandOf<Out>& b, Out&& out) {
    products::clear(out, a.rows(), b.rows());
    products::add_bt<ScalarOf<Out>>(factor, a, b, out);
}

}  // namespace softdelta::stages
