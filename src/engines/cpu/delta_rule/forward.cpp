// Units of the forward pass: a few key heads of a sequence with their value heads.
#include <algorithm>

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
    Index key_heads;        // of a unit
    Index units;            // of the call
    bool is_decode = true;  // all units are a few tokens, on states that stay in place
    core::Team team;
    std::size_t thread_bytes = 0;

    Pass(const DeltaCall& of, const kernels::Table& kernels, const core::DeltaOutputs& outputs, int wanted_threads)
        : call(of),
          table(kernels),
          out(outputs),
          key_heads(of.unit_key_heads(core::thread_count(wanted_threads, of.sequences() * of.key_heads()))),
          units(of.sequences() * units_of_sequence()),
          team(wanted_threads, units) {
        for (Index n = 0; is_decode && n < call.sequences(); ++n)
            is_decode = call.is_padding(n) || call.is_step(*table.delta_step, out, n);
        const std::size_t steps = call.step_scratch(*table.delta_step, out, key_heads);
        const std::size_t chunks = is_decode ? 0 : table.delta_forward->scratch(call.largest(key_heads));
        thread_bytes = whole_pages(std::max(steps, chunks));
    }

    Index units_of_sequence() const { return call.key_heads() / key_heads; }
    std::size_t bytes() const { return static_cast<std::size_t>(team.workers) * thread_bytes; }

    void run(std::byte* memory) const {
        const auto make_worker = [&](int thread) {
            std::byte* scratch = memory + static_cast<std::size_t>(thread) * thread_bytes;
            return [this, scratch](Index unit) {
                const Index n = unit / units_of_sequence(), h = unit % units_of_sequence() * key_heads;
                if (call.is_padding(n)) return call.clear(out, n, h, key_heads);
                const bool is_step = is_decode || call.is_step(*table.delta_step, out, n);
                (is_step ? table.delta_step->run : table.delta_forward->run)(call.heads(n, h, key_heads), scratch,
                                                                             call.output(out, n, h));
            };
        };
        if (is_decode)
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
    if (DeltaSplitPass::pays(call, table, out, threads))
        return Workspace::with_alignment(DeltaSplitPass(call, table, out, threads).bytes());
    return Workspace::with_alignment(Pass(call, table, out, threads).bytes());
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
    if (DeltaSplitPass::pays(call, table, out, threads))
        run(DeltaSplitPass(call, table, out, threads));
    else
        run(Pass(call, table, out, threads));
}

}  // namespace softdelta::cpu
