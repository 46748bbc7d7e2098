// Random numbers, the same as the standard library's: its distributions compute a logarithm of long double for each
// number where the compiler does not do so beforehand, which clang never does.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>

namespace softdelta::test {

using Random = std::mt19937_64;

// Of [0, 1).
inline double draw_unit(Random& random) {
    return std::min(static_cast<double>(random()) * 0x1p-64, 0x1.fffffffffffffp-1);
}

// Standard normal numbers, two at a time by the polar method.
class Normal {
  public:
    double operator()(Random& random) {
        if (kept_) {
            kept_ = false;
            return other_;
        }
        double x = 0, y = 0, square = 0;
        do {
            x = 2 * draw_unit(random) - 1;
            y = 2 * draw_unit(random) - 1;
            square = x * x + y * y;
        } while (square > 1 || square == 0);
        const double factor = std::sqrt(-2 * std::log(square) / square);
        kept_ = true;
        other_ = x * factor;
        return y * factor;
    }

  private:
    bool kept_ = false;
    double other_ = 0;
};

}  // namespace softdelta::test
