// What the tests of the reference share.
#pragma once

#include <cstdint>
#include <vector>

#include "support/random_delta.h"

namespace softdelta::test {

inline Execution reference_engine() {
    Execution e;
    e.engine = "reference";
    e.threads = 1;
    return e;
}

// Several sizes of everything: more than one segment of tokens and tile of columns too.
inline RandomDelta draw_any(std::uint64_t seed, const std::vector<DType>& dtypes = {DType::f64}, bool tiled = false) {
    DeltaRanges ranges;
    ranges.tiled = ranges.steps = tiled;
    ranges.repeats = true;
    ranges.dtypes = dtypes;
    if (seed % 4 == 0) ranges.tokens = 150, ranges.value_channels = 40;
    return draw_delta(seed, ranges);
}

}  // namespace softdelta::test
