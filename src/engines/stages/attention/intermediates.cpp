#include "engines/stages/attention/intermediates.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/error.h"
#include "engines/stages/stages.h"

namespace softdelta::stages::attention {

namespace {

using core::Index;
using core::Tensor;

struct Known {
    std::string_view name;
    Tensor Intermediates::*tensor;
    std::vector<Index> shape;
    std::string_view meaning;
};

std::vector<Known> list_known(const core::AttentionInputs& in, Index chunk_size) {
    const Index sequences = core::sequence_count(in), heads = in.q.shape[2];
    Index queries = in.q.shape[1], keys = in.k.shape[1];
    if (in.cu_seqlens_q) {
        queries = 0;
        if (in.cu_seqlens_k) keys = 0;
        for (Index n = 0; n < sequences; ++n) {
            const core::AttentionSequence s = core::sequence(in, n);
            queries = std::max(queries, s.q_count);
            if (in.cu_seqlens_k) keys = std::max(keys, s.k_count);
        }
    }
    const Index tiles = (queries + chunk_size - 1) / chunk_size;
    const std::vector<Index> per_row{in.q.shape[0], heads, in.q.shape[1]};
    return {{"lse", &Intermediates::lse, per_row, "[B, H, Lq]"},
            {"delta", &Intermediates::delta, per_row, "[B, H, Lq]"},
            {"ds", &Intermediates::ds, {sequences, heads, queries, keys}, "[N, H, Lq, Lk]"},
            {"dbias_tiles", &Intermediates::dbias_tiles, {sequences, heads, tiles, keys}, "[N, H, tiles of Lq, Lk]"}};
}

template <class Items, class Text>
std::string join(const Items& items, Text&& text) {
    std::string joined;
    for (const auto& item : items) joined += (joined.empty() ? "" : ", ") + std::string(text(item));
    return joined;
}

std::string write_shape(const std::vector<Index>& shape) {
    return "[" + join(shape, [](Index size) { return std::to_string(size); }) + "]";
}

}  // namespace

Intermediates find_intermediates(const core::AttentionInputs& in, const core::Execution& execution) {
    const std::vector<Known> known = list_known(in, execution.chunk_size);
    Intermediates found;
    for (const core::Stage& stage : execution.stages) {
        const auto match =
            std::find_if(known.begin(), known.end(), [&](const Known& k) { return k.name == stage.name; });
        if (match == known.end())
            throw core::InvalidArgument("stage " + std::string(stage.name) + ": unknown, expected one of " +
                                        join(known, [](const Known& k) { return k.name; }));
        const auto sizes = stage.tensor.shape.begin();
        const std::vector<Index> actual(sizes, sizes + stage.tensor.rank);
        if (actual != match->shape)
            throw core::InvalidArgument("stage " + std::string(stage.name) + ": shape is " + write_shape(actual) +
                                        ", expected " + write_shape(match->shape) + ", " + std::string(match->meaning));
        found.*match->tensor = stage.tensor;
    }
    return found;
}

}  // namespace softdelta::stages::attention

void softdelta::stages::check_attention_intermediates(const core::AttentionInputs& in,
                                                      const core::Execution& execution) {
    attention::find_intermediates(in, execution);
}
