#include "engines/cpu/machine/measure.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <memory>
#include <span>

#include "core/floating_point.h"
#include "core/parallel.h"

namespace softdelta::cpu {

namespace {

using core::Index;

constexpr int runs = 7;

struct Timing {
    double seconds;
    int threads;  // OpenMP may give fewer than were asked for
};

// The median time in which all threads do work(thread), begun together.
template <class Work>
Timing time_threads(int threads, Work work) {
    std::array<double, runs> seconds{};
    int given = 1;
#pragma omp parallel num_threads(threads)
    {
        const core::DefaultFloatingPoint floating_point;
        const int thread = omp_get_thread_num();
        if (thread == 0) given = omp_get_num_threads();
        for (double& run : seconds) {
            double begin = 0;
#pragma omp barrier
            if (thread == 0) begin = omp_get_wtime();
            work(thread);
#pragma omp barrier
            if (thread == 0) run = omp_get_wtime() - begin;
        }
    }
    std::nth_element(seconds.begin(), seconds.begin() + runs / 2, seconds.end());
    return {seconds[runs / 2], given};
}

// Of one repeat of a loop.
Timing time_repeat(void (*run)(Index repeats), int threads) {
    constexpr double long_enough = 0.02;  // for threads to wake and clocks to settle
    Index repeats = 1000;
    Timing timing{};
    do {
        repeats *= 4;
        timing = time_threads(core::all_threads(threads), [&](int) { run(repeats); });
    } while (timing.seconds < long_enough && repeats < Index{1} << 40);
    return {timing.seconds / static_cast<double>(repeats), timing.threads};
}

}  // namespace

double measure_flops(const kernels::Ceiling& ceiling, int threads) {
    const Timing one = time_repeat(ceiling.run, threads);
    return static_cast<double>(ceiling.flops) * one.threads / one.seconds;
}

double measure_bf16(const kernels::Table& kernels, kernels::Loop::Products products, int threads) {
    if (kernels.loop_count == 0) return measure_flops(kernels.multiply_add_bf16, threads);
    double most = 0;
    for (const kernels::Loop& loop : std::span(kernels.loops, static_cast<std::size_t>(kernels.loop_count)))
        if (loop.products == products)
            most = std::max(most, measure_flops({loop.run, loop.operations * kernels.product_flops}, threads));
    return most;
}

double measure_loop(const kernels::Loop& loop, int threads) {
    return time_repeat(loop.run, threads).seconds / static_cast<double>(loop.operations);
}

double measure_bandwidth(const kernels::Table& kernels, int threads) {
    constexpr Index step = Index{1} << 20;  // floats
    const int used = core::all_threads(threads);
    const Index slice = std::max(16 * step, 128 * step / used / step * step);  // of a thread: 64 MiB, 512 MiB in all
    const std::unique_ptr<float[]> data(new float[static_cast<std::size_t>(slice * used)]);
    const auto slice_of = [&](int thread) { return data.get() + thread * slice; };
#pragma omp parallel num_threads(used)  // first touched, and so placed, by the thread that reads it
    std::fill_n(slice_of(omp_get_thread_num()), slice, 1.0F);
    const Timing timing = time_threads(used, [&](int thread) { kernels.read_memory(slice_of(thread), slice); });
    return static_cast<double>(slice * timing.threads) * sizeof(float) / timing.seconds;
}

}  // namespace softdelta::cpu
