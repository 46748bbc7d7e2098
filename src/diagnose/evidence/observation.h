// A dump's results beside the truth, and how well other results fit them, relative to what rounding may cost.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "diagnose/replay/dense.h"
#include "judge/verify.h"

namespace softdelta::diagnose {

// The pass that makes a mistake; results of the other are right.
enum class Scope { both, forward, backward };

// How far two sets of results are apart.
struct Distance {
    double cost = 0;                             // Σ over blocks of log(1 + (difference / noise)²)
    double worst_block = 0;                      // difference / noise
    std::vector<double> blocks;                  // difference / noise of every block of every result
    std::map<std::string, double> results;       // difference / noise of a result as a whole
    std::map<std::string, double> worst_blocks;  // and in its worst block
    std::string worst_result() const;
};

// The error before, as a multiple of what a mistake changes.
struct Fit {
    double times = 0;        // 1: the mistake itself; of a lost part, 1 − f when the part is multiplied by f
    double correlation = 0;  // 0 to 1
    double sigma = 0;        // how far beyond noise of any size that multiple is
};

class Observation {
  public:
    Observation(const std::vector<judge::Evidence>& evidence, const std::map<std::string, Tensor>& actual);

    Distance to(const Results& mistaken, Scope scope) const { return between(mistaken, scope, actual_); }
    Distance between(const Results& mistaken, Scope scope, const Results& other) const;
    // Whether some number is NaN or infinite where the truth is not.
    bool is_finite_less_often(const Results& results) const;
    // With the truth for what lies outside the scope.
    Results limit(Results mistaken, Scope scope) const;
    // The results of two mistakes whose effects add up.
    Results add(const Results& one, const Results& other) const;
    // How many independent errors each block of each result is worth, in the order of Distance::blocks.
    const std::vector<double>& independent() const { return independent_; }
    // Of the error in blocks beyond rounding, the part of its square that a constant factor explains: 0 to 1.
    double scaled_part() const;
    Fit fit(const Results& mistaken, Scope scope) const;
    const Results& actual() const { return actual_; }
    const Results& truth() const { return truth_; }

  private:
    struct Noise {
        judge::Blocks blocks;
        std::vector<double> of_block;  // RMSE
        double infinite;               // numbers from here on are infinite in the result's type
    };
    Results actual_, truth_;
    std::map<std::string, Noise> noise_;
    std::vector<double> independent_;
};

}  // namespace softdelta::diagnose
