// σ and softplus, by an exponential that does not overflow.
#pragma once

#include <algorithm>
#include <cmath>

namespace softdelta::reference {

inline double sigmoid(double x) {
    const double e = std::exp(-std::abs(x));
    return (x >= 0 ? 1 : e) / (1 + e);
}

inline double softplus(double x) {
    return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

}  // namespace softdelta::reference
