// Independent units of work on OpenMP threads. Units come from shapes alone, so that results never depend on threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>

#include "core/floating_point.h"
#include "core/tensor.h"

namespace softdelta::core {

// How many threads work on `count` units. threads = 0: OpenMP's default; a number far beyond the processors is cut, for
// OpenMP ends a process that it cannot give threads.
inline int thread_count(int threads, Index count) {
    static const int most = 16 * omp_get_num_procs();  // it asks the system
    return static_cast<int>(std::min<Index>(count, threads > 0 ? std::min(threads, most) : omp_get_max_threads()));
}

// Calls work(failed) on every thread; the first exception is rethrown here, and `failed` tells the others of it.
template <class Work>
void run_threads(int threads, const Work& work) {
    if (threads == 0) return;
    std::atomic<bool> failed{false};
    std::exception_ptr failure;
#pragma omp parallel num_threads(threads)
    {
        const DefaultFloatingPoint floating_point;
        try {
            work(failed);
        } catch (...) {
            if (!failed.exchange(true)) failure = std::current_exception();
        }
    }
    if (failure) std::rethrow_exception(failure);
}

// Calls worker(unit) for every unit in [0, count). Each thread that has one makes its worker, and with it its scratch
// memory, by make_worker(). The first exception is rethrown here; units not yet begun are left out. All threads begin:
// an OpenMP runtime ends those that a team does without, and starts them again for the next one.
template <class MakeWorker>
void parallel_units(int threads, Index count, MakeWorker&& make_worker) {
    std::atomic<Index> next{0};
    const int team = thread_count(threads, count > 1 ? std::numeric_limits<Index>::max() : count);
    run_threads(team, [&](const std::atomic<bool>& failed) {
        Index unit = next++;
        if (unit >= count) return;
        auto worker = make_worker();
        for (; unit < count && !failed; unit = next++) worker(unit);
    });
}

// The same, a range of units for each thread: in short calls that follow each other it has those that it had before,
// and what they work on is near it.
template <class MakeWorker>
void parallel_shares(int threads, Index count, MakeWorker&& make_worker) {
    run_threads(thread_count(threads, count), [&](const std::atomic<bool>& failed) {
        const Index thread = omp_get_thread_num(), all = omp_get_num_threads();
        auto worker = make_worker();
        for (Index unit = thread * count / all; unit < (thread + 1) * count / all && !failed; ++unit) worker(unit);
    });
}

}  // namespace softdelta::core
