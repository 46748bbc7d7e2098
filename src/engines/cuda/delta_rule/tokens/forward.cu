// The recurrence forward in f64: results, or the values before β that the backward pass needs.
#include "engines/cuda/delta_rule/passes.h"
#include "engines/cuda/delta_rule/tokens/gradients.h"
#include "engines/cuda/delta_rule/tokens/walk.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

template <class S>
__global__ void __launch_bounds__(S::threads, 2)
    walk_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                const __grid_constant__ WalkOutputs out) {
    using Values = StepValues<S>;
    const Walk<S> walk(call, sequences);
    const DeltaSequence& s = walk.sequence;
    const bool is_padding = s.state < 0;
    const bool erases = call.erase != core::Erase::nothing;
    const bool before_decay = call.erase == core::Erase::from_previous_state;

    double state[S::R][S::C];
    walk.load_state(is_padding ? View() : call.initial_state, is_padding ? 0 : walk.state_offset(call.initial_state),
                    state);

    float v[Values::rounds];
    const auto load_values = [&](Index first) {
        Values::for_each([&](int n, int i, int j) {
            const bool inside = first + i < s.count && walk.slab * S::slab + j < call.value_size;
            v[n] = inside ? load(call.v,
                                 walk.offset(call.v, first + i, walk.hv) + (walk.slab * S::slab + j) * call.v.stride[3])
                          : 0.0F;
        });
    };
    auto given = walk.load_given(0);
    load_values(0);
    for (Index first = 0; first < s.count; first += S::step) {
        walk.fold(given);
        Values::for_each([&](int n, int i, int j) { walk.memory.values[0][i][j] = static_cast<double>(v[n]); });
        __syncthreads();
        given = walk.load_given(first + S::step);
        load_values(first + S::step);
        const int tokens = static_cast<int>(min(s.count - first, Index(S::step)));
        for (int i = 0; i < tokens; ++i) {
            const Index t = first + i;
            if (out.states && t % sequences.interval == 0) {
                const View& to = out.states;
                const Index which = s.first_saved + t / sequences.interval;
                walk.store_state(to, s.batch * to.stride[0] + which * to.stride[1] + walk.hv * to.stride[2],
                                 call.state_row + 1, call.state_column + 1, state);
            }
            double e[S::C], seen[S::C], written[S::C];
            walk.columns_of(walk.memory.values[0][i], e);
            if (!before_decay) walk.scale_rows(walk.memory.decay[i], state);
            if (erases) {
                walk.multiply(walk.erase_key(i), state, seen);
                unrolled<S::C>([&](int c) { e[c] -= seen[c]; });
            }
            if (before_decay) walk.scale_rows(walk.memory.decay[i], state);
            unrolled<S::C>([&](int c) { written[c] = walk.memory.beta[i] * e[c]; });
            walk.add_product(walk.memory.k[i], written, state);
            if (out.erased) {
                double* to = out.erased + walk.token_row(t) * call.value_size;
                walk.share_columns(e, [&](int j, double x) { to[j] = x; });
            }
            if (out.o) {
                double o[S::C];
                walk.multiply(walk.memory.q[i], state, o);
                const Index row = walk.offset(out.o, t, walk.hv);
                walk.share_columns(o, [&](int j, double x) {
                    store(out.o, row + j * out.o.stride[3], is_padding ? 0.0F : static_cast<float>(x));
                });
            }
        }
        __syncthreads();
    }
    if (out.final_state && !is_padding)
        walk.store_state(out.final_state, walk.state_offset(out.final_state), call.state_row, call.state_column, state);
}

}  // namespace

int walk_slabs(const DeltaCall& call) {
    int slabs = 0;
    with_walk_shape(call.key_size,
                    [&](auto shape) { slabs = (call.value_size + decltype(shape)::slab - 1) / decltype(shape)::slab; });
    return slabs;
}

Index walk_state_size(const DeltaCall& call) {
    Index size = 0;
    with_walk_shape(call.key_size, [&](auto shape) { size = Index(decltype(shape)::K) * decltype(shape)::slab; });
    return size;
}

void launch_walk(const DeltaCall& call, const DeltaSequences& sequences, const WalkOutputs& out, cudaStream_t stream) {
    with_walk_shape(call.key_size, [&](auto shape) {
        using S = decltype(shape);
        const dim3 blocks(static_cast<unsigned>(walk_slabs(call)), static_cast<unsigned>(call.heads),
                          static_cast<unsigned>(sequences.count));
        launch(walk_kernel<S>, {blocks, S::threads, WalkMemory<S>::forward_bytes}, stream,
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
