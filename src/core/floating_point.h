// The floating-point environment that results are computed in.
#pragma once

#include <cfenv>

namespace softdelta::core {

// Rounding to nearest, subnormals kept, whatever the thread was set to; put back at the end.
class DefaultFloatingPoint {
  public:
    DefaultFloatingPoint() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatingPoint() { std::fesetenv(&saved_); }
    DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
    DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

  private:
    std::fenv_t saved_;
};

}  // namespace softdelta::core
