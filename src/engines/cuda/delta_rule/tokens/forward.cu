// The recurrence forward in f64: results, or the values before β that the backward pass needs.
#include "engines/cuda/delta_rule/passes.h"
#include "engines/cuda/delta_rule/tokens/walk.h"

namespace softdelta::cuda {

namespace {

template <class S>
__global__ void __launch_bounds__(S::threads, 2)
    walk_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                const __grid_constant__ WalkOutputs out) {
    const Walk<S> my = walk_of_block<S>(call, sequences, GradientMemory());
    const bool is_padding = my.sequence.state < 0;
    typename S::State state;
    my.load_state(is_padding ? View() : call.initial_state, state);
    ForwardWalk<S>{my, out, sequences.interval}.run(state);
    if (const View& v = out.final_state; v && !is_padding)
        my.store_state(v, my.state_offset(v), call.state_row, call.state_column, state);
}

}  // namespace

int walk_slabs(const DeltaCall& call) {
    int slabs = 0;
    with_walk_shape(call, [&](auto shape) { slabs = static_cast<int>(blocks_of(call.value_size, shape.slab)); });
    return slabs;
}

void launch_walk(const DeltaCall& call, const DeltaSequences& sequences, const WalkOutputs& out, cudaStream_t stream) {
    with_walk_shape(call, [&](auto shape) {
        using S = decltype(shape);
        launch(walk_kernel<S>, walk_grid<S>(call, sequences, WalkMemory<S>::forward_bytes), stream,
               "the delta rules token by token", call, sequences, out);
    });
}

void tokens_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                    const core::DeltaOutputs& out, const TokenRange& taken) {
    const OnDevice device(in.q.device);
    const DeltaCall call = delta_call(in, options);
    const WalkOutputs outputs{view_of(out.o), view_of(out.final_state), view_of(out.states), nullptr};
    for_each_sequences(in, options, out.final_state, taken,
                       [&](const DeltaSequences& some) { launch_walk(call, some, outputs, stream_of(execution)); });
}

}  // namespace softdelta::cuda
