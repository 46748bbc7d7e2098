// A call in chunks: every chunk is folded, in any order; then heads are scanned.
#include "engines/cuda/delta_rule/chunk/forward.h"

#include "engines/cuda/delta_rule/chunk/folded.h"
#include "engines/cuda/delta_rule/chunk/launch_fold.h"
#include "engines/cuda/events.h"
#include "engines/cuda/workspace.h"

namespace softdelta::cuda {

namespace {

// One kernel where a fold takes no longer than the scan that it hides behind: rules that erase have an inverse to make,
// and fold their chunks side by side before. Of few tokens, launches are most of the time.
bool is_fused(Level level, const DeltaCall& call, Index sequences) {
    constexpr Index few_tokens = 256;
    if (level != Level::sm_90a || call.gate == core::Gate::channel) return false;
    return call.tokens <= few_tokens || (call.erase == core::Erase::nothing && has_many_heads(call, sequences));
}

FoldedChunks folded_chunks(const DeltaCall& call, const core::DeltaInputs& in, MemoryParts& parts) {
    FoldedChunks folded;
    folded.row_slots = call.tokens / chunk_rows + 1;
    folded.heads = call.heads;
    const Index slots = in.cu_seqlens ? folded.row_slots + core::sequence_count(in) : in.q.shape[0] * folded.row_slots;
    folded.data = parts.take<char>(slots * call.heads * chunk_record_bytes(call));
    return folded;
}

}  // namespace

bool takes_chunks(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaOutputs& out) {
    constexpr Index fewest_tokens = 32, most_keys = 128;
    const core::DType type = in.q.dtype;
    if (type != core::DType::bf16 && type != core::DType::f16) return false;
    if (options.rule.gate == core::Gate::channel &&
        (options.rule.own_p || options.rule.erase != core::Erase::from_decayed_state))
        return false;
    for (const core::Tensor* t : {&in.k, &in.p, &in.v, &out.o})
        if (*t && t->dtype != type) return false;
    for (const core::Tensor* t : {&in.q, &in.k, &in.p, &in.v, &out.o})
        if (!has_whole_rows(*t)) return false;
    if (out.states && options.state_interval % chunk_rows != 0) return false;
    return in.q.shape[3] <= most_keys && in.q.shape[1] >= fewest_tokens && !in.state_indices &&
           most_shared_bytes(in.q.device) >= chunk_scan_shared_bytes(delta_call(in, options));
}

std::size_t chunk_forward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options) {
    MemoryParts parts(nullptr);
    const DeltaCall call = delta_call(in, options);
    if (!is_fused(level_of(in.q.device), call, core::sequence_count(in))) folded_chunks(call, in, parts);
    return Workspace::with_alignment(parts.used());
}

void chunk_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out, const core::Handover& handover) {
    const OnDevice device(in.q.device);
    const cudaStream_t stream = stream_of(execution);
    const DeltaCall call = delta_call(in, options);
    const Level level = level_of(in.q.device);
    const core::DType type = in.q.dtype;
    const ChunkOutputs outputs{view_of(out.o), view_of(out.final_state), view_of(out.states)};
    if (is_fused(level, call, core::sequence_count(in))) {
        wait_for(handover.ready, stream);
        for_each_sequences(in, options, out.final_state,
                           [&](const DeltaSequences& some) { launch_fused_chunks(call, type, some, outputs, stream); });
        record(handover.done, stream);
        return;
    }
    MemoryParts count(nullptr);
    folded_chunks(call, in, count);
    const Workspace workspace(execution, count.used());
    MemoryParts parts(workspace.data());
    const FoldedChunks folded = folded_chunks(call, in, parts);
    for_each_sequences(in, options, out.final_state, [&](const DeltaSequences& some) {
        const auto fold = call.gate == core::Gate::channel ? launch_fold_channel : launch_fold_shared;
        fold(level, call, type, some, folded, stream);
        wait_for(handover.ready, stream);
        launch_chunk_scan(level, call, type, some, folded, outputs, stream);
    });
    record(handover.done, stream);
}

}  // namespace softdelta::cuda
