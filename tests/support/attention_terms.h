// What f32 arithmetic can do at all to the results of a drawn call: for every element the sum of the sizes of what it
// is a sum and a difference of, exponents included. Rounding errors are a few 2^-23 of that.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "support/random_attention.h"

namespace softdelta::test {

// By the names of results, row-major.
std::map<std::string, std::vector<double>> attention_terms(const RandomAttention& call);

}  // namespace softdelta::test
