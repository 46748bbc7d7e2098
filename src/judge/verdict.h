// A result's errors made into a verdict.
#pragma once

#include "judge/cancellation.h"
#include "judge/limits.h"
#include "judge/lost_scores.h"
#include "judge/verify.h"

namespace softdelta::judge {

// What is known of the call.
struct Circumstances {
    const io::Call& call;  // without quantised numbers
    const LostScores& lost;
    const Options& options;
};

Evidence evidence_of(const Case& c, const std::optional<Floor>& floor, const Circumstances& known);

}  // namespace softdelta::judge
