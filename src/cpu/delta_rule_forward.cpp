// Units of the forward pass: a few key heads of a sequence with their value heads.
#include <omp.h>

#include "core/parallel.h"
#include "cpu/delta_rule.h"
#include "cpu/delta_rule_call.h"
#include "cpu/isa.h"
#include "cpu/workspace.h"

namespace softdelta::cpu {

namespace {

// Heads side by side share pages of memory, row after row of them: a unit takes up to so many key heads …
constexpr Index most_key_heads = 4;
// … while there are enough units for the processors of today, and their states fit a core's cache.
constexpr Index wanted_units = 16;
constexpr Index largest_states = 512 * 1024;  // bytes

struct Plan {
    Index key_heads;  // of a unit
    Index units;
    int threads;
    std::size_t thread_bytes, bytes;
};

Plan make_plan(const DeltaCall& call, const kernels::DeltaForward& kernel, int threads) {
    const kernels::DeltaHeads one = call.largest(1);
    const Index states = one.heads() * one.key_size * one.value_size * static_cast<Index>(sizeof(float));
    Plan plan{};
    plan.key_heads = 1;
    for (Index n = 2; n <= most_key_heads; n *= 2)
        if (call.key_heads() % n == 0 && call.sequences() * call.key_heads() / n >= wanted_units &&
            n * states <= largest_states)
            plan.key_heads = n;
    plan.units = call.sequences() * call.key_heads() / plan.key_heads;
    plan.threads = core::thread_count(threads, plan.units);
    plan.thread_bytes = (kernel.scratch(call.largest(plan.key_heads)) + 4095) / 4096 * 4096;
    plan.bytes = static_cast<std::size_t>(plan.threads) * plan.thread_bytes;
    return plan;
}

}  // namespace

std::size_t delta_forward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                    const core::Execution& execution, const core::DeltaOutputs& /*out*/) {
    const kernels::Table& table = selected_kernels();
    const DeltaCall call(in, options, execution, table);
    return Workspace::with_alignment(make_plan(call, *table.delta_forward, execution.threads).bytes);
}

void delta_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out) {
    const kernels::Table& table = selected_kernels();
    const kernels::DeltaForward& kernel = *table.delta_forward;
    const DeltaCall call(in, options, execution, table);
    const Plan plan = make_plan(call, kernel, execution.threads);
    const Workspace workspace(execution, plan.bytes);
    core::parallel_units(plan.threads, plan.units, [&] {
        std::byte* scratch = workspace.data() + static_cast<std::size_t>(omp_get_thread_num()) * plan.thread_bytes;
        return [&, scratch](Index unit) {
            const Index units = call.key_heads() / plan.key_heads;  // of a sequence
            const Index n = unit / units, h = unit % units * plan.key_heads;
            kernel.run(call.heads(n, h, plan.key_heads), scratch, call.output(out, n, h));
        };
    });
}

}  // namespace softdelta::cpu
