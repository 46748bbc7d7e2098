// Few tokens or many: kernels for either share out the sequences of a call, each by its own length, so that what comes
// of one does not depend on its neighbours.
#pragma once

#include <algorithm>
#include <limits>

#include "core/delta_rule.h"

namespace softdelta::cuda {

struct TokenRange {
    core::Index shortest = 0, longest = std::numeric_limits<core::Index>::max();
};

// Tokens of the shortest and the longest sequence, as far as the host knows.
inline TokenRange lengths_of(const core::DeltaInputs& in) {
    const core::Index tokens = in.q.shape[1];
    if (!in.cu_seqlens) return {tokens, tokens};
    if (!in.cu_seqlens.device.is_cpu()) return {0, tokens};
    TokenRange lengths{tokens, 0};
    const core::Tensor none;
    for (core::Index n = 0; n < core::sequence_count(in); ++n) {
        const core::Index count = core::token_sequence(in.cu_seqlens, none, tokens, n).count;
        lengths.shortest = std::min(lengths.shortest, count);
        lengths.longest = std::max(lengths.longest, count);
    }
    return lengths;
}

}  // namespace softdelta::cuda
