// Results of a drawn call: each beside an unreadable page, then as dense tensors that the judge takes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/call/call.h"
#include "support/array.h"
#include "support/guarded.h"

namespace softdelta::test {

using Names = std::vector<std::string>;
using DenseResults = std::map<std::string, io::OwnedTensor>;

// Memory for these results of the call, in layouts that the seed draws.
std::map<std::string, Guarded> make_results(const io::Call& call, const Names& names, std::uint64_t seed, Side side);

// What a call has written there. Throws when it wrote a byte that belongs to none. Absent tensors are left out.
DenseResults dense(const io::Call& call, const std::map<std::string, Guarded>& results);

}  // namespace softdelta::test
