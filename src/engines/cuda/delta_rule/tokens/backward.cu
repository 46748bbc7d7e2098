// A call's gradients token by token: three walks, then what has no state.
#include "engines/cuda/delta_rule/passes.h"
#include "engines/cuda/delta_rule/tokens/unfold.h"
#include "engines/cuda/delta_rule/tokens/walk_back.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/device/workspace.h"

namespace softdelta::cuda {

namespace {

constexpr int threads = 128;

template <class S, bool again>
__global__ void __launch_bounds__(S::threads, 2)
    walk_back_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                     const __grid_constant__ GradientViews grad, const __grid_constant__ GradientMemory memory) {
    const Walk<S> my = walk_of_block<S>(call, sequences, memory);
    const BackwardWalk<S> walk{my, grad.d_o, memory, false};
    typename S::State state;
    if constexpr (again) {
        my.load_state(call.initial_state, state);
        walk.run_again(state);
    } else {
        my.load_state(grad.dfinal_state, state);
        walk.run_back(state);
        if (const View& v = grad.dinitial_state)
            my.store_state(v, my.state_offset(v), call.state_row, call.state_column, state);
    }
}

// The warp's number among all.
__device__ Index own_warp() {
    return Index(blockIdx.x) * (threads / 32) + threadIdx.x / 32;
}
// A row of [B·T·steps]: its batch row, and where it lies there.
struct RowOfCall {
    Sequence sequence;
    Index t;

    __device__ RowOfCall(const DeltaCall& call, Index row)
        : sequence{row / (call.tokens * call.steps), 0, call.tokens, -1}, t(row % (call.tokens * call.steps)) {}
};

__global__ void __launch_bounds__(threads)
    unfold_keys_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ GradientViews grad,
                       const __grid_constant__ GradientMemory memory) {
    const int key_heads = call.key_heads();
    const Index unit = own_warp(), row = unit / (3 * key_heads);
    const int head = static_cast<int>(unit / 3 % key_heads);
    if (row >= memory.rows) return;
    const int kind = static_cast<int>(unit % 3);
    const RowOfCall at(call, row);
    if (kind == 0 && !call.ends_token(at.t)) return;
    TokenUnfold{call, grad, memory}.keys(kind, at.sequence, kind == 0 ? call.token(at.t) : at.t, head, call.group,
                                         [&](int i) { return row * call.heads + call.value_head(head, i); });
}

__global__ void __launch_bounds__(threads)
    unfold_values_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ GradientViews grad,
                         const __grid_constant__ GradientMemory memory) {
    const Index unit = own_warp(), row = unit / call.heads;
    if (row >= memory.rows) return;
    const RowOfCall at(call, row);
    TokenUnfold{call, grad, memory}.values(at.sequence, at.t, static_cast<int>(unit % call.heads), unit);
}

__global__ void __launch_bounds__(threads)
    unfold_gates_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                        const __grid_constant__ GradientViews grad, const __grid_constant__ GradientMemory memory,
                        int blocks) {
    const int u = static_cast<int>(blockIdx.x) % blocks * threads + static_cast<int>(threadIdx.x);
    const Index first = static_cast<Index>(blockIdx.x) / blocks * chunk_rows;
    const int hv = u / memory.channels, channel = u % memory.channels, n = static_cast<int>(blockIdx.z);
    const DeltaSequence s = sequences[n];
    if (hv >= call.heads || first >= s.count * call.steps) return;
    const TokenRows rows = memory.rows_of(call, s, sequences.first + n, sequences.packed, hv);
    TokenUnfold{call, grad, memory}.gates(s, first, hv, channel, rows,
                                          memory.shares + rows.chunk_of(first) * memory.channels + channel,
                                          memory.slots * memory.heads * memory.channels);
}

// Sums over the chunks of all sequences, and for what a head's channels share over these. Each number has as many
// threads as the block has for it, which take turns with the chunks.
constexpr int sum_threads = 1024;

__global__ void __launch_bounds__(sum_threads)
    sum_shares_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ GradientViews grad,
                      const __grid_constant__ GradientMemory memory) {
    auto* sums = reinterpret_cast<double*>(ptx::shared_memory());  // [turns, 2, channels]
    const int hv = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    const int numbers = 2 * memory.channels, turns = sum_threads / numbers, turn = thread / numbers;
    const int u = thread % numbers, which = u / memory.channels, channel = u % memory.channels;
    double sum = 0;
    if (turn < turns) {
#pragma unroll 16  // so many numbers on their way at one time
        for (Index slot = turn; slot < memory.slots; slot += turns)
            sum += memory.shares[((which * memory.slots + slot) * call.heads + hv) * memory.channels + channel];
        sums[thread] = sum;
    }
    __syncthreads();
    if (turn == 0) {
        for (int i = 1; i < turns; ++i) sum += sums[i * numbers + u];
        sums[u] = sum;
        if (which == 0 && grad.d_raw.bias)
            store(grad.d_raw.bias, (Index(hv) * memory.channels + channel) * grad.d_raw.bias.stride[0],
                  static_cast<float>(sum));
    }
    __syncthreads();
    if (thread > 1) return;
    const View& to = thread == 0 ? grad.dg_gamma : grad.d_raw.A_log;
    sum = 0;
    for (int m = 0; m < memory.channels; ++m) sum += sums[thread * memory.channels + m];
    if (to) store(to, hv * to.stride[0], static_cast<float>(sum));
}

// ---------------------------------------------------------------------------------------------------------------------

// The parts of a call's workspace.
GradientMemory gradient_memory(const DeltaCall& call, const core::DeltaInputs& in, const core::DeltaGradients& grad,
                               MemoryParts& parts) {
    GradientMemory m;
    const Index batch = in.q.shape[0], heads = call.heads, rows = call.tokens * call.steps;
    m.rows = batch * rows;
    m.heads = call.heads;
    m.slabs = walk_slabs(call);
    m.channels = call.gate == core::Gate::channel ? call.key_size : 1;
    m.row_slots = rows / chunk_rows + 1;
    m.slots = in.cu_seqlens ? m.row_slots + core::sequence_count(in) : batch * m.row_slots;
    m.erased = parts.take<double>(m.rows * heads * call.value_size);
    m.dwritten = parts.take<double>(m.rows * heads * call.value_size);
    for (float** x : {&m.dq, &m.dk, &m.dp}) *x = parts.take<float>(m.slabs * m.rows * heads * call.key_size);
    if (!grad.dg && !grad.dg_gamma && !views_of(core::gate_parameters(grad))) return m;
    m.written = parts.take<double>(m.slabs * m.rows * heads * m.channels);
    m.erase = parts.take<double>(m.slabs * m.rows * heads * m.channels);
    with_walk_shape(
        call, [&](auto shape) { m.dstates = parts.take<double>(m.slots * heads * m.slabs * shape.K * shape.slab); });
    m.ends = parts.take<double>(m.slabs * m.slots * heads * m.channels);
    m.shares = parts.take<double>(2 * m.slots * heads * m.channels);
    m.shares_bytes = static_cast<std::size_t>(2 * m.slots * heads * m.channels) * sizeof(double);
    return m;
}

}  // namespace

void launch_sum_shares(const DeltaCall& call, const GradientViews& grad, const GradientMemory& memory,
                       cudaStream_t stream) {
    launch(sum_shares_kernel, {call.heads, sum_threads, sum_threads * static_cast<int>(sizeof(double))}, stream,
           "gradients of a gate's parameters", call, grad, memory);
}

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
        launch_walk(call, some, {{}, {}, {}, memory.erased}, stream);
        with_walk_shape(call, [&](auto shape) {
            using S = decltype(shape);
            const Grid grid = walk_grid<S>(call, some, static_cast<int>(sizeof(WalkMemory<S>)));
            launch(walk_back_kernel<S, false>, grid, stream, "the delta rules' walk from the end", call, some, views,
                   memory);
            launch(walk_back_kernel<S, true>, grid, stream, "the delta rules' second walk", call, some, views, memory);
        });
        if (!memory.shares) return;
        const Index blocks = blocks_of(call.heads * memory.channels, threads);
        launch(unfold_gates_kernel,
               {{blocks * blocks_of(call.tokens * call.steps, chunk_rows), 1, some.count}, threads}, stream,
               "gradients of gates", call, some, views, memory, static_cast<int>(blocks));
    });
    if (views.dq || views.dk || views.dp)
        launch(unfold_keys_kernel, {blocks_of(32 * 3 * memory.rows * call.key_heads(), threads), threads}, stream,
               "gradients of keys", call, views, memory);
    if (views.dv || views.dbeta)
        launch(unfold_values_kernel, {blocks_of(32 * memory.rows * call.heads, threads), threads}, stream,
               "gradients of values", call, views, memory);
    if (memory.shares) launch_sum_shares(call, views, memory, stream);
}

}  // namespace softdelta::cuda
