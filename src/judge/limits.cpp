#include "judge/limits.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace softdelta::judge {

namespace {

constexpr double output_factor = 2, gradient_factor = 3;  // of the baseline's error
constexpr double few_ulps = 4 * 0x1p-23;                  // of the RMS, f32 accumulation
constexpr double smallest = 4 * 0x1p-126;                 // below this f32 has no digits

// A mean square is never less than that of one stochastic rounding at the end, wherever the truth lies between two
// numbers of the type: in a block that few elements dominate, all runs may have been lucky.
double mean_square(const BaselineError& baseline, double squared_ulp) {
    return std::max(baseline.mean(), squared_ulp / 6);
}

double limit_of(const std::string& name, double baseline, double independent, double truth) {
    const double factor = is_forward(name) ? output_factor : gradient_factor;
    return factor * baseline * (1 + 2 / std::sqrt(independent)) + few_ulps * truth + smallest;
}

}  // namespace

bool is_forward(const std::string& result) {
    return result == "o" || result == "lse" || result == "final_state" || result == "y";
}

double BaselineError::independent(double n) const {
    const double variance = (sum_of_squares_ - sum_ * mean()) / (runs_ - 1);
    return 2 * mean() * mean() < n * variance ? std::max(2 * mean() * mean() / variance, 1.0) : std::max(n, 1.0);
}

// Odd seeds sum gates divided by log 2 (softdelta/judge.h).
std::uint64_t seed_of(Baseline kind, int run) {
    const int seed = kind == Baseline::shortcuts ? 2 * run - 1 : kind == Baseline::natural_sums ? 2 * run : run;
    return static_cast<std::uint64_t>(seed);
}

void add_run(Case& c, int threads, Baseline kind) {
    const auto add = [&](Yardstick& by) {
        const BlockErrors errors = measure_errors(c.blocks, by.rows, c.baseline.view(), by.truth.view(), threads);
        BaselineErrors& sums = by.errors[kind];
        sums.blocks.resize(errors.squared_error.size());
        sums.whole.add_run(std::accumulate(errors.squared_error.begin(), errors.squared_error.end(), 0.0));
        for (std::size_t i = 0; i < sums.blocks.size(); ++i) sums.blocks[i].add_run(errors.squared_error[i]);
    };
    add(c.exact);
    if (c.kept) add(*c.kept);
}

Case make_case(const std::string& name, const Tensor& result, const std::vector<std::int64_t>& shape, Blocks blocks,
               std::vector<char> lost) {
    return {name,
            result,
            std::move(blocks),
            std::move(lost),
            {io::OwnedTensor(DType::f64, shape), {}, {}},
            {},
            io::OwnedTensor(result.dtype(), shape)};
}

// 0: the kernel's.
int chunk_of(Baseline kind) {
    return kind == Baseline::by_token        ? 1
           : kind == Baseline::chunks_of_128 ? 128
           : kind == Baseline::chunks_of_96  ? 96
                                             : 0;
}

void measure_baseline(const io::Call& call, const BaselineRun& how, std::map<std::string, io::OwnedTensor>& terms,
                      std::vector<Case>& cases) {
    for (int run = how.first; run <= how.last; ++run) {
        for (const bool forward : {true, false}) {
            std::map<std::string, Tensor> map;
            for (Case& c : cases)
                if (is_forward(c.name) == forward) map[c.name] = c.baseline.view();
            if (map.empty()) continue;
            how.progress(forward ? "low-precision baseline, forward" : "low-precision baseline, backward");
            Execution execution;
            execution.engine = "stages_f32";
            execution.threads = how.threads;
            execution.rounding.seed = seed_of(how.kind, run);
            const int chunk = chunk_of(how.kind);
            execution.rounding.shortcuts = how.kind != Baseline::plain && how.kind != Baseline::by_token;
            if (chunk > 0) execution.stages.chunk_size = chunk;
            if (run == 1 && !forward && chunk == 0 && call.delta_options.steps == 1)
                for (const auto& [name, tensor] : terms) execution.stages.wanted.push_back({name, tensor.view()});
            io::execute(call, map, execution);
        }
        for (Case& c : cases) add_run(c, how.threads, how.kind);
    }
}

std::vector<double> block_limits(const Case& c, const BaselineErrors& baseline, const BlockErrors& actual) {
    std::vector<double> limits(actual.elements.size());
    for (std::size_t i = 0; i < limits.size(); ++i) {
        const double n = actual.elements[i];
        const double error = root_mean(mean_square(baseline.blocks[i], actual.squared_ulp[i]), n);
        limits[i] = limit_of(c.name, error, baseline.blocks[i].independent(n), root_mean(actual.squared_truth[i], n));
    }
    return limits;
}

double whole_limit(const Case& c, const BaselineErrors& baseline, const BlockErrors& actual) {
    double truth = 0, squares = 0, n = 0;
    for (std::size_t i = 0; i < actual.elements.size(); ++i) {
        truth += actual.squared_truth[i];
        squares += mean_square(baseline.blocks[i], actual.squared_ulp[i]);
        n += actual.elements[i];
    }
    return limit_of(c.name, root_mean(squares, n), baseline.whole.independent(n), root_mean(truth, n));
}

}  // namespace softdelta::judge
