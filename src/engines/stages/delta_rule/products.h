// Products of tiles. Eigen's code of one is long, and so each is compiled once. An operand is a tile or some rows of
// one.
#pragma once

#include "engines/stages/delta_rule/tiles.h"

namespace softdelta::stages::delta {

template <class T>
using Operand = Eigen::Ref<const Matrix<std::type_identity_t<T>>>;

// out ← factor·a·b, and with aᵀ, or bᵀ.
template <class T>
void multiply(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out);
template <class T>
void multiply_at(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out);
template <class T>
void multiply_bt(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out);

// The same on top of out.
template <class T>
void add_product(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out);
template <class T>
void add_product_at(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out);
template <class T>
void add_product_bt(std::type_identity_t<T> factor, const Operand<T>& a, const Operand<T>& b, Tile<T>& out);

}  // namespace softdelta::stages::delta
