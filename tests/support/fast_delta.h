// A drawn call of a delta rule for the fast engine: inputs and results each beside an unreadable page, results as dense
// tensors that the judge takes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/call.h"
#include "support/guarded.h"
#include "support/random_delta.h"

namespace softdelta::test {

class FastDelta {
  public:
    using Names = std::vector<std::string>;
    using Results = std::map<std::string, io::OwnedTensor>;

    explicit FastDelta(RandomDelta&& drawn);

    const RandomDelta& drawn() const { return drawn_; }
    const io::Call& call() const { return call_; }
    std::string describe() const { return drawn_.describe(); }

    // Every result that the call can have; a part of them, one at least.
    Names forward_names() const { return {"o", "final_state"}; }
    Names gradient_names() const;
    Names some(const Names& all) const;

    // Computes results in layouts drawn by the call's seed. Throws when a byte was written that belongs to none.
    Results forward(const Names& names, const Execution& execution) const;
    Results backward(const Names& names, const Execution& execution) const;

  private:
    std::map<std::string, Guarded> make_results(const Names& names) const;
    Results dense(const std::map<std::string, Guarded>& results) const;

    RandomDelta drawn_;
    Side side_;
    std::map<std::string, Guarded> given_;
    io::Call call_;
};

}  // namespace softdelta::test
