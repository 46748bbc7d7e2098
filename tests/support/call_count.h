// How many calls a test draws.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace softdelta::test {

// SOFTDELTA_CALLS, else the test's own number; SOFTDELTA_MOST_CALLS at most. Own numbers follow what a call costs, so
// that a slow build limits them: a number for all tests would draw more of the longest calls.
inline std::int64_t call_count(std::int64_t own) {
    const char* given = std::getenv("SOFTDELTA_CALLS");
    const char* most = std::getenv("SOFTDELTA_MOST_CALLS");
    const std::int64_t count = given != nullptr ? std::atoll(given) : own;
    return most != nullptr ? std::min<std::int64_t>(count, std::atoll(most)) : count;
}

}  // namespace softdelta::test
