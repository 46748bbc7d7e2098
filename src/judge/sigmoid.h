// σ and softplus in f64, for whatever judges. Engines have their own: what judges and what is judged have no arithmetic
// in common.
#pragma once

#include <algorithm>
#include <cmath>

namespace softdelta::judge {

inline double sigmoid(double x) {
    return 1 / (1 + std::exp(-x));
}
inline double softplus(double x) {
    return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

}  // namespace softdelta::judge
