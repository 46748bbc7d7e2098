// A call's gradients in chunks: memory, then the passes in order.
#include "engines/cuda/delta_rule/chunk_backward/backward.h"

#include "engines/cuda/delta_rule/chunk_backward/saved.h"
#include "engines/cuda/workspace.h"

namespace softdelta::cuda {

namespace {

// Rows of 16-byte units.
bool has_units(const core::Tensor& t) {
    if (!t || t.count() == 0) return true;
    bool fits = t.stride[3] == 1 && t.shape[3] % 8 == 0 && reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
    for (std::size_t dim = 0; dim < 3; ++dim) fits = fits && (t.shape[dim] == 1 || t.stride[dim] % 8 == 0);
    return fits;
}

bool has_room(core::Device device) {
    constexpr int most_shared_bytes = 200 * 1024;
    int bytes = 0;
    return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.id) == cudaSuccess &&
           bytes >= most_shared_bytes;
}

SavedChunks saved_chunks(const DeltaCall& call, const core::DeltaInputs& in, const core::DeltaGradients& grad,
                         MemoryParts& parts) {
    SavedChunks saved;
    saved.row_slots = call.tokens / chunk_rows + 1;
    saved.slots = in.cu_seqlens ? saved.row_slots + core::sequence_count(in) : in.q.shape[0] * saved.row_slots;
    saved.heads = call.heads;
    saved.size = call.own_p || call.key_size > 64 || call.value_size > 64 ? 128 : 64;
    const Index chunks = saved.slots * call.heads;
    saved.records = parts.take<char>(chunks * ChunkRecord::bytes);
    saved.states = parts.take<char>(chunks * saved.state_bytes());
    saved.dstates = parts.take<char>(chunks * saved.state_bytes());
    saved.U = parts.take<char>(chunks * saved.value_bytes());
    if (call.erase != core::Erase::nothing) saved.dR = parts.take<char>(chunks * saved.value_bytes());
    saved.by_token = parts.take<int>(chunks);
    saved.scratch = parts.take<double>(token_blocks * token_scratch);
    if (grad.dg_gamma || grad.dA_log || grad.ddt_bias) saved.shares = parts.take<double>(2 * chunks);
    return saved;
}

template <class T>
void run(const DeltaCall& call, const core::DeltaInputs& in, const core::DeltaOptions& options,
         const GradientViews& grad, const SavedChunks& saved, cudaStream_t stream) {
    for_each_sequences(in, options, {}, [&](const DeltaSequences& some) {
        launch_prepare<T>(call, some, saved, stream);
        launch_save_states<T>(call, some, saved, stream);
        launch_reverse_scan<T>(call, some, grad, saved, stream);
        launch_finish<T>(call, some, grad, saved, stream);
        launch_finish_tokens<T>(call, some, grad, saved, stream);
    });
}

}  // namespace

bool takes_chunk_gradients(const core::DeltaInputs& in, const core::DeltaOptions& options,
                           const core::DeltaGradients& grad) {
    constexpr Index fewest_tokens = 32, most_channels = 128;
    const core::DType type = in.q.dtype;
    if (type != core::DType::bf16 && type != core::DType::f16) return false;
    if (options.rule.gate == core::Gate::channel || in.state_indices) return false;
    for (const core::Tensor* t : {&in.k, &in.p, &in.v, &grad.d_o, &grad.dq, &grad.dk, &grad.dp, &grad.dv})
        if (*t && t->dtype != type) return false;
    for (const core::Tensor* t : {&in.q, &in.k, &in.p, &in.v, &grad.d_o, &grad.dq, &grad.dk, &grad.dp, &grad.dv})
        if (!has_units(*t)) return false;
    return in.q.shape[3] <= most_channels && in.v.shape[3] <= most_channels && in.q.shape[1] >= fewest_tokens &&
           has_room(in.q.device);
}

std::size_t chunk_backward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                     const core::DeltaGradients& grad) {
    MemoryParts parts(nullptr);
    saved_chunks(delta_call(in, options), in, grad, parts);
    return Workspace::with_alignment(parts.used());
}

void chunk_backward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                    const core::DeltaGradients& grad) {
    const OnDevice device(in.q.device);
    const cudaStream_t stream = stream_of(execution);
    const DeltaCall call = delta_call(in, options);
    MemoryParts count(nullptr);
    saved_chunks(call, in, grad, count);
    const Workspace workspace(execution, count.used());
    MemoryParts parts(workspace.data());
    const SavedChunks saved = saved_chunks(call, in, grad, parts);
    const GradientViews views = gradient_views(grad);
    GradientMemory sums;  // of shares alone
    if (saved.shares) {
        sums.shares = saved.shares;
        sums.slots = saved.slots;
        const auto bytes = static_cast<std::size_t>(2 * saved.slots * saved.heads) * sizeof(double);
        check(cudaMemsetAsync(saved.shares, 0, bytes, stream), "clearing memory");
    }
    (in.q.dtype == core::DType::bf16 ? run<__nv_bfloat16> : run<__half>)(call, in, options, views, saved, stream);
    if (saved.shares) launch_sum_shares(call, views, sums, stream);
}

}  // namespace softdelta::cuda
