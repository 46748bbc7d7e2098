// Units of work on OpenMP threads. They are independent, or wait for earlier ones. The order of sums comes from shapes
// alone, so that results never depend on threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <limits>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>

#include "core/error.h"
#include "core/floating_point.h"
#include "core/fork.h"
#include "core/once.h"
#include "core/parallel_for.h"
#include "core/tensor.h"

namespace softdelta::core {

// How many threads work on `count` units. threads = 0: OpenMP's default; a number far beyond the processors is cut, for
// OpenMP ends a process that it cannot give threads. A forked process has one.
inline int thread_count(int threads, Index count) {
    if (forked()) return static_cast<int>(std::min<Index>(count, 1));
    static constinit Once<int> most;
    const int wanted = threads > 0 ? threads : omp_get_max_threads();
    return static_cast<int>(
        std::min<Index>(count, std::min(wanted, most.get([] { return 16 * omp_get_num_procs(); }))));
}

// All threads that a call may use.
inline int all_threads(int threads) {
    return thread_count(threads, std::numeric_limits<Index>::max());
}

// The threads of a call. Those beyond the workers have no unit and no memory, and return at once. An OpenMP runtime
// ends the threads that a team does without and starts them again for the next one, which takes longer than a short
// call: so all that the caller allows begin (docs/performance.md, "Short calls").
struct Team {
    int workers = 0, threads = 0;

    Team() = default;
    Team(int allowed, Index units)
        : workers(thread_count(allowed, units)), threads(workers > 1 ? all_threads(allowed) : workers) {}
};

// What a call takes of a processor, from shapes: bytes read and written, floating-point operations.
struct Work {
    double bytes = 0, flops = 0;

    Work& operator+=(const Work& other) {
        bytes += other.bytes;
        flops += other.flops;
        return *this;
    }
};

// A call of less is short. The environment's SOFTDELTA_SHORT_CALL_BYTES is another limit; 0: no call is short. It is
// read once, for a host may change its environment later, and no thread may read it then.
inline double short_call_bytes() {
    struct Limit {
        double bytes = 3.0 * (1 << 20);
        std::string wrong;
    };
    static constinit Once<Limit> once;
    const Limit& limit = once.get([] {
        Limit read;
        const char* given = std::getenv("SOFTDELTA_SHORT_CALL_BYTES");
        const std::string_view text = given == nullptr ? "" : given;
        if (text.empty()) return read;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), read.bytes);
        if (error != std::errc() || end != text.data() + text.size() || !(read.bytes >= 0) || std::isinf(read.bytes))
            read.wrong = text;
        return read;
    });
    if (!limit.wrong.empty())
        throw InvalidArgument("SOFTDELTA_SHORT_CALL_BYTES is '" + printable(limit.wrong) +
                              "', expected a number of bytes, 0 or more");
    return limit.bytes;
}

// Whether a call is long enough for a team of threads. It ends when the last of them has ended, and a thread that
// shares its processor with another process may start late. On two busy processors a step of 16 heads took 34 ms with
// two threads and 0.1 ms with one, which needs 21 µs on an idle one. The limit is between that step and one of 32
// heads: 41 µs with one thread, 22 with two (docs/performance.md, "Short calls").
inline bool worth_a_team(const Work& work) {
    constexpr double flops_per_byte = 4;  // that take as long as a byte, about
    return work.bytes + work.flops / flops_per_byte >= short_call_bytes();
}

// The threads of a call: a short one stays on the caller's.
inline int useful_threads(int threads, const Work& work) {
    return worth_a_team(work) ? threads : 1;
}

// A worker of a team.
struct Member {
    int number, team;
};

// Calls work(member, failed) on every worker; the first exception is rethrown here, and `failed` tells the others of
// it. A team of one is the caller's thread, and the OpenMP runtime is not asked.
template <class RunMember>
void run_threads(const Team& team, const RunMember& work) {
    if (team.workers == 0) return;
    std::atomic<bool> failed{false};
    if (team.workers == 1) {
        const DefaultFloatingPoint floating_point;
        return work(Member{0, 1}, failed);
    }
    std::exception_ptr failure;
    auto run = [&](int number, int count) {
        const DefaultFloatingPoint floating_point;
        try {
            work(Member{number, count}, failed);
        } catch (...) {
            if (!failed.exchange(true)) failure = std::current_exception();
        }
    };
    if (threads_of_call != nullptr) {
        auto task = [&](std::int32_t i) { run(i, team.workers); };
        threads_of_call->run(
            threads_of_call->context, team.workers,
            [](void* context, std::int32_t i) { (*static_cast<decltype(task)*>(context))(i); }, &task);
    } else {
#pragma omp parallel num_threads(team.threads)
        if (const int number = omp_get_thread_num(), count = std::min(team.workers, omp_get_num_threads());
            number < count)
            run(number, count);
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

// Waits until `done` has reached `count`: for a worker whose unit needs the results of earlier ones. Units begin in
// their order, so that another thread works on what is waited for. Units that others wait for must not throw.
inline void wait_until(const std::atomic<Index>& done, Index count) {
    while (done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

// Calls worker(unit) for every unit in [0, count), which begin in this order. Each worker that has one makes its
// object, and with it its scratch memory. The first exception is rethrown here; units not yet begun are left out.
template <class MakeWorker>
void parallel_units(const Team& team, Index count, MakeWorker&& make_worker) {
    std::atomic<Index> next{0};
    run_threads(count > 1 ? team : Team(1, count), [&](const Member& member, const std::atomic<bool>& failed) {
        Index unit = next++;
        if (unit >= count) return;
        auto worker = worker_of(make_worker, member);
        for (; unit < count && !failed; unit = next++) worker(unit);
    });
}

template <class MakeWorker>
void parallel_units(int threads, Index count, MakeWorker&& make_worker) {
    parallel_units(Team(threads, count), count, make_worker);
}

// The same, a range of units for each worker: in short calls that follow each other it has those that it had before,
// and what they work on is near it.
template <class MakeWorker>
void parallel_shares(const Team& team, Index count, MakeWorker&& make_worker) {
    run_threads(team, [&](const Member& member, const std::atomic<bool>& failed) {
        const Index thread = member.number, all = member.team;
        auto worker = worker_of(make_worker, member);
        for (Index unit = thread * count / all; unit < (thread + 1) * count / all && !failed; ++unit) worker(unit);
    });
}

}  // namespace softdelta::core
