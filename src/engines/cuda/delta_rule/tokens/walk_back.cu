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
#include "engines/cuda/delta_rule/tokens/launch_forward.h"
#include "engines/cuda/delta_rule/tokens/walk.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

template <class S>
using LaneState = double[S::R][S::C];

template <class S>
class BackwardWalk : public Walk<S> {
  public:
    using Walk<S>::call;
    using Walk<S>::sequence;
    using Walk<S>::memory;
    using Walk<S>::hv;
    using Walk<S>::slab;
    using Walk<S>::warp;
    using Walk<S>::lane;
    using Values = StepValues<S>;

    __device__ BackwardWalk(const DeltaCall& the_call, const DeltaSequences& sequences, const GradientViews& views,
                            const GradientMemory& workspace)
        : Walk<S>(the_call, sequences),
          views_(views),
          workspace_(workspace),
          n_(sequences.first + static_cast<int>(blockIdx.z)),
          packed_(sequences.packed) {}

    // dS from the end to the start.
    __device__ void run_back() {
        LaneState<S> dstate;
        this->load_state(views_.dfinal_state, this->state_offset(views_.dfinal_state), dstate);
        const Index steps = (sequence.count + S::step - 1) / S::step;
        auto given = this->load_given((steps - 1) * S::step);
        load_values((steps - 1) * S::step, false);
        for (Index b = steps; b-- > 0;) {
            const Index first = b * S::step;
            this->fold(given);
            store_values(false);
            __syncthreads();
            given = this->load_given(first - S::step);
            load_values(first - S::step, false);
            const int tokens = static_cast<int>(min(sequence.count - first, Index(S::step)));
            for (int i = tokens; i-- > 0;) {
                if (workspace_.dstates && ends_chunk(first + i))
                    visit_saved(dstate, first + i, [](double& saved, double x) { saved = x; });
                step_back(first + i, i, dstate);
            }
            __syncthreads();
            if (warp < tokens) sum_dk(first + warp, warp);
            __syncthreads();
        }
        if (const View& v = views_.dinitial_state)
            this->store_state(v, this->state_offset(v), call.state_row, call.state_column, dstate);
    }

    // S from the start to the end, once more.
    __device__ void run_again() {
        LaneState<S> state;
        this->load_state(call.initial_state, this->state_offset(call.initial_state), state);
        auto given = this->load_given(0);
        load_values(0, true);
        for (Index first = 0; first < sequence.count; first += S::step) {
            this->fold(given);
            store_values(true);
            __syncthreads();
            given = this->load_given(first + S::step);
            load_values(first + S::step, true);
            const int tokens = static_cast<int>(min(sequence.count - first, Index(S::step)));
            for (int i = 0; i < tokens; ++i) step_again(i, state);
            const int quantity = warp / S::step, i = warp % S::step;
            const bool works = quantity < 2 && i < tokens;
            double written[S::parts];
            if (works && quantity == 0) load_written(first + i, written);
            __syncthreads();
            if (works && quantity == 0) sum_dq(first + i, i, written);
            if (works && quantity == 1) sum_dp(first + i, i);
            __syncthreads();
            if (workspace_.dstates && ends_chunk(first + tokens - 1)) add_end(first + tokens - 1, state);
        }
    }

  private:
    __device__ bool ends_chunk(Index t) const {
        return (t + 1) % GradientMemory::chunk == 0 || t + 1 == sequence.count;
    }
    __device__ Index slot(Index t) const { return workspace_.slot(sequence, n_, t / GradientMemory::chunk, packed_); }

    // --- rows of values: do, e, and dw

    __device__ void load_values(Index first, bool again) {
        Values::for_each([&](int n, int i, int j) {
            const Index t = first + i;
            const int column = slab * S::slab + j;
            const bool inside = t >= 0 && t < sequence.count && column < call.value_size;
            d_o_[n] = inside && views_.d_o
                          ? load(views_.d_o, this->offset(views_.d_o, t, hv) + column * views_.d_o.stride[3])
                          : 0.0F;
            const Index at = this->token_row(t) * call.value_size + column;
            e_[n] = inside ? workspace_.erased[at] : 0.0;
            dw_[n] = inside && again ? workspace_.dwritten[at] : 0.0;
        });
    }
    __device__ void store_values(bool again) const {
        Values::for_each([&](int n, int i, int j) {
            memory.values[0][i][j] = static_cast<double>(d_o_[n]);
            memory.values[1][i][j] = e_[n];
            if (again) memory.values[2][i][j] = dw_[n];
        });
    }

    // --- a token

    __device__ void step_back(Index t, int i, LaneState<S>& dstate) const {
        const double beta = memory.beta[i];
        double d_o[S::C], written[S::C], dwritten[S::C], dk[S::R];
        this->columns_of(memory.values[0][i], d_o);
        this->columns_of(memory.values[1][i], written);
#pragma unroll
        for (int c = 0; c < S::C; ++c) written[c] *= beta;
        this->add_product(memory.q[i], d_o, dstate);
        this->multiply(memory.k[i], dstate, dwritten);
        multiply_columns(dstate, written, dk);
        this->sum_over_columns(dk, memory.sums[0][warp][i]);
        double* to = workspace_.dwritten + this->token_row(t) * call.value_size;
        this->share_columns(dwritten, [&](int j, double x) { to[j] = x; });

        const bool before_decay = call.erase == core::Erase::from_previous_state;
        if (before_decay) this->scale_rows(memory.decay[i], dstate);
        if (call.erase != core::Erase::nothing) {
            double de[S::C];
#pragma unroll
            for (int c = 0; c < S::C; ++c) de[c] = -beta * dwritten[c];
            this->add_product(this->erase_key(i), de, dstate);
        }
        if (!before_decay) this->scale_rows(memory.decay[i], dstate);
    }
    __device__ void step_again(int i, LaneState<S>& state) const {
        const double beta = memory.beta[i];
        double d_o[S::C], written[S::C], de[S::C], row[S::R];
        this->columns_of(memory.values[0][i], d_o);
        this->columns_of(memory.values[1][i], written);
        this->columns_of(memory.values[2][i], de);
#pragma unroll
        for (int c = 0; c < S::C; ++c) {
            written[c] *= beta;
            de[c] *= -beta;
        }
        const bool before_decay = call.erase == core::Erase::from_previous_state;
        if (!before_decay) this->scale_rows(memory.decay[i], state);
        if (call.erase != core::Erase::nothing) {
            multiply_columns(state, de, row);
            this->sum_over_columns(row, memory.sums[1][warp][i]);
        }
        if (before_decay) this->scale_rows(memory.decay[i], state);
        this->add_product(memory.k[i], written, state);
        multiply_columns(state, d_o, row);
        this->sum_over_columns(row, memory.sums[0][warp][i]);
    }
    // state·column over the lane's columns.
    __device__ static void multiply_columns(const LaneState<S>& state, const double (&column)[S::C],
                                            double (&out)[S::R]) {
#pragma unroll
        for (int r = 0; r < S::R; ++r) {
            out[r] = 0;
#pragma unroll
            for (int c = 0; c < S::C; ++c) out[r] = fma(state[r][c], column[c], out[r]);
        }
    }

    // --- rows of keys, by a warp each: sums over the block's columns

    __device__ void sum_of_block(int quantity, int i, double (&out)[S::parts]) const {
#pragma unroll
        for (int n = 0; n < S::parts; ++n) {
            out[n] = 0;
#pragma unroll
            for (int w = 0; w < S::warps; ++w) out[n] += memory.sums[quantity][w][i][lane + 32 * n];
        }
    }
    __device__ void store_row(float* to, Index t, const double (&x)[S::parts]) const {
        to += (slab * workspace_.rows * call.heads + this->token_row(t)) * call.key_size;
#pragma unroll
        for (int n = 0; n < S::parts; ++n)
            if (lane + 32 * n < call.key_size) to[lane + 32 * n] = static_cast<float>(x[n]);
    }
    // Terms of gates: of each channel, or their sum.
    __device__ void store_terms(double* to, double (&x)[S::parts]) const {
        if (workspace_.channels > 1) {
#pragma unroll
            for (int n = 0; n < S::parts; ++n)
                if (lane + 32 * n < workspace_.channels) to[lane + 32 * n] = x[n];
            return;
        }
        double sum = 0;
#pragma unroll
        for (int n = 0; n < S::parts; ++n) sum += x[n];
        sum = sum_of_warp(sum);
        if (lane == 0) *to = sum;
    }
    __device__ double* terms(double* of, Index t) const {
        return of + (slab * workspace_.rows * call.heads + this->token_row(t)) * workspace_.channels;
    }
    __device__ void load_written(Index t, double (&out)[S::parts]) const {
#pragma unroll
        for (int n = 0; n < S::parts; ++n) {
            const int m = lane + 32 * n;
            out[n] = workspace_.written && m < workspace_.channels ? terms(workspace_.written, t)[m] : 0.0;
        }
    }
    __device__ void sum_dk(Index t, int i) const {
        double x[S::parts];
        sum_of_block(0, i, x);
        store_row(workspace_.dk, t, x);
        if (!workspace_.written) return;
#pragma unroll
        for (int n = 0; n < S::parts; ++n) x[n] *= -memory.k[i][lane + 32 * n];
        store_terms(terms(workspace_.written, t), x);
    }
    __device__ void sum_dq(Index t, int i, const double (&written)[S::parts]) const {
        double x[S::parts];
        sum_of_block(0, i, x);
        store_row(workspace_.dq, t, x);
        if (!workspace_.written) return;
#pragma unroll
        for (int n = 0; n < S::parts; ++n) x[n] = fma(x[n], memory.q[i][lane + 32 * n], written[n]);
        store_terms(terms(workspace_.written, t), x);
    }
    __device__ void sum_dp(Index t, int i) const {
        if (call.erase == core::Erase::nothing) return;
        double x[S::parts];
        sum_of_block(1, i, x);
        store_row(workspace_.dp, t, x);
        if (!workspace_.erase) return;
#pragma unroll
        for (int n = 0; n < S::parts; ++n) x[n] *= this->erase_key(i)[lane + 32 * n];
        store_terms(terms(workspace_.erase, t), x);
    }

    // --- ends of chunks

    template <class Visit>
    __device__ void visit_saved(const LaneState<S>& state, Index t, Visit&& visit) const {
        double* saved = workspace_.dstates +
                        ((slot(t) * call.heads + hv) * workspace_.slabs + slab) * (S::R * S::C * S::threads) +
                        threadIdx.x;
#pragma unroll
        for (int r = 0; r < S::R; ++r)
#pragma unroll
            for (int c = 0; c < S::C; ++c) visit(saved[(r * S::C + c) * S::threads], state[r][c]);
    }
    __device__ void add_end(Index t, const LaneState<S>& state) const {
        double row[S::R], saved[S::R * S::C];
        int n = 0;
        visit_saved(state, t, [&](double x, double) { saved[n++] = x; });
#pragma unroll
        for (int r = 0; r < S::R; ++r) {
            row[r] = 0;
#pragma unroll
            for (int c = 0; c < S::C; ++c) row[r] = fma(state[r][c], saved[r * S::C + c], row[r]);
        }
        this->sum_over_columns(row, memory.sums[0][warp][0]);
        __syncthreads();
        if (warp == 0) {
            double x[S::parts];
            sum_of_block(0, 0, x);
            store_terms(workspace_.ends + ((slab * workspace_.slots + slot(t)) * call.heads + hv) * workspace_.channels,
                        x);
        }
        __syncthreads();
    }

    const GradientViews& views_;
    const GradientMemory& workspace_;
    const int n_;
    const bool packed_;
    float d_o_[Values::rounds];
    double e_[Values::rounds], dw_[Values::rounds];
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
