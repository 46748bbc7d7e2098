// A call in chunks: every chunk is folded, in any order; then heads are scanned.
#include <algorithm>
#include <cstdint>
#include <string>

#include "engines/cuda/delta_rule/chunk.h"
#include "engines/cuda/delta_rule/fold/launch.h"
#include "engines/cuda/delta_rule/passes.h"
#include "engines/cuda/device/workspace.h"

namespace softdelta::cuda {

namespace {

// What the scan reads is what is kept.
bool folds_into_kept(const DeltaCall& call) {
    return call.gate == core::Gate::channel;
}

// A call's way, and its memory.
struct ChunkPlan {
    int folding = 0;  // folding_blocks()
    ChunkForward pass;
};

// Warpgroups have states of 128 channels.
Card chunk_card(const core::DeltaInputs& in) {
    Card card = card_of(in.q.device);
    if (in.q.shape[3] > 128) card.level = Level::sm_80;
    return card;
}

ChunkPlan chunk_plan(Level level, const engines::DeltaForward& given, const ChunkOutputs& out,
                     const core::Tensor& states, const TokenRange& taken, MemoryParts& parts) {
    const core::DeltaInputs& in = given.in;
    const bool keeps = given.execution.kept != nullptr;
    ChunkPlan p;
    ChunkForward& of = p.pass;
    of.call = delta_call(in, given.options);
    of.out = out;
    const Index sequences = core::sequence_count(in), chunks = chunk_slots(in) * of.call.heads;
    of.sequences = chunk_sequences(in, given.options, states, taken, parts);
    p.folding = folding_blocks(level, of.call, sequences, keeps, in.q.device);
    of.folded.heads = of.flags.heads = of.call.heads;
    const int bytes = p.folding > 0 ? scored_record_bytes : chunk_record_bytes(level, of.call);
    of.folded.data = keeps && folds_into_kept(of.call) ? out.kept.records : parts.take<char>(chunks * bytes);
    of.flags.count = p.folding > 0 ? chunks : 0;
    of.flags.data = parts.take<int>(of.flags.count);
    return p;
}

KeptChunks kept_chunks(const DeltaCall& call, const core::DeltaInputs& in, MemoryParts& parts) {
    const Index chunks = chunk_slots(in) * call.heads;
    KeptChunks kept;
    kept.records = parts.take<char>(chunks * backward_record_bytes(call));
    const Index element = call.q.dtype == core::DType::f32 ? 4 : 2;
    kept.states = parts.take<char>(chunks * KeptChunks::state_elements * element);
    kept.U = parts.take<char>(chunks * KeptChunks::value_elements * element);
    kept.by_token = parts.take<int>(chunks);
    return kept;
}

}  // namespace

bool chunks_know(const core::DeltaOptions& options) {
    const core::Rule& rule = options.rule;
    if (options.steps > 1) return false;
    if (rule.has_channel_gate()) return !rule.own_p && rule.erase == core::Erase::from_decayed_state;
    return std::any_of(core::rules.begin(), core::rules.end(), [&](const core::Rule& row) {
        return row.gate == rule.gate && row.erase == rule.erase && row.own_p == rule.own_p;
    });
}

bool takes_chunks(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaOutputs& out) {
    const core::DType type = in.q.dtype;
    if (type != core::DType::bf16 && type != core::DType::f16 && type != core::DType::f32) return false;
    if (type == core::DType::f32 && options.rule.gate == core::Gate::channel) return false;
    if (!chunks_know(options)) return false;
    for (const core::Tensor* t : {&in.k, &in.p, &in.v, &out.o})
        if (*t && t->dtype != type) return false;
    for (const core::Tensor* t : {&in.q, &in.k, &in.p, &in.v, &out.o})
        if (!has_whole_rows(*t)) return false;
    if (out.states && options.state_interval % chunk_rows != 0) return false;
    const Index most_keys = options.rule.gate == core::Gate::channel || options.rule.own_p ? 128 : 256;
    if (in.q.shape[3] > most_keys || in.q.shape[1] == 0 || in.state_indices) return false;
    const bool split = type == core::DType::f32;
    return card_of(in.q.device).shared_bytes >= (split ? split_scan_shared_bytes(delta_call(in, options)) : 0);
}

KeptChunks kept_chunks(const DeltaCall& call, const core::DeltaInputs& in, const core::Execution& execution) {
    if (execution.kept == nullptr) return {};
    const std::size_t least = bytes_of([&](MemoryParts& parts) { kept_chunks(call, in, parts); });
    if (execution.kept_size < least)
        throw core::InvalidArgument("execution.kept_size: " + std::to_string(execution.kept_size) + ", expected " +
                                    std::to_string(least) + " or more");
    if (reinterpret_cast<std::uintptr_t>(execution.kept) % MemoryParts::alignment != 0)
        throw core::InvalidArgument("execution.kept: expected an address that is a multiple of " +
                                    std::to_string(MemoryParts::alignment));
    MemoryParts parts(static_cast<std::byte*>(execution.kept));
    return kept_chunks(call, in, parts);
}

std::size_t chunk_kept_size(const core::DeltaInputs& in, const core::DeltaOptions& options) {
    const DeltaCall call = delta_call(in, options);
    constexpr Index narrow = 64;  // where the passes have states of different sizes
    const bool wide_keys = call.gate == core::Gate::channel || call.own_p || call.key_size > narrow;
    if (!wide_keys && (call.erase != core::Erase::nothing || call.value_size <= narrow)) return 0;
    return bytes_of([&](MemoryParts& parts) { kept_chunks(call, in, parts); });
}

std::size_t chunk_forward_workspace(const engines::DeltaForward& of) {
    const Level level = chunk_card(of.in).level;
    return Workspace::with_alignment(bytes_of([&](MemoryParts& parts) { chunk_plan(level, of, {}, {}, {}, parts); }));
}

void chunk_forward(const engines::DeltaForward& given, const core::Handover& handover, const TokenRange& taken) {
    const auto& [in, options, execution, out, unused] = given;
    const OnDevice device(in.q.device);
    const cudaStream_t stream = stream_of(execution);
    const DeltaCall call = delta_call(in, options);
    const Card card = chunk_card(in);
    const ChunkOutputs outputs{view_of(out.o), view_of(out.final_state), view_of(out.states),
                               kept_chunks(call, in, execution)};
    const auto plan_in = [&](MemoryParts& parts) {
        return chunk_plan(card.level, given, outputs, given.out.final_state, taken, parts);
    };
    const Workspace workspace(execution, bytes_of(plan_in));
    MemoryParts parts(workspace.data());
    const ChunkPlan plan = plan_in(parts);
    if (execution.kept != nullptr && folds_into_kept(call)) {
        const auto bytes = static_cast<std::size_t>(chunk_slots(in) * call.heads) * sizeof(int);
        check(cudaMemsetAsync(outputs.kept.by_token, 0, bytes, stream), "clearing memory");
    }
    list_chunks(in, taken, plan.pass.sequences, stream);
    for_each_part(plan.pass.sequences, [&](const ChunkSequences& some) {
        ChunkForward of = plan.pass;
        of.sequences = some;
        // A state that is not there yet holds up a scan, but no fold.
        if (plan.folding > 0 && handover.ready == nullptr) return launch_fold_and_scan(of, plan.folding, stream);
        if (!some.packed || some.first == 0) {  // what is listed, all at once
            if (call.gate == core::Gate::channel)
                launch_fold_channel(of, stream);
            else
                launch_fold_shared(card.level, of, stream);
        }
        wait_for(handover.ready, stream);
        launch_chunk_scan(card, of, handover.ready == nullptr, stream);
    });
    record(handover.done, stream);
}

}  // namespace softdelta::cuda
