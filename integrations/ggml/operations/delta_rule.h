// What operations share that are delta rules: states that they leave behind, and their call of the library.
#pragma once

#include <softdelta/softdelta.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace softdelta_ggml {

// Slot 0 holds the last state, slot s the one s tokens before the end. run(begin, count, slot) computes these tokens
// and leaves their state in `slot`: all but the last few in calls of at most `most` tokens by way of slot 0, then token
// by token those that have a slot of their own.
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

inline std::string delta_forward(const softdelta_delta_inputs& in, DLTensor* o, DLTensor* final_state,
                                 const softdelta_delta_options& options, int threads) {
    softdelta_execution execution = softdelta_execution_default();
    execution.threads = threads;
    softdelta_delta_outputs out = softdelta_delta_outputs_default();
    out.o = o;
    out.final_state = final_state;
    if (softdelta_delta_forward(&in, &out, &options, &execution) == SOFTDELTA_OK) return "";
    return softdelta_last_error();
}

}  // namespace softdelta_ggml
