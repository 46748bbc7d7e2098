// Independent units of work on OpenMP threads. Units come from shapes alone, so that results never depend on threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <exception>

#include "core/floating_point.h"
#include "core/tensor.h"

namespace softdelta::core {

// How many threads work on `count` units. threads = 0: OpenMP's default; a number far beyond the processors is cut, for
// OpenMP ends a process that it cannot give threads.
inline int thread_count(int threads, Index count) {
    const int most = 16 * omp_get_num_procs();
    return static_cast<int>(std::min<Index>(count, threads > 0 ? std::min(threads, most) : omp_get_max_threads()));
}

// Calls worker(unit) for every unit in [0, count). Each thread makes its worker, and with it its scratch memory, by
// make_worker(). The first exception is rethrown here; units not yet begun are left out.
template <class MakeWorker>
void parallel_units(int threads, Index count, MakeWorker&& make_worker) {
    const int used = thread_count(threads, count);
    if (used == 0) return;
    std::atomic<Index> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr failure;
#pragma omp parallel num_threads(used)
    {
        const DefaultFloatingPoint floating_point;
        try {
            auto worker = make_worker();
            for (Index unit = next++; unit < count && !failed; unit = next++) worker(unit);
        } catch (...) {
            if (!failed.exchange(true)) failure = std::current_exception();
        }
    }
    if (failure) std::rethrow_exception(failure);
}

}  // namespace softdelta::core
