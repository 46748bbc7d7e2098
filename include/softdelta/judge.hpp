// What this machine can do at most: judge.h in C++20.
#pragma once

#include <vector>

#include "softdelta/judge.h"
#include "softdelta/softdelta.hpp"

namespace softdelta {

// What measure_ceiling measures (softdelta_ceiling).
enum class Ceiling { f32, bf16, bf16_registers };

// Floating-point operations per second that this machine can do at most, on this many threads (0: OpenMP's default).
inline double measure_ceiling(Ceiling ceiling, int threads = 0) {
    double flops_per_second = 0;
    detail::check(softdelta_measure_ceiling(static_cast<std::int32_t>(ceiling), threads, &flops_per_second));
    return flops_per_second;
}
// Loops that tell where the time of products by matrix tiles goes.
inline std::vector<softdelta_loop> measure_loops(int threads = 0) {
    std::vector<softdelta_loop> loops(static_cast<std::size_t>(softdelta_loop_count()), softdelta_loop_default());
    for (std::size_t i = 0; i < loops.size(); ++i)
        detail::check(softdelta_measure_loop(static_cast<std::int32_t>(i), threads, &loops[i]));
    return loops;
}
// Bytes per second that can be read from memory.
inline double measure_bandwidth(int threads = 0) {
    double bytes_per_second = 0;
    detail::check(softdelta_measure_bandwidth(threads, &bytes_per_second));
    return bytes_per_second;
}

}  // namespace softdelta
