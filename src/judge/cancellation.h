// What f32 rounding alone may cost the gate gradient and what is summed from it: dg is a difference of terms q∘dq and
// k∘dk that can be far larger than it (docs/math.md, "Limits of error"). So are gradients of attention's scores.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "judge/limits.h"

namespace softdelta::judge {

// The stage tensor that holds the size of the terms of this call, dg_terms, f32 and shaped as g. Empty: this call has
// no gate gradient.
std::map<std::string, io::OwnedTensor> make_term_tensors(const io::Call& call);
// The same of the truths of dq, dk and dp, for calls of several steps, whose baseline does not tell.
std::map<std::string, io::OwnedTensor> terms_of_truths(const io::Call& call, const std::vector<Case>& cases);

struct Floor {
    double whole = 0;            // RMSE
    std::vector<double> blocks;  // RMSE of each block
    double terms = 0;            // RMS of the terms
};

// The floor of a result, block by block; nothing for results that no cancellation touches.
std::optional<Floor> cancellation_floor(const io::Call& call, const Case& c,
                                        const std::map<std::string, io::OwnedTensor>& terms);

}  // namespace softdelta::judge
