// A range of tokens as an affine map of the state that enters it (docs/distributed.md):
//     S_out = M S_in + E         dS_in = Mᵀ dS_out + R
// No engine knows of it. E is a scan from the state 0. M is a scan of v = 0 from the identity; where a rule erases
// nothing it is one number, which a single channel from the state 1 shows. R is a gradient with dS_out = 0; it does not
// depend on v, and takes v = 0.
#pragma once

#include <vector>

#include "core/ranges.h"

namespace softdelta::distributed {

using core::Index;
using core::Tensor;

// The call whose final state is E.
core::DeltaOutputs offset_results(const core::DeltaSummary& summary);

// The call whose final state is M; holds the operands that are its own.
class MapCall {
  public:
    MapCall(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaSummary& summary);
    MapCall(const MapCall&) = delete;
    MapCall& operator=(const MapCall&) = delete;

    core::DeltaInputs in;
    core::DeltaOptions options;
    core::DeltaOutputs out;

  private:
    std::vector<float> identity_;  // [K, K]
    double zero_ = 0;              // of any type
};

// The call whose gradient of the initial state is R.
class GradientCall {
  public:
    GradientCall(const core::DeltaInputs& in, const core::DeltaSummaryGradient& gradient);
    GradientCall(const GradientCall&) = delete;
    GradientCall& operator=(const GradientCall&) = delete;

    core::DeltaInputs in;
    core::DeltaGradients out;

  private:
    double zero_ = 0;
};

}  // namespace softdelta::distributed
