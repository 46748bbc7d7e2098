// The floating-point environment that results are computed in.
#pragma once

#include <cfenv>

namespace softdelta::core {

// Rounding to nearest, subnormals kept, whatever the thread was set to; put back at the end. On x86-64 the control word
// of vectors is all of it: fenv sets that of the x87, too, which takes a fifth of a microsecond.
class DefaultFloatingPoint {
  public:
#if defined(__x86_64__)
    DefaultFloatingPoint() : saved_(__builtin_ia32_stmxcsr()) {
        __builtin_ia32_ldmxcsr(0x1f80);
    }
    ~DefaultFloatingPoint() {
        __builtin_ia32_ldmxcsr(saved_);
    }
#else
    DefaultFloatingPoint() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatingPoint() {
        std::fesetenv(&saved_);
    }
#endif
    DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
    DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

  private:
#if defined(__x86_64__)
    unsigned saved_;
#else
    std::fenv_t saved_;
#endif
};

}  // namespace softdelta::core
