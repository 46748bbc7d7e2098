// Units of the forward pass: key heads of sequences with their value heads.
#include <omp.h>

#include "core/parallel.h"
#include "cpu/delta_rule.h"
#include "cpu/delta_rule_head.h"
#include "cpu/isa.h"
#include "cpu/workspace.h"

namespace softdelta::cpu {

namespace {

struct Plan {
    Index units;
    int threads;
    std::size_t thread_bytes, bytes;
};

Plan make_plan(const DeltaHeads& heads, const kernels::DeltaForward& kernel, int threads) {
    Plan plan{};
    plan.units = heads.sequences() * heads.key_heads();
    plan.threads = core::thread_count(threads, plan.units);
    plan.thread_bytes = (kernel.scratch(heads.largest(heads.group())) + 4095) / 4096 * 4096;
    plan.bytes = static_cast<std::size_t>(plan.threads) * plan.thread_bytes;
    return plan;
}

}  // namespace

std::size_t delta_forward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                    const core::Execution& execution, const core::DeltaOutputs& /*out*/) {
    const kernels::Table& table = selected_kernels();
    const DeltaHeads heads(in, options, execution, table);
    return Workspace::with_alignment(make_plan(heads, *table.delta_forward, execution.threads).bytes);
}

void delta_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out) {
    const kernels::Table& table = selected_kernels();
    const kernels::DeltaForward& kernel = *table.delta_forward;
    const DeltaHeads heads(in, options, execution, table);
    const Plan plan = make_plan(heads, kernel, execution.threads);
    const Workspace workspace(execution, plan.bytes);
    core::parallel_units(plan.threads, plan.units, [&] {
        std::byte* scratch = workspace.data() + static_cast<std::size_t>(omp_get_thread_num()) * plan.thread_bytes;
        return [&, scratch](Index unit) {
            const Index n = unit / heads.key_heads(), hv = unit % heads.key_heads() * heads.group();
            kernel.run(heads.head(n, hv, heads.group()), scratch, heads.output(out, n, hv));
        };
    });
}

}  // namespace softdelta::cpu
