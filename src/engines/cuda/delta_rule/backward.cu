// A call's gradients in chunks: memory, then the passes in order.
#include <algorithm>

#include "engines/cuda/delta_rule/fold/launch.h"
#include "engines/cuda/delta_rule/passes.h"
#include "engines/cuda/delta_rule/saved.h"
#include "engines/cuda/device/workspace.h"

namespace softdelta::cuda {

namespace {

// Sequences whose chunks are in memory at one time: as many as a scan has blocks for a multiprocessor, as often as
// makes a few thousand tokens of each, or all.
Index sequences_at_once(const DeltaCall& call, const core::DeltaInputs& in) {
    constexpr Index blocks = 132, fewest_blocks = 120, many_tokens = 4096;
    const Index some = blocks / call.heads * std::max<Index>(many_tokens / std::max<Index>(call.tokens, 1), 1);
    const bool fills = blocks / call.heads * call.heads >= fewest_blocks;
    return in.cu_seqlens || !fills ? core::sequence_count(in) : std::min(some, core::sequence_count(in));
}

// kept: what the forward pass has left needs no memory.
SavedChunks saved_chunks(const DeltaCall& call, const core::DeltaInputs& in, const core::DeltaGradients& grad,
                         bool kept, MemoryParts& parts) {
    SavedChunks saved;
    saved.all_slots = chunk_slots(in);
    saved.slots = in.cu_seqlens ? saved.all_slots : sequences_at_once(call, in) * (call.tokens / chunk_rows + 1);
    saved.heads = call.heads;
    saved.element = call.q.dtype == core::DType::f32 ? 4 : 2;
    const bool channel = call.gate == core::Gate::channel;
    saved.size = channel || call.own_p || call.wide || call.key_size > 64 || call.value_size > 64 ? 128 : 64;
    const Index chunks = saved.slots * call.heads;
    if (!kept) {
        saved.records = parts.take<char>(chunks * backward_record_bytes(call));
        saved.states = parts.take<char>(chunks * saved.state_bytes());
        saved.U = parts.take<char>(chunks * saved.value_bytes());
        if (saved.element == 4) {
            saved.folded = parts.take<char>(chunks * split_record_bytes(call));
            saved.by_token = parts.take<int>(chunks);
        }
    }
    saved.dstates = parts.take<char>(chunks * saved.state_bytes());
    if (call.erase != core::Erase::nothing) saved.dR = parts.take<char>(chunks * saved.value_bytes());
    saved.flags = parts.take<ChunkFlags>(chunks);
    saved.scratch = parts.take<double>(token_blocks * token_scratch(token_slabs(card_of(in.q.device))));
    saved.taken = parts.take<int>(1);
    if (grad.dg_gamma || views_of(core::gate_parameters(grad)))
        saved.shares = parts.take<double>(2 * saved.all_slots * call.heads * (channel ? call.key_size : 1));
    return saved;
}

// Records of chunks, and what the forward pass has left of states before them and U. `slots` of them are from
// saved.first_slot on. What is kept may be needed once more: flags are added to a copy.
void make_records(Level level, ChunkGradients& of, const KeptChunks& kept, Index slots, cudaStream_t stream) {
    SavedChunks& saved = of.saved;
    const Index first = saved.first_slot * saved.heads;
    if (saved.folded != nullptr) {
        const KeptChunks now{saved.records, saved.states, saved.U, saved.by_token};
        ChunkForward forward{of.call, of.sequences, {saved.folded, saved.heads}, {{}, {}, {}, now}, {}};
        launch_fold_shared(level, forward, stream);
        for_each_part(of.sequences, [&](const ChunkSequences& part) {
            forward.sequences = part;
            launch_split_scan(forward, stream);
        });
        return launch_kept_flags(of, saved.by_token, stream);
    }
    if (kept.states != nullptr) {
        saved.records = kept.records + first * backward_record_bytes(of.call);
        saved.states = kept.states + first * saved.state_bytes();
        saved.U = kept.U + first * saved.value_bytes();
        return launch_kept_flags(of, kept.by_token + first, stream);
    }
    if (of.call.gate != core::Gate::channel) return launch_backward_fold(level, of, stream);
    const auto bytes = static_cast<std::size_t>(slots * saved.heads) * sizeof(ChunkFlags);
    check(cudaMemsetAsync(saved.flags, 0, bytes, stream), "clearing memory");
    launch_fold_channel({of.call, of.sequences, {saved.records, saved.heads}, {}, {}}, stream);
}

// f32: K and V are filled up to 128.
DeltaCall gradient_call(const core::DeltaInputs& in, const core::DeltaOptions& options) {
    DeltaCall call = delta_call(in, options);
    call.wide = in.q.dtype == core::DType::f32;
    return call;
}

// Lists and tiles are parts of the workspace.
ChunkGradients gradients_in(const engines::DeltaBackward& of, MemoryParts& parts) {
    const DeltaCall call = gradient_call(of.in, of.options);
    const ChunkSequences sequences = chunk_sequences(of.in, of.options, {}, {}, parts);
    return {call, sequences, saved_chunks(call, of.in, of.out, of.execution.kept != nullptr, parts),
            gradient_views(of.out)};
}

// Where an event announces the gradients of final states, the scan that needs none runs until then. Where an event
// reports those of initial states, they are computed first. Otherwise both scans run as one grid.
void run_sequences(const Card& card, const ChunkGradients& of, bool keeps, const core::Handover& handover,
                   cudaStream_t stream) {
    const bool split = of.saved.element == 4;
    keeps = keeps || split;
    const bool states_first = !keeps && handover.ready != nullptr;
    const bool states_last = !keeps && !states_first && handover.done != nullptr;
    const bool beside = !keeps && !states_first && !states_last;
    const auto scan = [&](const Scans& scans) {
        for_each_part(of.sequences, [&](const ChunkSequences& part) {
            launch_scans(card, scans, {of.call, part, of.saved, of.grad}, stream);
        });
    };
    if (states_first) scan({true, false});
    wait_for(handover.ready, stream);
    scan({beside, true});
    record(handover.done, stream);
    if (states_last) scan({true, false});
    if (of.call.gate == core::Gate::channel)
        launch_unfold_channel(card, of, stream);
    else if (card.level == Level::sm_90a && of.saved.size == 128 && !of.call.own_p && !split)
        launch_unfold_warpgroups(of, stream);
    else
        launch_unfold(card, of, stream);
    launch_unfold_by_token(of, stream);
}

void run(const core::DeltaInputs& in, const ChunkGradients& all, const KeptChunks& kept, const core::Handover& handover,
         cudaStream_t stream) {
    const Card card = card_of(in.q.device);
    ChunkGradients some = all;
    const auto run_some = [&](Index slots) {
        make_records(card.level, some, kept, slots, stream);
        run_sequences(card, some, kept.states != nullptr, handover, stream);
    };
    if (all.sequences.packed) return run_some(all.saved.slots);
    const auto at_once = static_cast<int>(std::min<Index>(sequences_at_once(all.call, in), sequences_of_grid));
    for (int first = 0; first < all.sequences.count; first += at_once) {
        some.sequences = all.sequences.part(first, std::min(at_once, all.sequences.count - first));
        some.saved.first_slot = some.sequences.first_slot;
        some.sequences.first_slot = 0;  // memory is for these alone
        run_some(some.sequences.end_slot());
    }
}

}  // namespace

bool takes_chunk_gradients(const core::DeltaInputs& in, const core::DeltaOptions& options,
                           const core::DeltaGradients& grad) {
    constexpr Index most_tokens = most_chunks * chunk_rows, most_channels = 128;
    const core::DType type = in.q.dtype;  // states are saved in it, and f16 ends at 65504
    const bool split = type == core::DType::f32;
    if ((type != core::DType::bf16 && !split) || in.state_indices) return false;
    if (split && (options.rule.gate == core::Gate::channel ||
                  card_of(in.q.device).shared_bytes < split_gradients_shared_bytes(delta_call(in, options))))
        return false;
    if (!chunks_know(options) || (options.rule.has_channel_gate() && in.q.shape[2] != in.v.shape[2])) return false;
    for (const core::Tensor* t : {&in.k, &in.p, &in.v, &grad.d_o, &grad.dq, &grad.dk, &grad.dp, &grad.dv})
        if (*t && t->dtype != type) return false;
    for (const core::Tensor* t : {&in.q, &in.k, &in.p, &in.v, &grad.d_o, &grad.dq, &grad.dk, &grad.dp, &grad.dv})
        if (!has_whole_rows(*t)) return false;
    return in.q.shape[3] <= most_channels && in.v.shape[3] <= most_channels && in.q.shape[1] > 0 &&
           in.q.shape[1] <= most_tokens;
}

std::size_t chunk_backward_workspace(const engines::DeltaBackward& given) {
    return Workspace::with_alignment(bytes_of([&](MemoryParts& parts) { gradients_in(given, parts); }));
}

void chunk_backward(const engines::DeltaBackward& given) {
    const OnDevice device(given.in.q.device);
    const cudaStream_t stream = stream_of(given.execution);
    const Workspace workspace(given.execution, bytes_of([&](MemoryParts& parts) { gradients_in(given, parts); }));
    MemoryParts parts(workspace.data());
    const ChunkGradients of = gradients_in(given, parts);
    const DeltaCall& call = of.call;
    const ChunkSequences& sequences = of.sequences;
    const SavedChunks& saved = of.saved;
    const KeptChunks kept = kept_chunks(call, given.in, given.execution);
    GradientMemory sums;  // of shares alone
    if (saved.shares) {
        sums.shares = saved.shares;
        sums.slots = saved.all_slots;
        sums.heads = saved.heads;
        sums.channels = call.gate == core::Gate::channel ? call.key_size : 1;
        const auto bytes = static_cast<std::size_t>(2 * sums.slots * saved.heads * sums.channels) * sizeof(double);
        check(cudaMemsetAsync(saved.shares, 0, bytes, stream), "clearing memory");
    }
    list_chunks(given.in, {}, sequences, stream);
    run(given.in, of, kept, given.handover, stream);
    if (saved.shares) launch_sum_shares(call, of.grad, sums, stream);
}

}  // namespace softdelta::cuda
