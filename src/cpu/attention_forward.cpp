// Units of the forward pass: row blocks of a head; for few rows over many keys, ranges of keys whose partial softmaxes
// are combined in order.
#include <omp.h>

#include <algorithm>

#include "core/parallel.h"
#include "cpu/attention.h"
#include "cpu/attention_head.h"
#include "cpu/isa.h"
#include "cpu/workspace.h"

namespace softdelta::cpu {

namespace {

constexpr Index wanted_units = 32;  // enough for the processors of today
constexpr Index few_rows = 64;      // of a head: decode
constexpr Index shortest_key_range = 512;

constexpr Index ceil_divide(Index a, Index b) {
    return (a + b - 1) / b;
}

struct Plan {
    Index block_rows;          // query rows of a unit
    Index blocks;              // of the longest head
    Index parts = 1;           // key ranges
    Index range = 0;           // keys of a part
    Index partial_floats = 0;  // of one part of a sequence: every head's o, maximum, sum
    std::size_t thread_bytes = 0, bytes = 0;
    int threads = 0;
};

Plan make_plan(const AttentionHeads& heads, const kernels::AttentionForward& kernel, int threads) {
    const kernels::AttentionHead largest = heads.largest();
    const Index rows = heads.most_rows();
    const Index all_heads = heads.sequences() * heads.key_heads();
    Plan plan{};
    plan.block_rows = kernel.block_rows;
    while (plan.block_rows > kernel.row_step && all_heads * ceil_divide(rows, plan.block_rows) < wanted_units)
        plan.block_rows /= 2;
    plan.block_rows = std::max<Index>(1, std::min(plan.block_rows, rows));
    plan.blocks = ceil_divide(rows, plan.block_rows);
    if (rows <= few_rows && heads.sequences() < wanted_units) {
        const Index parts = ceil_divide(2 * wanted_units, heads.sequences());
        plan.range = std::max(shortest_key_range, ceil_divide(largest.keys, parts));
        plan.parts = std::max<Index>(1, ceil_divide(largest.keys, plan.range));
    }
    Index units = all_heads * plan.blocks;
    std::size_t shared = 0;
    if (plan.parts > 1) {
        plan.partial_floats = heads.key_heads() * rows * (kernel.partial_row(largest) + 2);
        shared = static_cast<std::size_t>(heads.sequences() * plan.parts * plan.partial_floats) * sizeof(float);
        units = heads.sequences() * plan.parts;
    }
    plan.threads = core::thread_count(threads, units);
    plan.thread_bytes = (kernel.scratch(largest, plan.block_rows) + 4095) / 4096 * 4096;
    plan.bytes = (shared + 63) / 64 * 64 + static_cast<std::size_t>(plan.threads) * plan.thread_bytes;
    return plan;
}

struct Pass {
    const AttentionHeads& heads;
    const kernels::AttentionForward& kernel;
    const core::AttentionOutputs& out;
    const Plan& plan;
    std::byte* memory;

    std::byte* thread_memory() const {
        return memory + plan.bytes - static_cast<std::size_t>(omp_get_thread_num() + 1) * plan.thread_bytes;
    }

    kernels::AttentionOutput output(Index n, Index hk) const {
        return {heads.query_rows(out.o, n, hk), heads.row_values(out.lse, n, hk)};
    }

    void blocks() const {
        core::parallel_units(plan.threads, heads.sequences() * heads.key_heads() * plan.blocks, [&] {
            return [&, scratch = thread_memory()](Index unit) {
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

    // All heads of a range of keys are one unit: their keys lie beside each other in memory.
    void ranges() const {
        core::parallel_units(plan.threads, heads.sequences() * plan.parts, [&] {
            return [&, scratch = thread_memory()](Index unit) {
                const Index n = unit / plan.parts, part = unit % plan.parts;
                for (Index hk = 0; hk < heads.key_heads(); ++hk) {
                    const kernels::AttentionHead head = heads.head(n, hk);
                    kernel.run_partial(head, 0, head.rows(), part * plan.range,
                                       std::min((part + 1) * plan.range, head.keys), false, scratch,
                                       partial(n, part, hk));
                }
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
    return Workspace::with_alignment(make_plan(heads, *table.attention_forward, execution.threads).bytes);
}

void attention_forward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                       const core::Execution& execution, const core::AttentionOutputs& out) {
    const kernels::Table& table = selected_kernels();
    const AttentionHeads heads(in, options, execution, table);
    const Plan plan = make_plan(heads, *table.attention_forward, execution.threads);
    const Workspace workspace(execution, plan.bytes);
    const Pass pass{heads, *table.attention_forward, out, plan, workspace.data()};
    plan.parts > 1 ? pass.ranges() : pass.blocks();
}

}  // namespace softdelta::cpu
