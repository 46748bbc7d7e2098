// Random decisions about a call. What is decided leaves its name among the call's features.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "support/array.h"

namespace softdelta::test {

class Decisions {
  public:
    Decisions(std::uint64_t seed, std::vector<std::string>& features) : random_(seed), features_(features) {}

  protected:
    Index between(Index low, Index high) {
        return std::uniform_int_distribution<Index>(low, std::max(low, high))(random_);
    }
    double real(double low, double high) { return draw_unit(random_) * (high - low) + low; }
    bool chance(double p) { return draw_unit(random_) < p; }
    bool note(bool is, const std::string& feature) {
        if (is) features_.push_back(feature);
        return is;
    }

    Random random_;

  private:
    std::vector<std::string>& features_;
};

}  // namespace softdelta::test
