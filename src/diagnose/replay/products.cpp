#include "diagnose/replay/dense.h"

namespace softdelta::diagnose {

Matrix multiply(const Operand& a, const Operand& b, double factor) {
    return factor * a * b;
}
Matrix multiply_at(const Operand& a, const Operand& b, double factor) {
    return factor * a.transpose() * b;
}
Matrix multiply_bt(const Operand& a, const Operand& b, double factor) {
    return factor * a * b.transpose();
}

}  // namespace softdelta::diagnose
