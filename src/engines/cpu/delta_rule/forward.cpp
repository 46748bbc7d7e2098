// Units of the forward pass: a few key heads of a sequence with their value heads.
#include <algorithm>
#include <limits>

#include "core/parallel.h"
#include "engines/cpu/delta_rule/call.h"
#include "engines/cpu/delta_rule/delta_rule.h"
#include "engines/cpu/delta_rule/split.h"
#include "engines/cpu/machine/isa.h"
#include "engines/cpu/machine/workspace.h"
#include "engines/cpu/work.h"

namespace softdelta::cpu {

namespace {

struct Pass {
    const DeltaCall& call;
    const kernels::Table& table;
    const core::DeltaOutputs& out;
    DeltaCall::Steps steps;  // all: decode
    Index key_heads;         // of a unit
    Index units;             // of the call
    core::Team team;
    std::size_t thread_bytes = 0;

    Pass(const DeltaCall& of, const kernels::Table& kernels, const core::DeltaOutputs& outputs, int wanted_threads)
        : call(of),
          table(kernels),
          out(outputs),
          steps(of.steps(*kernels.delta_step, outputs)),
          key_heads(of.unit_key_heads(core::thread_count(wanted_threads, of.sequences() * of.key_heads()), steps.all)),
          units(of.sequences() * units_of_sequence()),
          team(wanted_threads, units) {
        thread_bytes = whole_pages(std::max(call.step_scratch(*table.delta_step, steps.most_tokens, key_heads),
                                            steps.all ? 0 : table.delta_forward->scratch(call.largest(key_heads))));
    }

    Index units_of_sequence() const { return call.key_heads() / key_heads; }
    std::size_t bytes() const { return static_cast<std::size_t>(team.workers) * thread_bytes; }

    void run(std::byte* memory) const {
        const auto make_worker = [&](int thread) {
            std::byte* scratch = memory + static_cast<std::size_t>(thread) * thread_bytes;
            return [this, scratch, heads = call.largest(key_heads), step = call.step_output(out)](Index unit) mutable {
                const Index n = unit / units_of_sequence(), h = unit % units_of_sequence() * key_heads;
                const core::DeltaSequence s = call.sequence(n);
                if (s.is_padding) return call.clear(out, n, h, key_heads);
                call.place(heads, s, h);
                if (steps.all || call.is_step(*table.delta_step, out, s)) {
                    call.place(step, out, s, h);
                    return table.delta_step->run(heads, scratch, step);
                }
                table.delta_forward->run(heads, scratch, call.output(out, n, h));
            };
        };
        if (steps.all)
            core::parallel_shares(team, units, make_worker);
        else
            core::parallel_units(team, units, make_worker);
    }
};

}  // namespace

std::size_t delta_forward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                    const core::Execution& execution, const core::DeltaOutputs& out) {
    const kernels::Table& table = selected_kernels();
    const DeltaCall call(in, options, execution, table);
    const int threads = core::useful_threads(execution.threads, delta_work(call, in, Direction::forward));
    const DeltaCall parts = call.in_parts(threads);
    if (DeltaSplitPass::pays(parts, table, out, threads))
        return Workspace::with_alignment(DeltaSplitPass(call, table, out, threads).bytes());
    return Workspace::with_alignment(Pass(parts, table, out, threads).bytes());
}

std::size_t delta_forward_bound(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                const core::Execution& execution, const core::Limits& given) {
    const kernels::Table& table = selected_kernels();
    const DeltaCall call(in, options, execution, table);
    core::Limits limits = given;
    limits.tokens = std::min(given.tokens, std::numeric_limits<Index>::max() / options.steps) * options.steps;
    std::size_t steps = 0, chunks = 0;
    for (Index n = 1; n <= call.most_unit_key_heads(); n *= 2) {
        kernels::DeltaHeads heads = call.largest(n);
        heads.tokens = limits.tokens;
        chunks = std::max(chunks, table.delta_forward->scratch(heads));
        heads.tokens = std::min(limits.tokens, table.delta_step->most_tokens);
        steps = std::max(steps, table.delta_step->scratch(heads));
    }
    const std::size_t whole =
        static_cast<std::size_t>(core::all_threads(execution.threads)) * whole_pages(std::max(steps, chunks));
    return Workspace::with_alignment(
        std::max(whole, DeltaSplitPass::bound(call, table, execution.threads, limits, steps)));
}

void delta_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out) {
    const kernels::Table& table = selected_kernels();
    const DeltaCall call(in, options, execution, table);
    const int threads = core::useful_threads(execution.threads, delta_work(call, in, Direction::forward));
    const auto run = [&](auto&& pass) {
        const Workspace workspace(execution, pass.bytes());
        pass.run(workspace.data());
    };
    const DeltaCall parts = call.in_parts(threads);
    if (DeltaSplitPass::pays(parts, table, out, threads))
        run(DeltaSplitPass(call, table, out, threads));
    else
        run(Pass(parts, table, out, threads));
}

}  // namespace softdelta::cpu
