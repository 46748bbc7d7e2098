#include "engines/cpu/delta_rule/split.h"

#include <algorithm>
#include <limits>

#include "core/parallel.h"
#include "engines/cpu/machine/thresholds.h"
#include "engines/cpu/machine/workspace.h"

namespace softdelta::cpu {

bool DeltaSplitPass::pays(const DeltaCall& call, const kernels::DeltaSplit& kernel, const core::DeltaOutputs& out,
                          int threads) {
    const Index most = core::thread_count(threads, std::numeric_limits<Index>::max());
    if (call.tiled() || most == 1 || call.sequences() * call.value_heads() >= thresholds::delta_heads ||
        call.largest(1).tokens < thresholds::shortest_split ||
        (out.states && call.state_interval() % kernels::longest_chunk != 0))
        return false;
    const bool by_tiles = kernel.sizes(call.largest(call.key_heads())).by_tiles;
    const double time = by_tiles ? thresholds::split_time_by_tiles : thresholds::split_time;
    const DeltaCall::Shares tokens = call.shares(most);
    return time * static_cast<double>(tokens.all) < static_cast<double>(most * tokens.busiest);
}

DeltaSplitPass::DeltaSplitPass(const DeltaCall& call, const kernels::DeltaSplit& kernel, const core::DeltaOutputs& out,
                               int threads)
    : call_(call),
      kernel_(kernel),
      out_(out),
      largest_(call.largest(call.key_heads())),
      sizes_(kernel.sizes(largest_)),
      heads_(call.sequences() * call.value_heads()),
      window_(std::max<Index>(1, thresholds::window_tokens / (heads_ * sizes_.chunk_rows))) {
    const auto parts = [&](Index columns) { return (largest_.value_size + columns - 1) / columns; };
    const Index most = core::thread_count(threads, std::numeric_limits<Index>::max());
    columns_ = heads_ * parts(sizes_.columns) < most ? sizes_.least_columns : sizes_.columns;
    parts_ = parts(columns_);
    team_ = core::Team(threads, ranges() + heads_ * window_);
}

std::size_t DeltaSplitPass::bytes() const {
    return static_cast<std::size_t>(team_.workers) * whole_pages(sizes_.scratch) +
           static_cast<std::size_t>(ranges()) * sizes_.state +
           static_cast<std::size_t>(windows_at_once() * heads_ * window_) * sizes_.folded;
}

std::byte* DeltaSplitPass::scratch(std::byte* memory, int thread) const {
    return memory + static_cast<std::size_t>(thread) * whole_pages(sizes_.scratch);
}

std::byte* DeltaSplitPass::state(std::byte* memory, Index range) const {
    return memory + static_cast<std::size_t>(team_.workers) * whole_pages(sizes_.scratch) +
           static_cast<std::size_t>(range) * sizes_.state;
}

std::byte* DeltaSplitPass::folded(std::byte* memory, Index window, Index value_head) const {
    const Index place = window % windows_at_once() * heads_ + value_head;
    return state(memory, ranges()) + static_cast<std::size_t>(place * window_) * sizes_.folded;
}

void DeltaSplitPass::fold(Index window, Index unit, std::byte* memory, std::byte* scratch) const {
    const Index chunk = unit % window_, n = unit / window_ / call_.key_heads(), h = unit / window_ % call_.key_heads();
    if (call_.is_padding(n)) return;
    const kernels::DeltaHeads heads = call_.heads(n, 0, call_.key_heads());
    const Index begin = (window * window_ + chunk) * sizes_.chunk_rows;
    if (begin >= heads.tokens) return;
    const Index value_head = n * call_.value_heads() + h * call_.group();
    kernel_.fold(heads, h, begin, std::min(sizes_.chunk_rows, heads.tokens - begin), scratch,
                 folded(memory, window, value_head) + static_cast<std::size_t>(chunk) * sizes_.folded,
                 static_cast<std::size_t>(window_) * sizes_.folded);
}

void DeltaSplitPass::scan(Index window, Index unit, std::byte* memory, std::byte* scratch) const {
    const Index value_head = unit / parts_, n = value_head / call_.value_heads();
    if (call_.is_padding(n)) {
        if (window == 0 && unit % (parts_ * call_.group()) == 0)
            call_.clear(out_, n, value_head % call_.value_heads() / call_.group(), 1);
        return;
    }
    const kernels::DeltaHeads heads = call_.heads(n, 0, call_.key_heads());
    const Index begin = window * window_ * sizes_.chunk_rows;
    if (begin > 0 && begin >= heads.tokens) return;
    const Index count = std::min(window_ * sizes_.chunk_rows, heads.tokens - begin);
    const Index column = unit % parts_ * columns_;
    const kernels::DeltaColumns at{value_head % call_.value_heads(), begin, count, column,
                                   std::min(column + columns_, heads.value_size)};
    kernel_.scan(heads, at, scratch, folded(memory, window, value_head), sizes_.folded, state(memory, unit),
                 call_.output(out_, n, 0));
}

// The scans are the longest units and begin first.
void DeltaSplitPass::run(std::byte* memory) const {
    const Index rows = window_ * sizes_.chunk_rows, windows = (largest_.tokens + rows - 1) / rows;
    const Index chunks = call_.sequences() * call_.key_heads() * window_;
    for (Index w = 0; w <= windows; ++w) {
        const Index scans = w > 0 ? ranges() : 0, folds = w < windows ? chunks : 0;
        core::parallel_units(team_, scans + folds, [&](int thread) {
            return [&, own = scratch(memory, thread)](Index unit) {
                unit < scans ? scan(w - 1, unit, memory, own) : fold(w, unit - scans, memory, own);
            };
        });
    }
}

}  // namespace softdelta::cpu
