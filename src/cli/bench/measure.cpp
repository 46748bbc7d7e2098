#include "cli/bench/measure.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

#include "softdelta/judge.hpp"

namespace softdelta::cli {

namespace {

double seconds_of(const std::function<void()>& call) {
    const auto start = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(const std::function<void()>& call) {
    call();
    std::vector<double> taken;
    double total = 0;
    while (taken.empty() || (total < 20 && taken.size() < 5) || (total < 0.3 && taken.size() < 1000)) {
        taken.push_back(seconds_of(call));
        total += taken.back();
    }
    std::nth_element(taken.begin(), taken.begin() + static_cast<std::ptrdiff_t>(taken.size() / 2), taken.end());
    return taken[taken.size() / 2];
}

// Seconds that threads of this process were ready to run and had no processor; 0 where the system does not tell.
double seconds_waited() {
    double nanoseconds = 0;
    std::error_code error;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
        std::ifstream file(task.path() / "schedstat");
        double ran = 0, waited = 0;
        if (file >> ran >> waited) nanoseconds += waited;
    }
    return nanoseconds * 1e-9;
}

// Measures until nobody disturbs it, but not for ever: then the best counts, the least or the greatest.
Measured repeat(const std::function<double()>& measure, bool least) {
    constexpr int most = 3;
    constexpr double tolerable = 0.05;  // of the time that was measured
    Measured best;
    for (int i = 0; i < most; ++i) {
        const double before = seconds_waited();
        double value = 0;
        const double taken = seconds_of([&] { value = measure(); });
        const bool disturbed = seconds_waited() - before > tolerable * taken;
        if (!disturbed) return {value, false};
        if (i == 0 || (value < best.value) == least) best = {value, true};
    }
    return best;
}

// Memory read and written at once, in byte/s.
double measure_copy(int threads) {
    std::vector<float> memory(std::size_t{1} << 27, 1.0f);  // 512 MiB
    const auto count = static_cast<std::ptrdiff_t>(memory.size());
    float* const data = memory.data();
    const double taken = median([=] {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (std::ptrdiff_t i = 0; i < count; ++i) data[i] *= -1.0f;
    });
    return 2.0 * static_cast<double>(memory.size()) * sizeof(float) / taken;
}

double measure(Limit limit, int threads) {
    switch (limit) {
        case Limit::f32:
            return measure_ceiling(Ceiling::f32, threads);
        case Limit::bf16:
            return measure_ceiling(Ceiling::bf16, threads);
        case Limit::read:
            return measure_bandwidth(threads);
        default:
            return measure_copy(threads);
    }
}

}  // namespace

Measured median_seconds(const std::function<void()>& call) {
    return repeat([&] { return median(call); }, true);
}

Measured Limits::operator[](Limit limit) {
    const auto found = measured_.find(limit);
    if (found != measured_.end()) return found->second;
    try {
        return measured_[limit] = repeat([&] { return measure(limit, threads_); }, false);
    } catch (const Unsupported&) {  // without dot products of bf16 its products run as f32
        return limit == Limit::bf16 ? (*this)[Limit::f32] : Measured{};
    }
}

}  // namespace softdelta::cli
