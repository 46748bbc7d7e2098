// How long a call takes, and what the machine can do at most.
#pragma once

#include <functional>
#include <map>

#include "cli/bench/problem.h"

namespace softdelta::cli {

// What was measured, in s or per s. Disturbed: threads waited for a processor that others had, each time it was
// repeated.
struct Measured {
    double value = 0;
    bool disturbed = false;
};

// The median of at least five runs, of as many as fit into a third of a second, or of fewer that take 20 s; the fastest
// of its repetitions.
Measured median_seconds(const std::function<void()>& call);

// Flop/s or byte/s; each limit is measured when it is first asked for, 0 where it cannot be.
class Limits {
  public:
    explicit Limits(int threads) : threads_(threads) {}
    const std::map<Limit, Measured>& measured() const { return measured_; }

    Measured operator[](Limit limit);

  private:
    int threads_;
    std::map<Limit, Measured> measured_;
};

}  // namespace softdelta::cli
