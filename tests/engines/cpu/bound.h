// What tests of workspace bounds share.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "softdelta/softdelta.hpp"
#include "support/array.h"

namespace softdelta::test {

// Of the same heads and channels, without tokens and memory.
inline Tensor empty(const Tensor& t) {
    if (!t) return t;
    Shape shape(t.shape().begin(), t.shape().end());
    shape[0] = 1, shape[1] = 0;
    return {nullptr, t.dtype(), shape};
}

// bound(limits) is enough for `needed` bytes and no limit that grows makes it less.
template <class Bound>
void check_bound(const Limits& limits, std::size_t needed, const Bound& bound, Random& random,
                 const std::string& what) {
    const std::size_t bytes = bound(limits);
    EXPECT_LE(needed, bytes) << what;
    for (std::int64_t Limits::*limit : {&Limits::sequences, &Limits::tokens, &Limits::keys}) {
        Limits more = limits;
        more.*limit += static_cast<std::int64_t>(random() % (random() % 2 == 0 ? 40 : 4000));
        EXPECT_LE(bytes, bound(more)) << what;
    }
}

inline Execution draw_execution(Random& random) {
    Execution execution;
    execution.engine = "fast";
    execution.threads = static_cast<int>(1 + random() % 9);
    return execution;
}

}  // namespace softdelta::test
