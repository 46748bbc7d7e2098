// A problem as a google-benchmark: its rate, and the fraction of what the machine can do at most.
#pragma once

#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "cli/bench/measure.h"
#include "softdelta/judge.hpp"

namespace softdelta::bench {

// Threads of every call: SOFTDELTA_THREADS, or OpenMP's default.
inline int threads() {
    const char* given = std::getenv("SOFTDELTA_THREADS");
    return given == nullptr ? 0 : std::atoi(given);
}

inline void time_problem(benchmark::State& state, const cli::Problem& problem) {
    Execution execution;
    execution.engine = "fast";
    execution.threads = threads();
    const auto now = std::chrono::steady_clock::now;
    double rate = 0;  // flop/s or byte/s
    try {
        problem.call(execution);
        const auto start = now();
        for (auto _ : state) problem.call(execution);
        rate = problem.work * static_cast<double>(state.iterations()) /
               std::chrono::duration<double>(now() - start).count();
    } catch (const Unsupported& e) {
        state.SkipWithError(e.what());
        return;
    }
    const bool memory = problem.limit == cli::Limit::read || problem.limit == cli::Limit::copy;
    state.counters[memory ? "GB/s" : "GFLOP/s"] = rate / 1e9;
    static cli::Limits limits(threads());
    if (const double limit = limits[problem.limit].value; limit > 0) state.counters["of_limit"] = rate / limit;
}

// Registers a problem that is made when its turn comes.
template <class Make>
void add(const std::string& name, Make make) {
    benchmark::RegisterBenchmark(name.c_str(), [make](benchmark::State& state) { time_problem(state, make()); })
        ->UseRealTime()
        ->Unit(benchmark::kMillisecond);
}

}  // namespace softdelta::bench
