// The verdict on a dump: every result against the f64 truth, within limits computed for this very call (docs/math.md,
// "Limits of error"): what the low-precision baseline's error is, as a whole and in every block.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "judge/blocks.h"

namespace softdelta::judge {

// cannot_be_judged: right kernels may be so far from the truth that a limit would say nothing.
enum class Verdict { right, digits_lost, wrong, cannot_be_judged };

struct Finding {
    std::string name;
    std::vector<std::int64_t> shape;
    DType dtype = DType::f32;
    double largest_error = 0;  // |result − truth|, over finite elements
    std::vector<std::int64_t> largest_error_at;
    double ratio = 0;  // RMSE(result − truth) / RMS(truth)
    double limit = 0;  // of the ratio
    Verdict verdict = Verdict::right;
    std::string note;  // why it is wrong, and where first; why it cannot be judged; which digits are lost
};

struct Options {
    int threads = 0;
    std::map<std::string, double> limits;  // ratio by result: replaces the computed limits of that result
    std::function<void(double fraction, const char* step)> progress;
};

// What a verdict rests on.
struct Evidence {
    Finding finding;
    Blocks blocks;
    io::OwnedTensor truth;            // f64
    std::vector<double> allowed;      // RMSE that a right kernel may have in each block; infinite: any
    double excess = 0;                // of a wrong result: the largest error by what is allowed
    std::vector<double> independent;  // how many independent errors each block's are worth
};

// Of several: wrong, or else cannot_be_judged, or else right, digits_lost included.
Verdict summarise(const std::vector<Finding>& findings);

// Judges the results (dense views, by name) of a call.
std::vector<Evidence> examine(const io::Call& call, const std::map<std::string, Tensor>& results,
                              const Options& options);
std::vector<Finding> verify(const io::Call& call, const std::map<std::string, Tensor>& results, const Options& options);

}  // namespace softdelta::judge
