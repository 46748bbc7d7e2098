#include "engines/cpu/delta_rule/split.h"

#include <algorithm>
#include <memory>

#include "core/parallel.h"
#include "engines/cpu/machine/thresholds.h"
#include "engines/cpu/machine/workspace.h"

namespace softdelta::cpu {

bool DeltaSplitPass::pays(const DeltaCall& call, const kernels::Table& table, const core::DeltaOutputs& out,
                          int threads) {
    const Index most = core::all_threads(threads);
    if (call.tiled() || most == 1 || call.sequences() * call.value_heads() >= thresholds::delta_heads ||
        call.largest(1).tokens < thresholds::shortest_split ||
        (call.wants_states(out) && call.state_interval() % kernels::longest_chunk != 0))
        return false;
    const bool by_tiles = table.delta_split->sizes(call.largest(call.key_heads())).by_tiles;
    const double time = by_tiles ? thresholds::split_time_by_tiles : thresholds::split_time;
    const DeltaCall::Shares tokens = call.shares(most);
    return time * static_cast<double>(tokens.all) < static_cast<double>(most * tokens.busiest);
}

DeltaSplitPass::DeltaSplitPass(const DeltaCall& call, const kernels::Table& table, const core::DeltaOutputs& out,
                               int threads)
    : call_(call),
      kernel_(*table.delta_split),
      step_(*table.delta_step),
      out_(out),
      largest_(call.largest(call.key_heads())),
      sizes_(kernel_.sizes(largest_)),
      thread_bytes_(
          whole_pages(std::max(sizes_.scratch, call.step_scratch(step_, call.steps(step_, out).most_tokens, 1)))),
      heads_(call.sequences() * call.value_heads()),
      window_(std::max<Index>(1, thresholds::window_tokens / (heads_ * sizes_.chunk_rows))) {
    const auto parts = [&](Index columns) { return (largest_.value_size + columns - 1) / columns; };
    const Index most = core::all_threads(threads);
    columns_ = heads_ * parts(sizes_.columns) < most ? sizes_.least_columns : sizes_.columns;
    parts_ = parts(columns_);
    team_ = core::Team(threads, ranges() + heads_ * window_);
}

Index DeltaSplitPass::windows() const {
    const Index rows = window_ * sizes_.chunk_rows;
    return (largest_.tokens + rows - 1) / rows;
}

void DeltaSplitPass::take(kernels::Scratch& memory) {
    const auto bytes = [&](Index count, std::size_t each) {
        return memory.take<std::byte>(count * static_cast<Index>(each));
    };
    scratch_ = bytes(team_.workers, thread_bytes_);
    states_ = bytes(ranges(), sizes_.state);
    folded_ = bytes(windows_at_once * heads_ * window_, sizes_.folded);
    chunks_done_ = memory.take<std::atomic<Index>>(windows() * key_units());
    windows_done_ = memory.take<std::atomic<Index>>(ranges());
}

std::size_t DeltaSplitPass::bytes() const {
    kernels::Scratch count(nullptr);
    DeltaSplitPass(*this).take(count);
    return count.used();
}

std::size_t DeltaSplitPass::bound(const DeltaCall& call, const kernels::Table& table, int threads,
                                  const core::Limits& limits, std::size_t step_scratch) {
    const Index most = core::all_threads(threads);
    if (call.tiled() || most == 1 || limits.tokens < thresholds::shortest_split) return 0;
    kernels::DeltaHeads largest = call.largest(call.key_heads());
    largest.tokens = limits.tokens;
    const kernels::DeltaSplitSizes sizes = table.delta_split->sizes(largest);
    std::size_t bytes = 0;
    for (Index n = 1; n <= limits.sequences && n * call.value_heads() < thresholds::delta_heads; ++n) {
        const Index heads = n * call.value_heads();
        const Index window = std::max<Index>(1, thresholds::window_tokens / (heads * sizes.chunk_rows));
        const Index ranges = heads * ((largest.value_size + sizes.least_columns - 1) / sizes.least_columns);
        const Index rows = window * sizes.chunk_rows, windows = (limits.tokens + rows - 1) / rows;
        kernels::Scratch count(nullptr);
        count.take<std::byte>(most * static_cast<Index>(whole_pages(std::max(sizes.scratch, step_scratch))));
        count.take<std::byte>(ranges * static_cast<Index>(sizes.state));
        count.take<std::byte>(windows_at_once * heads * window * static_cast<Index>(sizes.folded));
        count.take<std::atomic<Index>>(windows * n * call.key_heads());
        count.take<std::atomic<Index>>(ranges);
        bytes = std::max(bytes, count.used());
    }
    return bytes;
}

std::byte* DeltaSplitPass::folded(Index window, Index value_head) const {
    const Index place = window % windows_at_once * heads_ + value_head;
    return folded_ + static_cast<std::size_t>(place * window_) * sizes_.folded;
}

void DeltaSplitPass::fold(Index window, Index unit, std::byte* scratch) const {
    const Index key_unit = unit / window_, ranges_of_unit = call_.group() * parts_;
    for (Index range = key_unit * ranges_of_unit; range < (key_unit + 1) * ranges_of_unit; ++range)
        core::wait_until(windows_done_[range], window - windows_at_once + 1);
    fold_chunk(window, unit % window_, key_unit, scratch);
    chunks_done_[window * key_units() + key_unit].fetch_add(1, std::memory_order_release);
}

void DeltaSplitPass::fold_chunk(Index window, Index chunk, Index key_unit, std::byte* scratch) const {
    const Index n = key_unit / call_.key_heads(), h = key_unit % call_.key_heads();
    if (call_.is_padding(n) || call_.is_step(step_, out_, call_.sequence(n))) return;
    const kernels::DeltaHeads heads = call_.heads(n, 0, call_.key_heads());
    const Index begin = (window * window_ + chunk) * sizes_.chunk_rows;
    if (begin >= heads.tokens) return;
    kernel_.fold(heads, h, begin, std::min(sizes_.chunk_rows, heads.tokens - begin), scratch,
                 folded(window, key_unit * call_.group()) + static_cast<std::size_t>(chunk) * sizes_.folded,
                 static_cast<std::size_t>(window_) * sizes_.folded);
}

void DeltaSplitPass::scan(Index window, Index range, std::byte* scratch) const {
    core::wait_until(chunks_done_[window * key_units() + range / parts_ / call_.group()], window_);
    core::wait_until(windows_done_[range], window);
    scan_columns(window, range, scratch);
    windows_done_[range].store(window + 1, std::memory_order_release);
}

void DeltaSplitPass::scan_columns(Index window, Index range, std::byte* scratch) const {
    const Index value_head = range / parts_, n = value_head / call_.value_heads();
    const bool is_padding = call_.is_padding(n);
    if (is_padding || call_.is_step(step_, out_, call_.sequence(n))) {  // one unit does it for a key head
        if (window > 0 || range % (parts_ * call_.group()) != 0) return;
        const Index h = value_head % call_.value_heads() / call_.group();
        if (is_padding) return call_.clear(out_, n, h, 1);
        return step_.run(call_.heads(n, h, 1), scratch, call_.output(out_, n, h));
    }
    const kernels::DeltaHeads heads = call_.heads(n, 0, call_.key_heads());
    const Index begin = window * window_ * sizes_.chunk_rows;
    if (begin > 0 && begin >= heads.tokens) return;
    const Index count = std::min(window_ * sizes_.chunk_rows, heads.tokens - begin);
    const Index column = range % parts_ * columns_;
    const kernels::DeltaColumns at{value_head % call_.value_heads(), begin, count, column,
                                   std::min(column + columns_, heads.value_size)};
    kernel_.scan(heads, at, scratch, folded(window, value_head), sizes_.folded,
                 states_ + static_cast<std::size_t>(range) * sizes_.state, call_.output(out_, n, 0));
}

// Scans of a window, the longest units, begin before the next one is folded.
void DeltaSplitPass::run(std::byte* memory) {
    kernels::Scratch scratch(memory);
    take(scratch);
    std::uninitialized_value_construct_n(chunks_done_, windows() * key_units());
    std::uninitialized_value_construct_n(windows_done_, ranges());
    const Index folds = key_units() * window_, step = ranges() + folds;  // units of a window and of the one before
    core::parallel_units(team_, windows() * step, [&](int thread) {
        return [&, own = scratch_ + static_cast<std::size_t>(thread) * thread_bytes_](Index unit) {
            if (unit < folds) return fold(0, unit, own);
            unit -= folds;
            const Index window = unit / step;
            unit %= step;
            unit < ranges() ? scan(window, unit, own) : fold(window + 1, unit - ranges(), own);
        };
    });
}

}  // namespace softdelta::cpu
