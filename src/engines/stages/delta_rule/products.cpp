#include "engines/stages/delta_rule/products.h"

namespace softdelta::stages::delta {

template <class T>
void multiply(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out) {
    out.noalias() = factor * a * b;
}
template <class T>
void multiply_at(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out) {
    out.noalias() = factor * a.transpose() * b;
}
template <class T>
void multiply_bt(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out) {
    out.noalias() = factor * a * b.transpose();
}
template <class T>
void add_product(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out) {
    out.noalias() += factor * a * b;
}
template <class T>
void add_product_at(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out) {
    out.noalias() += factor * a.transpose() * b;
}
template <class T>
void add_product_bt(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out) {
    out.noalias() += factor * a * b.transpose();
}

template void multiply<double>(double, const Operand<double>&, const Operand<double>&, Tile<double>&);
template void multiply<float>(float, const Operand<float>&, const Operand<float>&, Tile<float>&);
template void multiply_at<double>(double, const Operand<double>&, const Operand<double>&, Tile<double>&);
template void multiply_at<float>(float, const Operand<float>&, const Operand<float>&, Tile<float>&);
template void multiply_bt<double>(double, const Operand<double>&, const Operand<double>&, Tile<double>&);
template void multiply_bt<float>(float, const Operand<float>&, const Operand<float>&, Tile<float>&);
template void add_product<double>(double, const Operand<double>&, const Operand<double>&, Tile<double>&);
template void add_product<float>(float, const Operand<float>&, const Operand<float>&, Tile<float>&);
template void add_product_at<double>(double, const Operand<double>&, const Operand<double>&, Tile<double>&);
template void add_product_at<float>(float, const Operand<float>&, const Operand<float>&, Tile<float>&);
template void add_product_bt<double>(double, const Operand<double>&, const Operand<double>&, Tile<double>&);
template void add_product_bt<float>(float, const Operand<float>&, const Operand<float>&, Tile<float>&);

}  // namespace softdelta::stages::delta
