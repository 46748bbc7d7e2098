// Models whose attention, delta rules, convolutions and gated norms `softdelta bench --model` times.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/bench/problem.h"

namespace softdelta::cli {

// prefill: all tokens of a context, forward; decode: one token behind a context; training: forward and backward.
enum class Step { prefill, decode, training };

// The layers of one kind of a model, in one step.
struct ModelRow {
    std::string name;  // "gated_delta_rule, decode"
    Step step = Step::prefill;
    std::int64_t layers = 0;          // so many in the model
    std::int64_t timed = 0;           // so many are computed in a call, each with a state or cache of its own
    double tokens = 0;                // of a layer in a call
    std::function<Problem()> make{};  // made when its turn comes
};

std::vector<std::string> model_names();
std::vector<ModelRow> model_rows(const std::string& model, std::int64_t batch, std::int64_t context);

}  // namespace softdelta::cli
