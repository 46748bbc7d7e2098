// What a call will need of memory besides the tensors of its file, from shapes, before anything is allocated for it. A
// tensor without elements takes no byte of a file, and may stand for a state of any size.
#pragma once

#include <string>
#include <vector>

#include "io/call/layer.h"

namespace softdelta::judge {

// Bytes, about: no less than what is allocated at any moment, and no more than three times as much where that is large.
// Engines other than reference and stages count by their results alone: what they need besides, io::check tells.
double memory_to_compute(const io::Call& call, const std::string& engine, int threads);
double memory_to_compute(const io::LayerCall& call, const std::string& engine, int threads);

// To judge these results of a dump; or those of an engine, which are computed first (empty: the dump's).
double memory_to_judge(const io::Call& call, const std::vector<std::string>& results, const std::string& engine,
                       int threads);
double memory_to_judge(const io::LayerCall& call, const std::vector<std::string>& results, const std::string& engine,
                       int threads);

// "5.0 GiB"
std::string memory_text(double bytes);

// Throws CaseError when the call of a file needs more than is allowed.
void expect_memory(const std::string& file, double needed, double allowed);

}  // namespace softdelta::judge
