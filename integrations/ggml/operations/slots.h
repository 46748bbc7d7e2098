// States that a scan leaves behind: slot 0 holds the last one, slot s the one s tokens before the end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace softdelta_ggml {

// run(begin, count, slot) computes these tokens and leaves their state in `slot`: all but the last few in calls of at
// most `most` tokens by way of slot 0, then token by token those that have a slot of their own.
template <class Run>
std::string run_into_slots(std::int64_t tokens, std::int64_t slots, std::int64_t most, const Run& run) {
    for (std::int64_t begin = 0, count = 0; begin < tokens; begin += count) {
        const std::int64_t left = tokens - begin;
        count = std::min(most, left > slots ? left - slots + 1 : 1);
        const std::int64_t slot = left - count < slots ? left - count : 0;
        if (std::string error = run(begin, count, slot); !error.empty()) return error;
    }
    return "";
}

}  // namespace softdelta_ggml
