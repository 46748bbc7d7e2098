// The intermediates of attention that a caller may ask for (docs/stages.md).
#pragma once

#include "core/attention.h"
#include "core/execution.h"

namespace softdelta::stages::attention {

// Absent: not wanted.
struct Intermediates {
    core::Tensor lse;          // [B, H, Lq]
    core::Tensor delta;        // [B, H, Lq] rowsum(do∘o) − dlse
    core::Tensor ds;           // [N, H, Lq, Lk] p∘(dp − delta)
    core::Tensor dbias_tiles;  // [N, H, ⌈Lq/C⌉, Lk] column sums of ds over each tile of queries
};

// Throws core::InvalidArgument for a name or shape that does not exist. N, Lq, Lk of the last two: sequences and
// longest sequence of a packed call.
Intermediates find_intermediates(const core::AttentionInputs& in, const core::Execution& execution);

}  // namespace softdelta::stages::attention
