// How far a large dump is from the library's own fast path, which takes moments: what to examine is chosen by it. No
// verdict rests on it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "diagnose/sampling/sample.h"

namespace softdelta::diagnose {

struct Screen {
    std::int64_t groups = 1;
    // By result, RMS(result − fast) / RMS(fast) at [sequence × groups + group]; NaN where nothing belongs to those.
    // Empty when the fast path cannot compute the call.
    std::map<std::string, std::vector<double>> ratios;
};

Screen compare_with_fast(const io::Call& call, const std::map<std::string, Tensor>& results, int threads);

// What was examined, in words, and what the comparison says of the rest, given the limit of each result.
std::vector<std::string> describe_selection(const io::Call& call, const Selection& selection, const Screen& screen,
                                            const std::map<std::string, double>& limits,
                                            const std::vector<std::string>& left_out);

}  // namespace softdelta::diagnose
