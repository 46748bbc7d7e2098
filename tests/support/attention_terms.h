// What f32 arithmetic can do at all to the results of a drawn call.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "support/random_attention.h"

namespace softdelta::test {

// For every element of a result the sum of the sizes of what it is a sum and a difference of, exponents included:
// rounding errors are a few 2^-23 of that. By the names of results, row-major.
std::map<std::string, std::vector<double>> attention_terms(const RandomAttention& call);

// A bias [N, H, Lq, Lk] in f64 with which the scores of a call with a far bias are what f32 keeps of them, q·k·scale +
// bias rounded: with it the reference computes what the contract asks for. No array where the bias can stay.
Array kept_bias(const RandomAttention& call);

}  // namespace softdelta::test
