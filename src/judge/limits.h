// How large an error may be: the limits, and the low-precision baseline that they are multiples of. It is the error of
// an ordinary right kernel of a call's types, over seeds of its rounding, as a whole and in every block.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "judge/errors.h"

namespace softdelta::judge {

constexpr int baseline_runs = 8, more_baseline_runs = 40;  // more: where a verdict hangs on them

bool is_forward(const std::string& result);

// Σ of the squared errors of n elements, over the runs.
class BaselineError {
  public:
    void add_run(double squares) {
        sum_ += squares;
        sum_of_squares_ += squares * squares;
        ++runs_;
    }
    double mean() const { return sum_ / std::max(runs_, 1); }
    // How many independent errors the n are worth, by the spread of the runs: of m normal ones the sum of squares has
    // the variance 2/m · mean². A block may hang on one product whose rounding all its elements share.
    double independent(double n) const;

  private:
    double sum_ = 0, sum_of_squares_ = 0;
    int runs_ = 0;
};

struct BaselineErrors {
    BaselineError whole;
    std::vector<BaselineError> blocks;
};

// How a right kernel computes: with what it needs; with shortcuts that many take, where sums of gates are divided by
// log 2, or are not (the last digit of a difference of two sums may be exact in one unit alone); with these in wide
// chunks, whose sums are larger: 128 rows hold chunks of any power of two, 96 those of 48; by the recurrence in f32,
// which rounds the state at every token.
enum class Baseline { plain, shortcuts, natural_sums, chunks_of_128, chunks_of_96, by_token };

// A truth of a result, the rows that it holds for, and the baseline's errors there.
struct Yardstick {
    io::OwnedTensor truth;  // f64
    RowChoice rows;
    std::map<Baseline, BaselineErrors> errors;

    const BaselineErrors& plain() const { return errors.at(Baseline::plain); }
};

// One result on its way to a verdict.
struct Case {
    std::string name;
    Tensor result;
    Blocks blocks;
    std::vector<char> lost;         // rows whose scores f32 cannot keep; empty: none, or a sum over rows
    Yardstick exact;                // by the f64 truth; rows that are not lost
    std::optional<Yardstick> kept;  // by the truth of what f32 keeps of the scores; lost rows, or all of a sum
    io::OwnedTensor baseline;       // of the result's type; one run at a time
};

// A case without errors so far: its truth, in f64, and its baseline, of the result's type, are yet to be computed.
Case make_case(const std::string& name, const Tensor& result, const std::vector<std::int64_t>& shape, Blocks blocks,
               std::vector<char> lost = {});

// Runs the baseline. Its first run also tells the terms that dg cancels from.
struct BaselineRun {
    Baseline kind = Baseline::plain;
    int threads = 0;
    std::function<void(const char* step)> progress;
    int first = 1, last = baseline_runs;  // seeds
};
void measure_baseline(const io::Call& call, const BaselineRun& how, std::map<std::string, io::OwnedTensor>& terms,
                      std::vector<Case>& cases);

// Adds the errors of c.baseline, by each yardstick, to those of earlier runs.
void add_run(Case& c, int threads, Baseline kind);

// RMSE that a right result may have in a block, or as a whole.
std::vector<double> block_limits(const Case& c, const BaselineErrors& baseline, const BlockErrors& actual);
double whole_limit(const Case& c, const BaselineErrors& baseline, const BlockErrors& actual);

inline double root_mean(double squares, double n) {
    return n > 0 ? std::sqrt(squares / n) : 0;
}

}  // namespace softdelta::judge
