// Squared errors of a result, block by block.
#pragma once

#include <cstdint>
#include <vector>

#include "judge/blocks.h"
#include "softdelta/softdelta.hpp"

namespace softdelta::judge {

// Which rows of heads to look at: all, or those that are marked, or those that are not. Row r of `for_each_run` begins
// at element r·features.
struct RowChoice {
    const std::vector<char>* marks = nullptr;  // null: all
    bool marked = false;
    bool has(std::int64_t row) const {
        return marks == nullptr || ((*marks)[static_cast<std::size_t>(row)] != 0) == marked;
    }
};

struct BlockErrors {
    std::vector<double> elements;       // that belong to the choice
    std::vector<double> squared_error;  // Σ (result − truth)² over finite pairs
    std::vector<double> squared_truth;  // Σ truth²
    std::vector<double> squared_ulp;    // Σ (ulp of truth in the result's type)²
};

// What a tensor-wide look finds besides.
struct Extremes {
    double largest_error = 0;
    std::int64_t largest_error_at = 0;
    std::int64_t mismatches = 0;  // result or truth is NaN or infinite, and they are not the same infinity
    std::int64_t first_mismatch = -1;
    std::int64_t true_nans = 0;   // of these, where the truth is NaN: the inputs are to blame
    std::int64_t infinities = 0;  // of the result as of the truth
};

// result: any float type, dense; truth: f64, dense; both of the blocks' shape.
BlockErrors measure_errors(const Blocks& blocks, const RowChoice& rows, const Tensor& result, const Tensor& truth,
                           int threads, Extremes* extremes = nullptr);

}  // namespace softdelta::judge
