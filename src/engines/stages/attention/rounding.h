// The random numbers of low-precision attention: a stream for every unit of work of every pass.
#pragma once

#include <type_traits>

#include "core/attention.h"
#include "core/execution.h"
#include "engines/stages/rounding.h"

namespace softdelta::stages::attention {

// forward: unit = query head of a sequence, also where the backward pass repeats it; scores: the same unit's gradients;
// keys: key head of a sequence, dk and dv; bias, sink: parts of dbias and dsink.
enum class RoundedPass : std::uint64_t { forward, scores, keys, bias, sink };

template <class T>
Rounding make_rounding(const core::AttentionInputs& in, const core::Execution& execution, RoundedPass pass,
                       core::Index unit) {
    const std::uint64_t seed = std::is_same_v<T, float> ? execution.rounding_seed : 0;
    return {seed, static_cast<std::uint64_t>(pass) << 48 | static_cast<std::uint64_t>(unit), in.q.dtype};
}

}  // namespace softdelta::stages::attention
