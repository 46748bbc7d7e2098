#include "engines/cpu/delta_rule/split.h"

#include <algorithm>

#include "core/parallel.h"
#include "engines/cpu/machine/thresholds.h"
#include "engines/cpu/machine/workspace.h"

namespace softdelta::cpu {

bool DeltaSplitPass::pays(const DeltaCall& call, const core::DeltaOutputs& out) {
    return !call.tiled() && call.sequences() * call.value_heads() < thresholds::delta_heads &&
           call.largest(1).tokens >= thresholds::shortest_split && !out.states;
}

DeltaSplitPass::DeltaSplitPass(const DeltaCall& call, const kernels::DeltaSplit& kernel, const core::DeltaOutputs& out,
                               int threads)
    : call_(call),
      kernel_(kernel),
      out_(out),
      largest_(call.largest(call.key_heads())),
      sizes_(kernel.sizes(largest_)),
      heads_(call.sequences() * call.value_heads()),
      window_(std::max<Index>(1, thresholds::window_tokens / (heads_ * sizes_.chunk_rows))),
      parts_((largest_.value_size + sizes_.columns - 1) / sizes_.columns),
      threads_(core::thread_count(threads, heads_ * std::max(window_, parts_))) {}

std::size_t DeltaSplitPass::bytes() const {
    return static_cast<std::size_t>(threads_) * whole_pages(sizes_.scratch) +
           static_cast<std::size_t>(heads_) * (static_cast<std::size_t>(window_) * sizes_.folded + sizes_.state);
}

std::byte* DeltaSplitPass::scratch(std::byte* memory, int thread) const {
    return memory + static_cast<std::size_t>(thread) * whole_pages(sizes_.scratch);
}

std::byte* DeltaSplitPass::state(std::byte* memory, Index value_head) const {
    return memory + static_cast<std::size_t>(threads_) * whole_pages(sizes_.scratch) +
           static_cast<std::size_t>(value_head) * sizes_.state;
}

std::byte* DeltaSplitPass::folded(std::byte* memory, Index value_head) const {
    return state(memory, heads_) + static_cast<std::size_t>(value_head * window_) * sizes_.folded;
}

void DeltaSplitPass::fold(Index first_chunk, std::byte* memory) const {
    const Index key_heads = call_.sequences() * call_.key_heads();
    core::parallel_units(threads_, key_heads * window_, [&](int thread) {
        return [&, own = scratch(memory, thread)](Index unit) {
            const Index chunk = unit % window_, n = unit / window_ / call_.key_heads(),
                        h = unit / window_ % call_.key_heads();
            if (call_.is_padding(n)) return;
            const kernels::DeltaHeads heads = call_.heads(n, 0, call_.key_heads());
            const Index begin = (first_chunk + chunk) * sizes_.chunk_rows;
            if (begin >= heads.tokens) return;
            const Index value_head = n * call_.value_heads() + h * call_.group();
            kernel_.fold(heads, h, begin, std::min(sizes_.chunk_rows, heads.tokens - begin), own,
                         folded(memory, value_head) + static_cast<std::size_t>(chunk) * sizes_.folded,
                         static_cast<std::size_t>(window_) * sizes_.folded);
        };
    });
}

void DeltaSplitPass::scan(Index first_chunk, std::byte* memory) const {
    core::parallel_units(threads_, heads_ * parts_, [&](int thread) {
        return [&, own = scratch(memory, thread)](Index unit) {
            const Index value_head = unit / parts_, n = value_head / call_.value_heads();
            if (call_.is_padding(n)) {
                if (first_chunk == 0 && unit % (parts_ * call_.group()) == 0)
                    call_.clear(out_, n, value_head % call_.value_heads() / call_.group(), 1);
                return;
            }
            const kernels::DeltaHeads heads = call_.heads(n, 0, call_.key_heads());
            const Index begin = first_chunk * sizes_.chunk_rows;
            if (begin > 0 && begin >= heads.tokens) return;
            const Index count = std::min(window_ * sizes_.chunk_rows, heads.tokens - begin);
            const Index column = unit % parts_ * sizes_.columns;
            const kernels::DeltaColumns at{value_head % call_.value_heads(), begin, count, column,
                                           std::min(column + sizes_.columns, heads.value_size)};
            kernel_.scan(heads, at, own, folded(memory, value_head), sizes_.folded, state(memory, value_head),
                         call_.output(out_, n, 0));
        };
    });
}

void DeltaSplitPass::run(std::byte* memory) const {
    for (Index chunk = 0; chunk * sizes_.chunk_rows < largest_.tokens; chunk += window_) {
        fold(chunk, memory);
        scan(chunk, memory);
    }
}

}  // namespace softdelta::cpu
