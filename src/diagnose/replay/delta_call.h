// A delta-rule call in f64, with mistakes. What a mistake does not change is computed once.
#pragma once

#include "diagnose/replay/delta_operands.h"

namespace softdelta::diagnose {

class DeltaCall {
  public:
    DeltaCall(const io::Call& call, int threads);

    // Every result of the call with these mistakes, none of which shows before `from`.
    Results run(const Mistakes& mistakes, Phase from) const;

  private:
    // One value head: an entry for each chunk, and for each sequence the state that leaves it and the gradient of the
    // one that enters.
    struct Head {
        std::vector<DeltaOperands> operands;
        std::vector<DeltaForward> forward;
        std::vector<DeltaBackward> backward;
        std::vector<Matrix> final_states, initial_gradients;
    };

    void run_forward(const DeltaKernel& kernel, Index hv, const std::vector<DeltaOperands>& operands, Head& out) const;
    void run_backward(const DeltaKernel& kernel, Index hv, const std::vector<DeltaOperands>& operands,
                      const std::vector<DeltaForward>& kept, Head& out) const;
    std::vector<DeltaOperands> load(Index hv, const DeltaKernel& kernel) const;
    double group() const { return static_cast<double>(in_.value_heads()) / static_cast<double>(in_.q.size(2)); }

    DeltaInputs64 in_;
    std::vector<Head> right_;  // without a mistake
};

}  // namespace softdelta::diagnose
