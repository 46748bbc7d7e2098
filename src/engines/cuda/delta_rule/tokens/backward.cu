// A call's gradients: memory, then the kernels in order.
#include "engines/cuda/delta_rule/passes.h"
#include "engines/cuda/delta_rule/tokens/gradients.h"
#include "engines/cuda/device/workspace.h"

namespace softdelta::cuda {

namespace {

// The parts of a call's workspace.
GradientMemory gradient_memory(const DeltaCall& call, const core::DeltaInputs& in, const core::DeltaGradients& grad,
                               MemoryParts& parts) {
    GradientMemory m;
    const Index batch = in.q.shape[0], heads = call.heads;
    m.rows = batch * call.tokens;
    m.slabs = walk_slabs(call);
    m.channels = call.gate == core::Gate::channel ? call.key_size : 1;
    m.row_slots = call.tokens / GradientMemory::chunk + 1;
    m.slots = in.cu_seqlens ? m.row_slots + core::sequence_count(in) : batch * m.row_slots;
    m.erased = parts.take<double>(m.rows * heads * call.value_size);
    m.dwritten = parts.take<double>(m.rows * heads * call.value_size);
    for (float** x : {&m.dq, &m.dk, &m.dp}) *x = parts.take<float>(m.slabs * m.rows * heads * call.key_size);
    if (!grad.dg && !grad.dg_gamma && !grad.dA_log && !grad.ddt_bias) return m;
    m.written = parts.take<double>(m.slabs * m.rows * heads * m.channels);
    m.erase = parts.take<double>(m.slabs * m.rows * heads * m.channels);
    m.dstates = parts.take<double>(m.slots * heads * m.slabs * walk_state_size(call));
    m.ends = parts.take<double>(m.slabs * m.slots * heads * m.channels);
    m.shares = parts.take<double>(2 * m.slots * heads * m.channels);
    m.shares_bytes = static_cast<std::size_t>(2 * m.slots * heads * m.channels) * sizeof(double);
    return m;
}

}  // namespace

std::size_t tokens_backward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                      const core::DeltaGradients& grad) {
    MemoryParts parts(nullptr);
    gradient_memory(delta_call(in, options), in, grad, parts);
    return Workspace::with_alignment(parts.used());
}

void tokens_backward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                     const core::DeltaGradients& grad) {
    const OnDevice device(in.q.device);
    const cudaStream_t stream = stream_of(execution);
    const DeltaCall call = delta_call(in, options);
    MemoryParts count(nullptr);
    gradient_memory(call, in, grad, count);
    const Workspace workspace(execution, count.used());
    MemoryParts parts(workspace.data());
    const GradientMemory memory = gradient_memory(call, in, grad, parts);
    const GradientViews views = gradient_views(grad);
    if (memory.shares) check(cudaMemsetAsync(memory.shares, 0, memory.shares_bytes, stream), "clearing memory");
    for_each_sequences(in, options, {}, {}, [&](const DeltaSequences& some) {
        launch_walk_back(call, some, views, memory, stream);
        if (memory.shares) launch_unfold_token_gates(call, some, views, memory, stream);
    });
    launch_unfold_tokens(call, memory.rows, views, memory, stream);
    if (memory.shares) launch_sum_shares(call, views, memory, stream);
}

}  // namespace softdelta::cuda
