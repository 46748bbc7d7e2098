// The errors of a result, row by row.
#pragma once

#include <string>
#include <vector>

#include "diagnose/replay/dense.h"
#include "judge/verify.h"

namespace softdelta::diagnose {

// One row of one head: of tokens, queries, keys, or of a state.
struct ErrorRow {
    Index batch, head, sequence;
    Index row, count;  // in its sequence, and how many that has
    Index first;       // of its numbers, in the result
    double noise;      // that a right kernel may have in its block
    double ratio;      // error / noise
    double factor;     // ⟨result, truth⟩ / ⟨truth, truth⟩, NaN when the truth is zero
    double rest;       // what a constant factor leaves, / noise
    bool nan, zero;    // holds NaN or infinity where the truth does not; all zeros where the truth is not
    bool wrong() const;
};

struct ErrorMap {
    std::string result, row_name;
    Index batches = 1, heads = 1;
    std::vector<ErrorRow> rows;
    // Of a part of a call: which batch rows, heads and packed sequences of the whole these are (empty: all), and how
    // many heads that has.
    std::vector<Index> batch_numbers, head_numbers, sequence_numbers;
    Index whole_heads = 1;
    Index wrong_rows() const;
};

inline Index number_of(const std::vector<Index>& numbers, Index i) {
    return i < 0 || numbers.empty() ? i : numbers[static_cast<std::size_t>(i)];
}

ErrorMap map_errors(const judge::Evidence& evidence, const Tensor& actual);

}  // namespace softdelta::diagnose
