#include "engines/cpu/attention/plan.h"

#include <algorithm>

#include "core/parallel.h"
#include "engines/cpu/machine/thresholds.h"
#include "engines/cpu/machine/workspace.h"

namespace softdelta::cpu {

namespace {

// Keys that some row of a head may see by position.
struct Span {
    Index begin, end;
    explicit Span(const AttentionOutline& head)
        : begin(std::clamp<Index>(head.left, 0, head.keys)),
          end(std::clamp<Index>(head.queries + head.right, begin, head.keys)) {}
    Index count() const { return end - begin; }
};

}  // namespace

AttentionPlan::AttentionPlan(const AttentionHeads& heads, const kernels::Table& table, int threads)
    : key_heads_(heads.key_heads()),
      key_groups_(ceil_divide(key_heads_, thresholds::most_unit_heads)),
      unit_heads_(ceil_divide(key_heads_, key_groups_)),
      parts_(key_groups_ >= thresholds::range_units ? 1 : ceil_divide(2 * thresholds::range_units, key_groups_)),
      decode_rows_(table.attention_decode->most_rows),
      tile_rows_(table.attention_forward->tile_rows(heads.largest().bf16_products)) {
    const Counts counts = choose_block_rows(heads, *table.attention_forward, core::all_threads(threads));
    partial_rows_ = counts.partial_rows;
    combines_ = counts.combines;
    has_blocks_ = counts.blocks > 0;
    const Index combinations = combines_ ? heads.sequences() * key_heads_ : 0;
    team_ = core::Team(threads, std::max(counts.blocks + counts.ranges, combinations));
    kernels::AttentionHead head = heads.largest();
    std::size_t scratch = counts.rows > 0 ? table.attention_forward->scratch(head, counts.rows) : 0;
    if (counts.decoded_rows > 0) {
        head.queries = counts.decoded_rows / head.group;
        scratch = std::max(scratch, table.attention_decode->scratch(head, unit_heads_));
    }
    thread_bytes_ = whole_pages(scratch);
}

// Keys of a range of so many: short enough to give the threads of one sequence enough units. More sequences would do
// with longer ones, but then neighbours would change a sequence's bits.
Index AttentionPlan::range(Index keys) const {
    if (keys <= thresholds::shortest_range) return thresholds::shortest_range;
    return std::max(thresholds::shortest_range,
                    ceil_divide(ceil_divide(keys, parts_), thresholds::range_step) * thresholds::range_step);
}

// Chooses the rows of a block: as many as the kernel takes, unless that gives too few units for the threads.
AttentionPlan::Counts AttentionPlan::choose_block_rows(const AttentionHeads& heads,
                                                       const kernels::AttentionForward& kernel, Index threads) {
    const bool shared = kernel.packed_keys(heads.largest()) > 0;
    block_rows_ = shared ? std::min(kernel.block_rows, thresholds::sharing_block) : kernel.block_rows;
    const auto wanted = [&] {
        if (shared) return thresholds::sharing_blocks_of_thread * threads;
        const bool is_short = block_rows_ <= thresholds::short_block;
        return (is_short ? thresholds::short_blocks_of_thread : thresholds::blocks_of_thread) * threads;
    };
    Counts counts = count(heads);
    while (counts.blocks > 0 && counts.blocks < wanted() && block_rows_ > thresholds::block_step) {
        block_rows_ -= thresholds::block_step;
        counts = count(heads);
    }
    return counts;
}

AttentionPlan::Counts AttentionPlan::count(const AttentionHeads& heads) const {
    Counts all;
    for (Index n = 0; n < heads.sequences(); ++n) {
        const AttentionCut c = cut(heads.outline(n));
        (c.by_keys ? all.ranges : all.blocks) += units(c);
        if (c.by_keys) {
            all.partial_rows += c.pieces * c.rows;
            all.combines = all.combines || c.pieces > 1;
        }
        Index& most = c.decode ? all.decoded_rows : all.rows;
        most = std::max(most, c.by_keys ? c.rows : c.size);
    }
    return all;
}

AttentionCut AttentionPlan::cut(const AttentionOutline& outline) const {
    const Index rows = outline.rows();
    const Span seen(outline);
    const kernels::Range packed{seen.begin / kernels::AttentionForward::key_step * kernels::AttentionForward::key_step,
                                seen.end};
    if (rows > 0 && rows <= thresholds::decode_rows) {
        const Index keys = range(seen.count()), ranges = seen.count() <= keys ? 1 : ceil_divide(seen.count(), keys);
        const bool decode = rows <= decode_rows_ && outline.top_w < 0;
        if (decode || ranges > 1) return {true, decode, ranges, keys, seen.begin, rows, packed};
    }
    const Index blocks = ceil_divide(rows, block_rows_);
    const Index size = blocks > 1 ? ceil_divide(ceil_divide(rows, blocks), tile_rows_) * tile_rows_ : rows;
    return {false, false, blocks, size, 0, rows, packed};  // blocks of even sizes
}

// A range has at least as many keys as the shortest, and a sequence at most as many ranges as there are parts.
AttentionPlan::Bound AttentionPlan::bound(kernels::AttentionHead head, const kernels::Table& table,
                                          const core::Limits& limits) const {
    const Index rows = limits.tokens * head.group;
    const Index ranges = std::clamp<Index>(ceil_divide(limits.keys, thresholds::shortest_range), 1, parts_);
    const Index few = std::min(rows, limits.sequences * thresholds::decode_rows);
    head.queries = limits.tokens;
    head.keys = limits.keys;
    const Index block =
        std::max(ceil_divide(table.attention_forward->block_rows, tile_rows_) * tile_rows_, thresholds::decode_rows);
    std::size_t scratch =
        table.attention_forward->scratch(head, std::min(block, ceil_divide(rows, tile_rows_) * tile_rows_));
    if (head.group <= decode_rows_) {
        head.queries = std::min(limits.tokens, decode_rows_ / head.group);
        scratch = std::max(scratch, table.attention_decode->scratch(head, unit_heads_));
    }
    return {ranges * few, whole_pages(scratch)};
}

}  // namespace softdelta::cpu
