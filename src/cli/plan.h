// The inputs of `softdelta make --plan gate`.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "io/call/make_case.h"

namespace softdelta::cli {

// Classes of inputs, as softdelta.audit draws them: each shows mistakes that the others hide. Of `base` are the
// operation, the seed, the storage type, and whether gradients are asked for.
std::vector<std::pair<std::string, io::MakeOptions>> gate_plan(const io::MakeOptions& base);

}  // namespace softdelta::cli
