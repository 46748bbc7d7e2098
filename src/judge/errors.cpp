#include "judge/errors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <mutex>

#include "core/parallel.h"
#include "core/tensor.h"
#include "io/file/core_view.h"

namespace softdelta::judge {

namespace {

// The spacing of numbers of a type at x.
double ulp(double x, core::DType type) {
    constexpr std::uint64_t exponent_mask = 0x7ff0000000000000u;
    const double power = std::bit_cast<double>(std::bit_cast<std::uint64_t>(x) & exponent_mask);
    const double smallest = type == core::DType::f16 ? 0x1p-14 : 0x1p-126;  // normal number
    return std::max(power, smallest) * core::epsilon_of(type);
}

void merge(Extremes& into, const Extremes& part) {
    if (part.largest_error > into.largest_error ||
        (part.largest_error == into.largest_error && part.largest_error_at < into.largest_error_at)) {
        into.largest_error = part.largest_error;
        into.largest_error_at = part.largest_error_at;
    }
    if (part.first_mismatch >= 0 && (into.first_mismatch < 0 || part.first_mismatch < into.first_mismatch))
        into.first_mismatch = part.first_mismatch;
    into.mismatches += part.mismatches;
    into.true_nans += part.true_nans;
    into.infinities += part.infinities;
}

}  // namespace

BlockErrors measure_errors(const Blocks& blocks, const RowChoice& rows, const Tensor& result, const Tensor& truth,
                           int threads, Extremes* extremes) {
    const auto size = static_cast<std::size_t>(blocks.count());
    const std::vector<double> zeros(size);
    BlockErrors errors{zeros, zeros, zeros, zeros};
    const core::Tensor view = io::core_row(result);
    const auto* exact = static_cast<const double*>(truth.data());
    std::mutex merging;
    constexpr double flops = 40;  // of an element
    const auto elements = static_cast<double>(truth.count());
    const core::Work work{elements * static_cast<double>(sizeof(double) + core::size_of(view.dtype)), elements * flops};
    core::parallel_units(core::useful_threads(threads, work), blocks.outer * blocks.range_count(), [&] {
        return [&, row = std::vector<double>(static_cast<std::size_t>(blocks.features))](std::int64_t unit) mutable {
            Extremes found;
            blocks.for_each_run(unit / blocks.range_count(), unit % blocks.range_count(),
                                [&](std::int64_t block, std::int64_t first, std::int64_t n) {
                                    if (n == 0 || !rows.has(first / n)) return;
                                    core::load_row(view, first, 0, n, row.data());
                                    double error = 0, square = 0, ulps = 0;
                                    for (std::int64_t i = 0; i < n; ++i) {
                                        const double x = row[static_cast<std::size_t>(i)], t = exact[first + i],
                                                     e = x - t;
                                        if (!std::isfinite(e)) {
                                            found.infinities += x == t;
                                            if (x == t) continue;  // −∞ is the lse of a row without keys
                                            if (extremes == nullptr) error = HUGE_VAL;  // of the baseline: no limit
                                            found.true_nans += std::isnan(t);
                                            if (found.mismatches++ == 0) found.first_mismatch = first + i;
                                            continue;
                                        }
                                        error += e * e;
                                        square += t * t;
                                        const double u = ulp(t, view.dtype);
                                        ulps += u * u;
                                        if (std::abs(e) > found.largest_error) {
                                            found.largest_error = std::abs(e);
                                            found.largest_error_at = first + i;
                                        }
                                    }
                                    errors.elements[static_cast<std::size_t>(block)] += static_cast<double>(n);
                                    errors.squared_error[static_cast<std::size_t>(block)] += error;
                                    errors.squared_truth[static_cast<std::size_t>(block)] += square;
                                    errors.squared_ulp[static_cast<std::size_t>(block)] += ulps;
                                });
            if (extremes == nullptr) return;
            const std::lock_guard lock(merging);
            merge(*extremes, found);
        };
    });
    return errors;
}

}  // namespace softdelta::judge
