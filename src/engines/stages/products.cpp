#include "engines/stages/products.h"

namespace softdelta::stages::products {

template <class T>
void add(T factor, const Operand<T>& a, const Operand<T>& b, Eigen::Ref<Matrix<T>> out) {
    out.noalias() += factor * a * b;
}
template <class T>
void add_at(T factor, const Operand<T>& a, const Operand<T>& b, Eigen::Ref<Matrix<T>> out) {
    out.noalias() += factor * a.transpose() * b;
}
template <class T>
void add_bt(T factor, const Operand<T>& a, const Operand<T>& b, Eigen::Ref<Matrix<T>> out) {
    out.noalias() += factor * a * b.transpose();
}

template void add(double, const Operand<double>&, const Operand<double>&, Eigen::Ref<Matrix<double>>);
template void add(float, const Operand<float>&, const Operand<float>&, Eigen::Ref<Matrix<float>>);
template void add_at(double, const Operand<double>&, const Operand<double>&, Eigen::Ref<Matrix<double>>);
template void add_at(float, const Operand<float>&, const Operand<float>&, Eigen::Ref<Matrix<float>>);
template void add_bt(double, const Operand<double>&, const Operand<double>&, Eigen::Ref<Matrix<double>>);
template void add_bt(float, const Operand<float>&, const Operand<float>&, Eigen::Ref<Matrix<float>>);

}  // namespace softdelta::stages::products
