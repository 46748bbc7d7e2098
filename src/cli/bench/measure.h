// How long a call takes, and what the machine can do at most.
#pragma once

#include <functional>
#include <map>

#include "cli/bench/problem.h"

namespace softdelta::cli {

// The median of at least five runs, of as many as fit into a third of a second.
double median_seconds(const std::function<void()>& call);

// Flop/s or byte/s; each limit is measured when it is first asked for, 0 where it cannot be.
class Limits {
  public:
    explicit Limits(int threads) : threads_(threads) {}
    const std::map<Limit, double>& measured() const { return measured_; }

    double operator[](Limit limit);

  private:
    int threads_;
    std::map<Limit, double> measured_;
};

}  // namespace softdelta::cli
