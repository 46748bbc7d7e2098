#include "judge/verify.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "judge/cancellation.h"
#include "judge/errors.h"

namespace softdelta::judge {

namespace {

constexpr int honest_runs = 8;
constexpr double output_factor = 2, gradient_factor = 3;  // of the honest error
constexpr double few_ulps = 4 * 0x1p-23;                  // of the RMS, f32 accumulation
constexpr double smallest = 4 * 0x1p-126;                 // below this f32 has no digits

bool is_forward(const std::string& result) {
    return result == "o" || result == "lse" || result == "final_state";
}

// Σ of the squared errors of n elements, over the honest kernel's runs.
class HonestError {
  public:
    void add_run(double squares) {
        sum_ += squares;
        sum_of_squares_ += squares * squares;
    }
    double mean() const { return sum_ / honest_runs; }
    // How many independent errors the n are worth, by the spread of the runs: of m normal ones the sum of squares has
    // the variance 2/m · mean². A block may hang on one product whose rounding all its elements share.
    double independent(double n) const {
        const double variance = (sum_of_squares_ - sum_ * mean()) / (honest_runs - 1);
        return 2 * mean() * mean() < n * variance ? std::max(2 * mean() * mean() / variance, 1.0) : std::max(n, 1.0);
    }

  private:
    double sum_ = 0, sum_of_squares_ = 0;
};

// One result on its way to a verdict.
struct Case {
    std::string name;
    Tensor result;
    Blocks blocks;
    io::OwnedTensor truth;   // f64
    io::OwnedTensor honest;  // of the result's type; one run at a time
    HonestError whole{};
    std::vector<HonestError> of_block = std::vector<HonestError>(static_cast<std::size_t>(blocks.count()));
};

class Progress {
  public:
    Progress(const Options& options, int steps) : options_(options), steps_(steps) {}
    void step(const char* what) {
        if (options_.progress) options_.progress(static_cast<double>(done_) / steps_, what);
        ++done_;
    }

  private:
    const Options& options_;
    int steps_, done_ = 0;
};

std::vector<Case> make_cases(const io::Call& call, const std::map<std::string, Tensor>& results) {
    std::vector<Case> cases;
    for (const std::string& name : io::output_names(call)) {
        const auto found = results.find(name);
        if (found == results.end()) continue;
        const std::vector<std::int64_t> shape = io::output_shape(call, name);
        cases.push_back({name, found->second, blocks_of(call, name), io::OwnedTensor(DType::f64, shape),
                         io::OwnedTensor(found->second.dtype(), shape)});
    }
    return cases;
}

// The results of one pass, to be computed into `target`'s tensors.
template <class Target>
std::map<std::string, Tensor> targets(std::vector<Case>& cases, bool forward, Target&& target) {
    std::map<std::string, Tensor> map;
    for (Case& c : cases)
        if (is_forward(c.name) == forward) map[c.name] = target(c).view();
    return map;
}

void compute_truth(const io::Call& call, std::vector<Case>& cases, const Options& options, Progress& progress) {
    for (const bool forward : {true, false}) {
        const auto map = targets(cases, forward, [](Case& c) -> io::OwnedTensor& { return c.truth; });
        if (map.empty()) continue;
        progress.step(forward ? "truth, forward" : "truth, backward");
        Execution execution;
        execution.engine = Engine::reference;
        execution.threads = options.threads;
        io::execute(call, map, execution);
    }
}

// The honest kernel, over seeds of its rounding; the first run also tells the terms that dg cancels from.
void compute_honest(const io::Call& call, std::vector<Case>& cases, std::map<std::string, io::OwnedTensor>& terms,
                    const Options& options, Progress& progress) {
    for (int run = 1; run <= honest_runs; ++run) {
        for (const bool forward : {true, false}) {
            const auto map = targets(cases, forward, [](Case& c) -> io::OwnedTensor& { return c.honest; });
            if (map.empty()) continue;
            progress.step(forward ? "honest kernel, forward" : "honest kernel, backward");
            Execution execution;
            execution.engine = Engine::stages_f32;
            execution.threads = options.threads;
            execution.rounding_seed = static_cast<std::uint64_t>(run);
            if (run == 1 && !forward)
                for (const auto& [name, tensor] : terms) execution.stages.push_back({name, tensor.view()});
            io::execute(call, map, execution);
        }
        for (Case& c : cases) {
            const BlockErrors errors = measure_errors(c.blocks, c.honest.view(), c.truth.view(), options.threads);
            c.whole.add_run(std::accumulate(errors.squared_error.begin(), errors.squared_error.end(), 0.0));
            for (std::size_t i = 0; i < c.of_block.size(); ++i) c.of_block[i].add_run(errors.squared_error[i]);
        }
    }
}

double rms(double squares, double n) {
    return n > 0 ? std::sqrt(squares / n) : 0;
}

// An honest mean square is never less than that of one stochastic rounding at the end, wherever the truth lies between
// two numbers of the type: in a block that few elements dominate, all runs may have been lucky.
double honest_squares(const HonestError& honest, double squared_unit) {
    return std::max(honest.mean(), squared_unit / 6);
}

// RMSE that a result may have whose n elements are worth so many independent ones.
double limit_of(const std::string& name, double honest, double independent, double truth) {
    const double factor = is_forward(name) ? output_factor : gradient_factor;
    return factor * honest * (1 + 2 / std::sqrt(independent)) + few_ulps * truth + smallest;
}

std::string print(const char* format, double a, double b) {
    char text[160];
    std::snprintf(text, sizeof text, format, a, b);
    return text;
}

std::string index_text(const std::vector<std::int64_t>& index) {
    std::string text = "[";
    for (const std::int64_t i : index) text += (text.size() > 1 ? ", " : "") + std::to_string(i);
    return text + "]";
}

std::vector<std::int64_t> unflatten(std::int64_t flat, const std::vector<std::int64_t>& shape) {
    std::vector<std::int64_t> index(shape.size());
    for (std::size_t i = shape.size(); i-- > 0; flat /= std::max<std::int64_t>(shape[i], 1))
        index[i] = shape[i] > 0 ? flat % shape[i] : 0;  // a tensor without elements has no index
    return index;
}

// How the blocks fared.
struct BlockCount {
    std::int64_t wrong = 0, digits_lost = 0, worst = -1;
    double worst_excess = 0;  // error over limit of the worst
    double worst_error = 0, worst_limit = 0, worst_truth = 0;
};

double limit_of_block(const Case& c, const BlockErrors& actual, std::int64_t b) {
    const auto i = static_cast<std::size_t>(b);
    const auto n = static_cast<double>(c.blocks.elements(b));
    const double honest = rms(honest_squares(c.of_block[i], actual.squared_unit[i]), n);
    return limit_of(c.name, honest, c.of_block[i].independent(n), rms(actual.squared_truth[i], n));
}

BlockCount judge_blocks(const Case& c, const BlockErrors& actual, const std::optional<Floor>& floor) {
    BlockCount count;
    for (std::int64_t b = 0; b < c.blocks.count(); ++b) {
        const auto i = static_cast<std::size_t>(b);
        const auto n = static_cast<double>(c.blocks.elements(b));
        if (n == 0) continue;
        const double error = rms(actual.squared_error[i], n), truth = rms(actual.squared_truth[i], n);
        const double limit = limit_of_block(c, actual, b);
        if (error <= limit) continue;
        if (floor && error <= floor->blocks[i]) {
            ++count.digits_lost;
            continue;
        }
        ++count.wrong;
        if (error / limit > count.worst_excess) {
            count.worst = b;
            count.worst_excess = error / limit;
            count.worst_error = error, count.worst_limit = limit, count.worst_truth = truth;
        }
    }
    return count;
}

Finding judge(const Case& c, const BlockErrors& actual, const Extremes& extremes, const std::optional<Floor>& floor,
              const Options& options) {
    double error = 0, truth = 0, honest = 0;
    for (std::size_t i = 0; i < actual.squared_error.size(); ++i) {
        error += actual.squared_error[i];
        truth += actual.squared_truth[i];
        honest += honest_squares(c.of_block[i], actual.squared_unit[i]);
    }
    const auto n = static_cast<double>(c.truth.count());
    error = rms(error, n), truth = rms(truth, n), honest = rms(honest, n);
    const auto ratio = [](double e, double t) { return e == 0 ? 0 : t == 0 ? HUGE_VAL : e / t; };

    Finding f;
    f.name = c.name, f.shape = c.truth.shape(), f.dtype = c.result.dtype();
    f.largest_error = extremes.largest_error;
    f.largest_error_at = unflatten(extremes.largest_error_at, f.shape);
    f.ratio = ratio(error, truth);
    const auto given = options.limits.find(c.name);
    const double limit =
        given != options.limits.end() ? given->second * truth : limit_of(c.name, honest, c.whole.independent(n), truth);
    f.limit = ratio(limit, truth);
    const auto fail = [&](const std::string& note) {
        f.verdict = Verdict::wrong;
        f.note += (f.note.empty() ? "" : "; ") + note;
    };

    if (extremes.mismatches > 0)
        fail("NaN or infinite at " + index_text(unflatten(extremes.first_mismatch, f.shape)) + ", the first of " +
             std::to_string(extremes.mismatches) + " elements" +
             (extremes.true_nans > 0 ? "; so is the truth there" : ""));
    const BlockCount blocks = given != options.limits.end() ? BlockCount{} : judge_blocks(c, actual, floor);
    const bool beyond = error > limit, within_floor = floor && given == options.limits.end() && error <= floor->whole;
    if (blocks.wrong > 0)
        fail(std::to_string(blocks.wrong) + " of " + std::to_string(c.blocks.count()) + " blocks; worst " +
             c.blocks.name(blocks.worst) +
             print(": ratio %.2g, limit %.2g", ratio(blocks.worst_error, blocks.worst_truth),
                   ratio(blocks.worst_limit, blocks.worst_truth)));
    else if (beyond && !within_floor)
        fail("each block is within its limit, the whole is not");
    if (f.verdict == Verdict::right && (beyond || blocks.digits_lost > 0)) {
        f.verdict = Verdict::digits_lost;
        f.note = print(
            "digits lost to cancellation: the error, %.2g, is f32 rounding of the terms that dg is a difference of, "
            "%.2g",
            error, floor->terms);
    }
    return f;
}

Evidence weigh(const Case& c, const std::optional<Floor>& floor, const Options& options) {
    Extremes extremes;
    const BlockErrors actual = measure_errors(c.blocks, c.result, c.truth.view(), options.threads, &extremes);
    Evidence evidence{judge(c, actual, extremes, floor, options), c.blocks, c.truth, {}};
    for (std::int64_t b = 0; b < c.blocks.count(); ++b)
        evidence.allowed.push_back(
            std::max(limit_of_block(c, actual, b), floor ? floor->blocks[static_cast<std::size_t>(b)] : 0));
    return evidence;
}

}  // namespace

std::vector<Evidence> examine(const io::Call& call, const std::map<std::string, Tensor>& results,
                              const Options& options) {
    std::vector<Case> cases = make_cases(call, results);
    const bool forward = std::any_of(cases.begin(), cases.end(), [](const Case& c) { return is_forward(c.name); });
    const bool backward = std::any_of(cases.begin(), cases.end(), [](const Case& c) { return !is_forward(c.name); });
    Progress progress(options, (honest_runs + 1) * (forward + backward) + 1);
    std::map<std::string, io::OwnedTensor> terms =
        backward ? make_term_tensors(call) : std::map<std::string, io::OwnedTensor>{};
    compute_truth(call, cases, options, progress);
    compute_honest(call, cases, terms, options, progress);
    progress.step("verdict");
    std::vector<Evidence> evidence;
    for (const Case& c : cases)
        evidence.push_back(weigh(c, cancellation_floor(call, c.name, c.blocks, terms), options));
    return evidence;
}

std::vector<Finding> verify(const io::Call& call, const std::map<std::string, Tensor>& results,
                            const Options& options) {
    std::vector<Finding> findings;
    for (Evidence& evidence : examine(call, results, options)) findings.push_back(std::move(evidence.finding));
    return findings;
}

}  // namespace softdelta::judge
