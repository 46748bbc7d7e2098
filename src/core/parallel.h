// Independent units of work on OpenMP threads. Units come from shapes alone, so that results never depend on threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <limits>
#include <type_traits>

#include "core/floating_point.h"
#include "core/fork.h"
#include "core/tensor.h"

namespace softdelta::core {

// How many threads work on `count` units. threads = 0: OpenMP's default; a number far beyond the processors is cut, for
// OpenMP ends a process that it cannot give threads. A forked process has one.
inline int thread_count(int threads, Index count) {
    static const int most = 16 * omp_get_num_procs();  // it asks the system
    if (forked()) return static_cast<int>(std::min<Index>(count, 1));
    return static_cast<int>(std::min<Index>(count, threads > 0 ? std::min(threads, most) : omp_get_max_threads()));
}

// What a call takes of a processor, from shapes: bytes read and written, floating-point operations.
struct Work {
    double bytes = 0, flops = 0;

    Work& operator+=(const Work& other) {
        bytes += other.bytes;
        flops += other.flops;
        return *this;
    }
};

// Whether a call is long enough for a team of threads. It ends when the last of them has ended, and one that shares its
// processor with another process is waited for: on two busy processors a step of 16 heads took 34 ms with two threads,
// 0.1 ms with one, which needs 21 µs where nobody is beside it. The limit is between that step and one of 32 heads, 41
// µs with one thread and 22 with two (docs/performance.md, "Short calls"). The environment's SOFTDELTA_SHORT_CALL_BYTES
// is another limit; 0: no call is short.
inline bool worth_a_team(const Work& work) {
    constexpr double flops_per_byte = 4;  // that take as long as a byte, about
    static const double least = [] {
        const char* given = std::getenv("SOFTDELTA_SHORT_CALL_BYTES");
        return given != nullptr ? std::atof(given) : 3.0 * (1 << 20);
    }();
    return work.bytes + work.flops / flops_per_byte >= least;
}

// The threads of a call: a short one stays on the caller's.
inline int useful_threads(int threads, const Work& work) {
    return worth_a_team(work) ? threads : 1;
}

// A thread of a team.
struct Member {
    int number, team;
};

// Calls work(member, failed) on every thread; the first exception is rethrown here, and `failed` tells the others of
// it. A team of one is the caller's thread, and the OpenMP runtime is not asked.
template <class RunMember>
void run_threads(int threads, const RunMember& work) {
    if (threads == 0) return;
    std::atomic<bool> failed{false};
    if (threads == 1) {
        const DefaultFloatingPoint floating_point;
        return work(Member{0, 1}, failed);
    }
    std::exception_ptr failure;
#pragma omp parallel num_threads(threads)
    {
        const DefaultFloatingPoint floating_point;
        try {
            work(Member{omp_get_thread_num(), omp_get_num_threads()}, failed);
        } catch (...) {
            if (!failed.exchange(true)) failure = std::current_exception();
        }
    }
    if (failure) std::rethrow_exception(failure);
}

// A thread's worker: make_worker(number of the thread), or make_worker() where the number does not matter.
template <class MakeWorker>
auto worker_of(MakeWorker& make_worker, const Member& member) {
    if constexpr (std::is_invocable_v<MakeWorker&, int>)
        return make_worker(member.number);
    else
        return make_worker();
}

// Calls worker(unit) for every unit in [0, count). Each thread that has one makes its worker, and with it its scratch
// memory. The first exception is rethrown here; units not yet begun are left out. All threads begin: an OpenMP runtime
// ends those that a team does without, and starts them again for the next one.
template <class MakeWorker>
void parallel_units(int threads, Index count, MakeWorker&& make_worker) {
    std::atomic<Index> next{0};
    const int team = thread_count(threads, count > 1 ? std::numeric_limits<Index>::max() : count);
    run_threads(team, [&](const Member& member, const std::atomic<bool>& failed) {
        Index unit = next++;
        if (unit >= count) return;
        auto worker = worker_of(make_worker, member);
        for (; unit < count && !failed; unit = next++) worker(unit);
    });
}

// The same, a range of units for each thread: in short calls that follow each other it has those that it had before,
// and what they work on is near it.
template <class MakeWorker>
void parallel_shares(int threads, Index count, MakeWorker&& make_worker) {
    run_threads(thread_count(threads, count), [&](const Member& member, const std::atomic<bool>& failed) {
        const Index thread = member.number, all = member.team;
        auto worker = worker_of(make_worker, member);
        for (Index unit = thread * count / all; unit < (thread + 1) * count / all && !failed; ++unit) worker(unit);
    });
}

}  // namespace softdelta::core
