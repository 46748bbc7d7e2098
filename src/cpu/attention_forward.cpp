// Units of the forward pass: row blocks of a head; for few rows over many keys, ranges of keys whose partial softmaxes
// are combined in order.
#include <algorithm>
#include <array>

#include "core/parallel.h"
#include "cpu/attention.h"
#include "cpu/attention_head.h"
#include "cpu/isa.h"
#include "cpu/work.h"
#include "cpu/workspace.h"

namespace softdelta::cpu {

namespace {

constexpr Index wanted_units = 32;  // enough for the processors of today
constexpr Index few_rows = 64;      // of a head: decode
constexpr Index shortest_key_range = 512;

constexpr Index range_step = 64;
constexpr Index most_unit_heads = 16;  // key heads that are read together

constexpr Index ceil_divide(Index a, Index b) {
    return (a + b - 1) / b;
}

// Keys that some row of a head may see by position.
struct Span {
    Index begin, end;
    explicit Span(const kernels::AttentionHead& head)
        : begin(std::clamp<Index>(head.left, 0, head.keys)),
          end(std::clamp<Index>(head.queries + head.right, begin, head.keys)) {}
};

struct Plan {
    bool decode = false;       // few rows: by their own kernel
    Index block_rows;          // query rows of a unit
    Index blocks;              // of the longest head
    Index parts = 0;           // key ranges; 0: units are blocks of rows
    Index range = 0;           // keys of a part
    Index unit_heads = 0;      // key heads of a unit that is a range of keys
    Index partial_floats = 0;  // of one part of a sequence: every head's o, maximum, sum
    std::size_t thread_bytes = 0, bytes = 0;
    int threads = 0;
};

// Cuts the keys of every sequence into ranges; into none where blocks of rows are enough.
void plan_ranges(const AttentionHeads& heads, Plan& plan) {
    const Index calls = plan.decode ? ceil_divide(heads.key_heads(), most_unit_heads) : 1;
    plan.unit_heads = ceil_divide(heads.key_heads(), calls);
    Index longest = 0;
    for (Index n = 0; n < heads.sequences(); ++n) {
        const Span span(heads.head(n, 0));
        longest = std::max(longest, span.end - span.begin);
    }
    const Index units = heads.sequences() * calls;
    const Index parts = units >= wanted_units ? 1 : ceil_divide(2 * wanted_units, units);
    plan.range = std::max(shortest_key_range, ceil_divide(ceil_divide(longest, parts), range_step) * range_step);
    plan.parts = std::max<Index>(1, ceil_divide(longest, plan.range));
    if (plan.parts == 1 && !plan.decode) plan.parts = 0;
}

Plan make_plan(const AttentionHeads& heads, const kernels::Table& table, int threads) {
    const kernels::AttentionForward& kernel = *table.attention_forward;
    const kernels::AttentionDecode& decode = *table.attention_decode;
    const kernels::AttentionHead largest = heads.largest();
    const Index rows = heads.most_rows();
    const Index all_heads = heads.sequences() * heads.key_heads();
    Plan plan{};
    plan.block_rows = kernel.block_rows;
    while (plan.block_rows > kernel.row_step && all_heads * ceil_divide(rows, plan.block_rows) < wanted_units)
        plan.block_rows -= kernel.row_step;
    plan.block_rows = std::max<Index>(1, std::min(plan.block_rows, rows));
    plan.blocks = ceil_divide(rows, plan.block_rows);
    // As many blocks, of even sizes.
    if (plan.blocks > 1)
        plan.block_rows = ceil_divide(ceil_divide(rows, plan.blocks), kernel.tile_rows) * kernel.tile_rows;
    plan.decode = rows <= decode.most_rows && largest.top_w < 0;
    if (all_heads * rows > 0 && rows <= few_rows) plan_ranges(heads, plan);
    Index units = all_heads * plan.blocks;
    std::size_t shared = 0;
    std::size_t scratch = kernel.scratch(largest, plan.block_rows);
    if (plan.parts > 0) {
        plan.partial_floats = heads.key_heads() * rows * (kernel.partial_row(largest) + 2);
        shared = static_cast<std::size_t>(heads.sequences() * plan.parts * plan.partial_floats) * sizeof(float);
        units = std::max(all_heads, heads.sequences() * plan.parts * ceil_divide(heads.key_heads(), plan.unit_heads));
        if (plan.decode) scratch = decode.scratch(largest, plan.unit_heads);
    }
    plan.threads = core::thread_count(threads, units);
    plan.thread_bytes = (scratch + 4095) / 4096 * 4096;
    plan.bytes = (shared + 63) / 64 * 64 + static_cast<std::size_t>(plan.threads) * plan.thread_bytes;
    return plan;
}

struct Pass {
    const AttentionHeads& heads;
    const kernels::AttentionForward& kernel;
    const kernels::AttentionDecode& decode;
    const core::AttentionOutputs& out;
    const Plan& plan;
    std::byte* memory;

    std::byte* thread_memory(int thread) const {
        return memory + plan.bytes - static_cast<std::size_t>(thread + 1) * plan.thread_bytes;
    }

    kernels::AttentionOutput output(Index n, Index hk) const {
        return {heads.query_rows(out.o, n, hk), heads.row_values(out.lse, n, hk)};
    }

    void blocks() const {
        core::parallel_units(plan.threads, heads.sequences() * heads.key_heads() * plan.blocks, [&](int thread) {
            return [&, scratch = thread_memory(thread)](Index unit) {
                const Index n = unit / plan.blocks / heads.key_heads();
                const Index hk = unit / plan.blocks % heads.key_heads();
                const kernels::AttentionHead head = heads.head(n, hk);
                // Causal rows see more keys the later they are: the long ones first.
                const Index begin = (plan.blocks - 1 - unit % plan.blocks) * plan.block_rows;
                const Index end = std::min(begin + plan.block_rows, head.rows());
                if (begin < end) kernel.run(head, begin, end, scratch, output(n, hk));
            };
        });
    }

    kernels::PartialSoftmax partial(Index n, Index part, Index hk) const {
        const Index rows = heads.most_rows();
        const Index row = kernel.partial_row(heads.largest());
        float* o =
            reinterpret_cast<float*>(memory) + (n * plan.parts + part) * plan.partial_floats + hk * rows * (row + 2);
        return {o, o + rows * row, o + rows * (row + 1)};
    }

    // Key heads [hk, hk + count) of sequence n and the keys of a part.
    void range(Index n, Index part, Index hk, Index count, std::byte* scratch) const {
        const Span span(heads.head(n, hk));
        const Index first = std::min(span.begin + part * plan.range, span.end);
        const Index last = std::min(first + plan.range, span.end);
        if (plan.decode) {
            std::array<kernels::AttentionHead, most_unit_heads> group;
            for (Index i = 0; i < count; ++i) group[static_cast<std::size_t>(i)] = heads.decode_head(n, hk + i);
            const Index stride = heads.most_rows() * (kernel.partial_row(heads.largest()) + 2);
            decode.run(group.data(), count, first, last, scratch, partial(n, part, hk), stride);
            return;
        }
        for (Index h = hk; h < hk + count; ++h) {
            const kernels::AttentionHead head = heads.head(n, h);
            kernel.run_partial(head, 0, head.rows(), first, last, scratch, partial(n, part, h));
        }
    }

    // Heads of a range of keys are one unit: their keys lie beside each other in memory.
    void ranges() const {
        const Index groups = ceil_divide(heads.key_heads(), plan.unit_heads);
        core::parallel_units(plan.threads, heads.sequences() * plan.parts * groups, [&](int thread) {
            return [&, scratch = thread_memory(thread)](Index unit) {
                const Index hk = unit % groups * plan.unit_heads;
                range(unit / groups / plan.parts, unit / groups % plan.parts, hk,
                      std::min(plan.unit_heads, heads.key_heads() - hk), scratch);
            };
        });
        core::parallel_units(plan.threads, heads.sequences() * heads.key_heads(), [&] {
            return [&](Index unit) {
                const Index n = unit / heads.key_heads(), hk = unit % heads.key_heads();
                const kernels::AttentionHead head = heads.head(n, hk);
                kernel.combine(head, 0, head.rows(), partial(n, 0, hk), plan.parts, plan.partial_floats, output(n, hk));
            };
        });
    }
};

}  // namespace

std::size_t attention_forward_workspace(const core::AttentionInputs& in, const core::AttentionOptions& options,
                                        const core::Execution& execution) {
    const kernels::Table& table = selected_kernels();
    const AttentionHeads heads(in, options, execution, table);
    const int threads = core::useful_threads(execution.threads, attention_work(heads, in, Direction::forward));
    return Workspace::with_alignment(make_plan(heads, table, threads).bytes);
}

void attention_forward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                       const core::Execution& execution, const core::AttentionOutputs& out) {
    const kernels::Table& table = selected_kernels();
    const AttentionHeads heads(in, options, execution, table);
    const int threads = core::useful_threads(execution.threads, attention_work(heads, in, Direction::forward));
    const Plan plan = make_plan(heads, table, threads);
    const Workspace workspace(execution, plan.bytes);
    const Pass pass{heads, *table.attention_forward, *table.attention_decode, out, plan, workspace.data()};
    plan.parts > 0 ? pass.ranges() : pass.blocks();
}

}  // namespace softdelta::cpu
