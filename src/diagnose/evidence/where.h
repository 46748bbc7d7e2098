// Where a dump is wrong, in words: patterns of the rows whose error is beyond rounding.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "diagnose/evidence/error_map.h"

namespace softdelta::diagnose {

// Sentences, each with the result that it is about and the numbers behind it.
std::vector<std::string> describe_where(const io::Call& call, const std::vector<judge::Evidence>& evidence,
                                        const std::map<std::string, Tensor>& actual, const std::vector<ErrorMap>& maps);

}  // namespace softdelta::diagnose
