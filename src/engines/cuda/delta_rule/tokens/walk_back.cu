// The recurrence backwards. With E the state that token t erases from, S the one after it, w = βe:
//
//     from the end    dS += q doᵀ     dw = dSᵀ k     dk = dS w     dS ← e^g∘(dS − p (β dw)ᵀ)
//                     erasing from the previous state: dS ← e^g∘dS − p (β dw)ᵀ
//     from the start  S once more from the saved w           dq = S do     dp = −E (β dw)
//
// so that no state is kept but in registers. dg needs S and dS at one time; it comes from the sums
// rowsum(S∘dS) at the ends of chunks and from q∘dq, k∘dk, p∘dp of the tokens between (docs/math.md). In f64 their
// differences keep what f32 would lose.
#include "engines/cuda/delta_rule/tokens/gradients.h"
#include "engines/cuda/delta_rule/tokens/walk.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

template <class S>
using LaneState = double[S::R][S::C];

template <class S>
struct BackwardWalk {
    using Values = StepValues<S>;

    const Walk<S> my;
    const GradientViews& views;
    const GradientMemory& workspace;
    const int n;
    const bool packed;
    float d_o[Values::rounds];
    double e[Values::rounds], dw[Values::rounds];

    __device__ BackwardWalk(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& views,
                            const GradientMemory& workspace)
        : my(call, sequences),
          views(views),
          workspace(workspace),
          n(sequences.first + static_cast<int>(blockIdx.z)),
          packed(sequences.packed) {}

    // dS from the end to the start.
    __device__ void run_back() {
        LaneState<S> dstate;
        my.load_state(views.dfinal_state, my.state_offset(views.dfinal_state), dstate);
        const Index steps = (my.sequence.count + S::step - 1) / S::step;
        auto given = my.load_given((steps - 1) * S::step);
        load_values((steps - 1) * S::step, false);
        for (Index b = steps; b-- > 0;) {
            const Index first = b * S::step;
            my.fold(given);
            store_values(false);
            __syncthreads();
            given = my.load_given(first - S::step);
            load_values(first - S::step, false);
            const int tokens = static_cast<int>(min(my.sequence.count - first, Index(S::step)));
            for (int i = tokens; i-- > 0;) {
                if (workspace.dstates && ends_chunk(first + i))
                    visit_saved(dstate, first + i, [](double& saved, double x) { saved = x; });
                step_back(first + i, i, dstate);
            }
            __syncthreads();
            if (my.warp < tokens) sum_dk(first + my.warp, my.warp);
            __syncthreads();
        }
        if (const View& v = views.dinitial_state)
            my.store_state(v, my.state_offset(v), my.call.state_row, my.call.state_column, dstate);
    }

    // S from the start to the end, once more.
    __device__ void run_again() {
        LaneState<S> state;
        my.load_state(my.call.initial_state, my.state_offset(my.call.initial_state), state);
        auto given = my.load_given(0);
        load_values(0, true);
        for (Index first = 0; first < my.sequence.count; first += S::step) {
            my.fold(given);
            store_values(true);
            __syncthreads();
            given = my.load_given(first + S::step);
            load_values(first + S::step, true);
            const int tokens = static_cast<int>(min(my.sequence.count - first, Index(S::step)));
            for (int i = 0; i < tokens; ++i) step_again(i, state);
            const int quantity = my.warp / S::step, i = my.warp % S::step;
            const bool works = quantity < 2 && i < tokens;
            double written[S::parts];
            if (works && quantity == 0) load_written(first + i, written);
            __syncthreads();
            if (works && quantity == 0) sum_dq(first + i, i, written);
            if (works && quantity == 1) sum_dp(first + i, i);
            __syncthreads();
            if (workspace.dstates && ends_chunk(first + tokens - 1)) add_end(first + tokens - 1, state);
        }
    }

    __device__ bool ends_chunk(Index t) const {
        return (t + 1) % GradientMemory::chunk == 0 || t + 1 == my.sequence.count;
    }
    __device__ Index slot(Index t) const { return workspace.slot(my.sequence, n, t / GradientMemory::chunk, packed); }

    // --- rows of values: do, e, and dw

    __device__ void load_values(Index first, bool again) {
        Values::for_each([&](int n, int i, int j) {
            const Index t = first + i;
            const int column = my.slab * S::slab + j;
            const bool inside = t >= 0 && t < my.sequence.count && column < my.call.value_size;
            d_o[n] = inside && views.d_o
                         ? load(views.d_o, my.offset(views.d_o, t, my.hv) + column * views.d_o.stride[3])
                         : 0.0F;
            const Index at = my.token_row(t) * my.call.value_size + column;
            e[n] = inside ? workspace.erased[at] : 0.0;
            dw[n] = inside && again ? workspace.dwritten[at] : 0.0;
        });
    }
    __device__ void store_values(bool again) const {
        Values::for_each([&](int n, int i, int j) {
            my.memory.values[0][i][j] = static_cast<double>(d_o[n]);
            my.memory.values[1][i][j] = e[n];
            if (again) my.memory.values[2][i][j] = dw[n];
        });
    }

    // --- a token

    __device__ void step_back(Index t, int i, LaneState<S>& dstate) const {
        const double beta = my.memory.beta[i];
        double d_o[S::C], written[S::C], dwritten[S::C], dk[S::R];
        my.columns_of(my.memory.values[0][i], d_o);
        my.columns_of(my.memory.values[1][i], written);
        unrolled<S::C>([&](int c) { written[c] *= beta; });
        my.add_product(my.memory.q[i], d_o, dstate);
        my.multiply(my.memory.k[i], dstate, dwritten);
        multiply_columns(dstate, written, dk);
        my.sum_over_columns(dk, my.memory.sums[0][my.warp][i]);
        double* to = workspace.dwritten + my.token_row(t) * my.call.value_size;
        my.share_columns(dwritten, [&](int j, double x) { to[j] = x; });

        const bool before_decay = my.call.erase == core::Erase::from_previous_state;
        if (before_decay) my.scale_rows(my.memory.decay[i], dstate);
        if (my.call.erase != core::Erase::nothing) {
            double de[S::C];
            unrolled<S::C>([&](int c) { de[c] = -beta * dwritten[c]; });
            my.add_product(my.erase_key(i), de, dstate);
        }
        if (!before_decay) my.scale_rows(my.memory.decay[i], dstate);
    }
    __device__ void step_again(int i, LaneState<S>& state) const {
        const double beta = my.memory.beta[i];
        double d_o[S::C], written[S::C], de[S::C], row[S::R];
        my.columns_of(my.memory.values[0][i], d_o);
        my.columns_of(my.memory.values[1][i], written);
        my.columns_of(my.memory.values[2][i], de);
        unrolled<S::C>([&](int c) {
            written[c] *= beta;
            de[c] *= -beta;
        });
        const bool before_decay = my.call.erase == core::Erase::from_previous_state;
        if (!before_decay) my.scale_rows(my.memory.decay[i], state);
        if (my.call.erase != core::Erase::nothing) {
            multiply_columns(state, de, row);
            my.sum_over_columns(row, my.memory.sums[1][my.warp][i]);
        }
        if (before_decay) my.scale_rows(my.memory.decay[i], state);
        my.add_product(my.memory.k[i], written, state);
        multiply_columns(state, d_o, row);
        my.sum_over_columns(row, my.memory.sums[0][my.warp][i]);
    }
    // state·column over the lane's columns.
    __device__ static void multiply_columns(const LaneState<S>& state, const double (&column)[S::C],
                                            double (&out)[S::R]) {
        unrolled<S::R>([&](int r) {
            out[r] = 0;
            unrolled<S::C>([&](int c) { out[r] = fma(state[r][c], column[c], out[r]); });
        });
    }

    // --- rows of keys, by a warp each: sums over the block's columns

    __device__ void sum_of_block(int quantity, int i, double (&out)[S::parts]) const {
        unrolled<S::parts>([&](int n) {
            out[n] = 0;
            unrolled<S::warps>([&](int w) { out[n] += my.memory.sums[quantity][w][i][my.lane + 32 * n]; });
        });
    }
    __device__ void store_row(float* to, Index t, const double (&x)[S::parts]) const {
        to += (my.slab * workspace.rows * my.call.heads + my.token_row(t)) * my.call.key_size;
        unrolled<S::parts>([&](int n) {
            if (my.lane + 32 * n < my.call.key_size) to[my.lane + 32 * n] = static_cast<float>(x[n]);
        });
    }
    // Terms of gates: of each channel, or their sum.
    __device__ void store_terms(double* to, double (&x)[S::parts]) const {
        if (workspace.channels > 1) {
            unrolled<S::parts>([&](int n) {
                if (my.lane + 32 * n < workspace.channels) to[my.lane + 32 * n] = x[n];
            });
            return;
        }
        double sum = 0;
        unrolled<S::parts>([&](int n) { sum += x[n]; });
        sum = sum_of_warp(sum);
        if (my.lane == 0) *to = sum;
    }
    __device__ double* terms(double* of, Index t) const {
        return of + (my.slab * workspace.rows * my.call.heads + my.token_row(t)) * workspace.channels;
    }
    __device__ void load_written(Index t, double (&out)[S::parts]) const {
        unrolled<S::parts>([&](int n) {
            const int m = my.lane + 32 * n;
            out[n] = workspace.written && m < workspace.channels ? terms(workspace.written, t)[m] : 0.0;
        });
    }
    __device__ void sum_dk(Index t, int i) const {
        double x[S::parts];
        sum_of_block(0, i, x);
        store_row(workspace.dk, t, x);
        if (!workspace.written) return;
        unrolled<S::parts>([&](int n) { x[n] *= -my.memory.k[i][my.lane + 32 * n]; });
        store_terms(terms(workspace.written, t), x);
    }
    __device__ void sum_dq(Index t, int i, const double (&written)[S::parts]) const {
        double x[S::parts];
        sum_of_block(0, i, x);
        store_row(workspace.dq, t, x);
        if (!workspace.written) return;
        unrolled<S::parts>([&](int n) { x[n] = fma(x[n], my.memory.q[i][my.lane + 32 * n], written[n]); });
        store_terms(terms(workspace.written, t), x);
    }
    __device__ void sum_dp(Index t, int i) const {
        if (my.call.erase == core::Erase::nothing) return;
        double x[S::parts];
        sum_of_block(1, i, x);
        store_row(workspace.dp, t, x);
        if (!workspace.erase) return;
        unrolled<S::parts>([&](int n) { x[n] *= my.erase_key(i)[my.lane + 32 * n]; });
        store_terms(terms(workspace.erase, t), x);
    }

    // --- ends of chunks

    template <class Visit>
    __device__ void visit_saved(const LaneState<S>& state, Index t, Visit&& visit) const {
        double* saved = workspace.dstates +
                        ((slot(t) * my.call.heads + my.hv) * workspace.slabs + my.slab) * (S::R * S::C * S::threads) +
                        threadIdx.x;
        unrolled<S::R, S::C>([&](int r, int c) { visit(saved[(r * S::C + c) * S::threads], state[r][c]); });
    }
    __device__ void add_end(Index t, const LaneState<S>& state) const {
        double row[S::R], saved[S::R * S::C];
        int n = 0;
        visit_saved(state, t, [&](double x, double) { saved[n++] = x; });
        unrolled<S::R>([&](int r) {
            row[r] = 0;
            unrolled<S::C>([&](int c) { row[r] = fma(state[r][c], saved[r * S::C + c], row[r]); });
        });
        my.sum_over_columns(row, my.memory.sums[0][my.warp][0]);
        __syncthreads();
        if (my.warp == 0) {
            double x[S::parts];
            sum_of_block(0, 0, x);
            store_terms(
                workspace.ends + ((my.slab * workspace.slots + slot(t)) * my.call.heads + my.hv) * workspace.channels,
                x);
        }
        __syncthreads();
    }
};

template <class S, bool again>
__global__ void __launch_bounds__(S::threads, 2)
    walk_back_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                     const __grid_constant__ GradientViews views, const __grid_constant__ GradientMemory workspace) {
    BackwardWalk<S> walk(call, sequences, views, workspace);
    if constexpr (again)
        walk.run_again();
    else
        walk.run_back();
}

}  // namespace

void launch_walk_back(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                      const GradientMemory& memory, cudaStream_t stream) {
    launch_walk(call, sequences, {{}, {}, {}, memory.erased}, stream);
    with_walk_shape(call.key_size, [&](auto shape) {
        using S = decltype(shape);
        const Grid grid{{static_cast<unsigned>(walk_slabs(call)), static_cast<unsigned>(call.heads),
                         static_cast<unsigned>(sequences.count)},
                        S::threads,
                        static_cast<int>(sizeof(WalkMemory<S>))};
        launch(walk_back_kernel<S, false>, grid, stream, "the delta rules' walk from the end", call, sequences, grad,
               memory);
        launch(walk_back_kernel<S, true>, grid, stream, "the delta rules' second walk", call, sequences, grad, memory);
    });
}

}  // namespace softdelta::cuda
