// From the gradients of chunks to those of the call: sums over heads, the gate's reverse sum, l2norm, raw gates.
#pragma once

#include "diagnose/replay/delta_operands.h"

namespace softdelta::diagnose {

class DeltaResults {
  public:
    DeltaResults(const DeltaInputs64& in, const Mistakes& mistakes)
        : in_(in), mistakes_(mistakes), results_(make_results(in.call)) {
        for (const char* name : {"o", "dq"})
            if (const auto found = results_.find(name); found != results_.end())
                found->second = in_last_steps(found->second, in.steps);
    }

    void set_output(const Place& at, Index hv, const Matrix& o);
    void set_state(const char* name, Index n, Index hv, const Matrix& S);
    // Chunks of a value head come from the last to the first.
    void add_gradients(const Place& at, Index hv, const DeltaBackward& chunk);
    Results finish();

  private:
    bool has(Mistake m) const { return mistakes_.has(m); }
    void add_gate_gradients(const Place& at, Index hv, const DeltaBackward& chunk);
    void add_gate_gradient(Index b, Index t, Index hv, Index channel, double dg);
    void differentiate_norm(const char* name, const Dense& x, bool projected);

    const DeltaInputs64& in_;
    const Mistakes& mistakes_;
    Results results_;
    Index running_head_ = -1;
    Eigen::RowVectorXd running_;  // the gate's reverse sum
};

}  // namespace softdelta::diagnose
