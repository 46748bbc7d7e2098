#include "engines/cpu/delta_rule/split_backward.h"

#include <algorithm>
#include <atomic>

#include "engines/cpu/machine/thresholds.h"
#include "engines/cpu/machine/workspace.h"

namespace softdelta::cpu {

namespace {

Index parts_of(Index whole, Index part) {
    return (whole + part - 1) / part;
}

}  // namespace

bool DeltaSplitBackward::pays(const DeltaCall& call, int threads) {
    const Index most = core::all_threads(threads);
    if (most == 1 || call.largest(1).tokens < thresholds::shortest_split) return false;
    if (call.sequences() * call.key_heads() > thresholds::most_split_units * most) return false;
    const DeltaCall::Shares tokens = call.shares(most);
    return tokens.busiest == tokens.longest && 3 * tokens.all <= 2 * most * tokens.longest;
}

DeltaSplitBackward::DeltaSplitBackward(const DeltaCall& call, const kernels::DeltaBackwardSplit& kernel,
                                       const core::DeltaGradients& grad, Index sums_size, int threads)
    : call_(call),
      kernel_(kernel),
      grad_(grad),
      is_kept_(call.keeps(grad)),
      heads_(call.sequences() * call.value_heads()),
      sums_size_(sums_size),
      largest_(call.largest(1)),
      sizes_(kernel.sizes(largest_, is_kept_)) {
    const Index tokens = std::max<Index>(1, thresholds::window_tokens / heads_);
    segment_ = is_kept_ ? call.state_interval() : std::max<Index>(1, tokens / sizes_.chunk_rows) * sizes_.chunk_rows;
    segment_chunks_ = parts_of(segment_, sizes_.chunk_rows);
    window_ = std::max<Index>(1, tokens / segment_);
    const auto parts = [&](Index columns) { return parts_of(largest_.value_size, columns); };
    const auto ranges_of = [&](Index columns) { return heads_ * parts(columns); };
    const Index most = core::all_threads(threads);
    Index panels = parts_of(largest_.value_size, sizes_.columns);
    while (panels > 1 && ranges_of(panels * sizes_.columns) < most) panels = parts_of(panels, 2);
    columns_ = 2 * ranges_of(panels * sizes_.columns) < most ? sizes_.least_columns : panels * sizes_.columns;
    state_ = static_cast<std::size_t>(panels) * sizes_.state;
    parts_ = parts(columns_);
    meets_ = !is_kept_ && 2 * ranges() <= most;
    team_ = core::Team(threads, ranges() + key_units() * window_chunks());
    if (meets_ && bytes() > thresholds::most_kept_memory) meets_ = false;
}

void DeltaSplitBackward::take(kernels::Scratch& memory) {
    const auto bytes = [&](Index count, std::size_t each) {
        return memory.take<std::byte>(count * static_cast<Index>(each));
    };
    const Index window = heads_ * window_chunks(), all = chunks_before(call_.sequences());
    scratch_ = bytes(team_.workers, whole_pages(sizes_.scratch));
    states_ = bytes((is_kept_ ? 1 : 2) * ranges(), state_);
    folded_ = bytes((windows_at_once() + (is_kept_ ? 0 : 2)) * window, sizes_.folded);
    scanned_ = bytes(windows_at_once() * window, sizes_.scanned);
    saved_ = bytes(is_kept_ ? windows_at_once() * window : all * call_.value_heads(), sizes_.saved);
    gate_sums_ = memory.take<double>(sums_at_once() * window * sums_size_);
}

std::size_t DeltaSplitBackward::bytes() const {
    kernels::Scratch count(nullptr);
    DeltaSplitBackward(*this).take(count);
    return count.used();
}

void DeltaSplitBackward::run(std::byte* memory, double* sums, Index* left) {
    kernels::Scratch scratch(memory);
    take(scratch);
    left_ = left;
    std::fill_n(left_, key_units(), 0);
    std::fill_n(sums, heads_ * sums_size_, 0.0);
    Index steps = 0;
    for (Index w = 0; w < windows(); ++w) steps = std::max(steps, finish_step(w) + 1);
    for (Index step = 0, next = windows() - 1; step < steps; ++step) {
        run_side_by_side(works(step));
        for (; next >= 0 && finish_step(next) <= step; --next) add_gate_sums(next, sums);
    }
}

// Long units first.
DeltaSplitBackward::Works DeltaSplitBackward::works(Index step) const {
    using Pass = DeltaSplitBackward;
    const Index chunks = key_units() * window_chunks();
    Works all;
    const auto add = [&](Index window, Index units, auto pass) {
        if (window >= 0 && window < windows()) all.of[all.count++] = {window, units, pass};
    };
    add(scanned_in(step), ranges(), &Pass::scan);
    if (!is_kept_) add(swept_in(step), ranges(), &Pass::sweep);
    const auto [first, second] = std::minmax({swept_in(step - 1), scanned_in(step - 1)});
    if (finish_step(first) == step) add(first, chunks, &Pass::finish);
    if (second != first && finish_step(second) == step) add(second, chunks, &Pass::finish);
    if (is_kept_) add(scanned_in(step), heads_ * window_, &Pass::replay);
    add(scanned_in(step + 1), chunks, &Pass::fold_all);
    if (!is_kept_) add(swept_in(step + 1), chunks, &Pass::fold_written);
    return all;
}

bool DeltaSplitBackward::is_left(Index unit) const {
    return std::atomic_ref(left_[unit]).load(std::memory_order_relaxed) != 0;
}
void DeltaSplitBackward::leave(Index unit) const {
    std::atomic_ref(left_[unit]).store(1, std::memory_order_relaxed);
}

void DeltaSplitBackward::run_side_by_side(const Works& all) const {
    Index count = 0;
    for (const Work& work : all) count += work.units;
    core::parallel_units(team_, count, [&](int thread) {
        std::byte* own = scratch_ + static_cast<std::size_t>(thread) * whole_pages(sizes_.scratch);
        return [&, own](Index unit) {
            for (const Work& work : all) {
                if (unit < work.units) return (this->*work.run)(work.window, unit, own);
                unit -= work.units;
            }
        };
    });
}

void DeltaSplitBackward::fold_written(Index window, Index unit, std::byte* scratch) const {
    const Place at = chunk(window, unit / window_chunks(), unit % window_chunks());
    fold(at, false, scratch, folded_to_sweep(window, at));
}
void DeltaSplitBackward::fold_all(Index window, Index unit, std::byte* scratch) const {
    const Place at = chunk(window, unit / window_chunks(), unit % window_chunks());
    fold(at, true, scratch, folded(window, at));
}

void DeltaSplitBackward::fold(const Place& at, bool reads, std::byte* scratch, const Memory& to) const {
    if (at.count <= 0 || is_left(at.unit)) return;
    if (!kernel_.fold(heads(at), at.begin, at.count, reads, scratch, to.heads())) leave(at.unit);
}

void DeltaSplitBackward::sweep(Index window, Index unit, std::byte* scratch) const {
    const Index value_head = unit / parts_ % call_.group();
    const Place at = segment(window, unit / parts_ / call_.group(), 0);
    if (at.count <= 0 || is_left(at.unit)) return;
    kernel_.sweep(heads(at), columns(at, value_head, unit % parts_), scratch,
                  folded_to_sweep(window, at).chunks(value_head), state(unit), saved(window, at).chunks(value_head));
}

void DeltaSplitBackward::replay(Index window, Index unit, std::byte* scratch) const {
    const Index value_head = unit / window_ % call_.group();
    const Place at = segment(window, unit / window_ / call_.group(), unit % window_);
    if (at.count <= 0 || is_left(at.unit)) return;
    const kernels::DeltaColumns all{value_head, at.begin, at.count, 0, largest_.value_size};
    if (!kernel_.replay(heads(at), all, scratch, gradients(at), saved(window, at).chunks(value_head))) leave(at.unit);
}

// A sequence without tokens, too: the gradient of its last state is that of its first.
void DeltaSplitBackward::scan(Index window, Index unit, std::byte* scratch) const {
    const Index value_head = unit / parts_ % call_.group();
    for (Index s = window_; s-- > 0;) {
        const Place at = segment(window, unit / parts_ / call_.group(), s);
        if ((at.begin > 0 && at.count <= 0) || is_left(at.unit)) continue;
        kernel_.scan(heads(at), columns(at, value_head, unit % parts_), scratch, folded(window, at).chunks(value_head),
                     state(is_kept_ ? unit : ranges() + unit), gradients(at), scanned(window, at).chunks(value_head));
    }
}

void DeltaSplitBackward::finish(Index window, Index unit, std::byte* scratch) const {
    const Place at = chunk(window, unit / window_chunks(), unit % window_chunks());
    if (at.count <= 0 || is_left(at.unit)) return;
    kernels::DeltaGradients grad = gradients(at);
    grad.gate_sums = gate_sums(window, at);
    kernel_.finish(heads(at), at.begin, at.count, scratch, folded(window, at).heads(), saved(window, at).heads(),
                   scanned(window, at).heads(), grad);
}

// From the last chunk to the first.
void DeltaSplitBackward::add_gate_sums(Index window, double* sums) const {
    const Index size = call_.group() * sums_size_;
    for (Index unit = 0; unit < key_units(); ++unit)
        for (Index i = window_chunks(); i-- > 0;) {
            const Place at = chunk(window, unit, i);
            if (at.count <= 0 || is_left(unit)) continue;
            for (Index j = 0; j < size; ++j) sums[unit * size + j] += gate_sums(window, at)[j];
        }
}

double* DeltaSplitBackward::gate_sums(Index window, const Place& at) const {
    const Index place = (window % sums_at_once() * key_units() + at.unit) * window_chunks() + at.chunk;
    return gate_sums_ + place * call_.group() * sums_size_;
}

Index DeltaSplitBackward::chunks_of(Index sequence) const {
    const Index tokens = call_.tokens(sequence);
    return tokens / segment_ * segment_chunks_ + parts_of(tokens % segment_, sizes_.chunk_rows);
}
Index DeltaSplitBackward::chunks_before(Index sequence) const {
    Index count = 0;
    for (Index n = 0; n < sequence; ++n) count += chunks_of(n);
    return count;
}

DeltaSplitBackward::Place DeltaSplitBackward::segment(Index window, Index unit, Index segment) const {
    const Index sequence = unit / call_.key_heads(), begin = (window * window_ + segment) * segment_;
    return {unit,
            sequence,
            unit % call_.key_heads(),
            begin,
            std::min(segment_, call_.tokens(sequence) - begin),
            segment * segment_chunks_};
}

DeltaSplitBackward::Place DeltaSplitBackward::chunk(Index window, Index unit, Index chunk) const {
    Place at = segment(window, unit, chunk / segment_chunks_);
    const Index within = chunk % segment_chunks_ * sizes_.chunk_rows;
    at.begin += within;
    at.count = std::min(sizes_.chunk_rows, at.count - within);
    at.chunk = chunk;
    return at;
}

kernels::DeltaColumns DeltaSplitBackward::columns(const Place& at, Index value_head, Index part) const {
    const Index first = part * columns_;
    return {value_head, at.begin, at.count, first, std::min(first + columns_, largest_.value_size)};
}

DeltaSplitBackward::Memory DeltaSplitBackward::in_place(std::byte* memory, std::size_t bytes, Index place,
                                                        const Place& at) const {
    const Index chunks = (place * heads_ + at.unit * call_.group()) * window_chunks() + at.chunk;
    return {memory + static_cast<std::size_t>(chunks) * bytes, bytes,
            static_cast<std::size_t>(window_chunks()) * bytes};
}

// Where nothing was kept, of whole sequences.
DeltaSplitBackward::Memory DeltaSplitBackward::saved(Index window, const Place& at) const {
    if (is_kept_) return in_place(saved_, sizes_.saved, place_of(window), at);
    const Index chunks = chunks_of(at.sequence);
    const Index before = chunks_before(at.sequence) * call_.value_heads() + at.key_head * call_.group() * chunks;
    return {saved_ + static_cast<std::size_t>(before + window * window_chunks() + at.chunk) * sizes_.saved,
            sizes_.saved, static_cast<std::size_t>(chunks) * sizes_.saved};
}

}  // namespace softdelta::cpu
