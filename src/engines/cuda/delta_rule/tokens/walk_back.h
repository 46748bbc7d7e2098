// The recurrence backwards. With E the state that token t erases from, S the one after it, w = βe:
//
//     from the end    dS += q doᵀ     dw = dSᵀ k     dk = dS w     dS ← e^g∘(dS − p (β dw)ᵀ)
//                     erasing from the previous state: dS ← e^g∘dS − p (β dw)ᵀ
//     from the start  S once more from the saved w           dq = S do     dp = −E (β dw)
//
// so that no state is kept but in registers. dg needs S and dS at one time; it comes from the sums
// rowsum(S∘dS) at the ends of chunks and from q∘dq, k∘dk, p∘dp of the tokens between (docs/math.md). In f64 their
// differences keep what f32 would lose.
#pragma once

#include "engines/cuda/delta_rule/tokens/walk.h"

namespace softdelta::cuda {

template <class S>
struct BackwardWalk {
    using State = typename S::State;

    const Walk<S> my;
    const View& d_o;
    const GradientMemory& workspace;
    const bool adds;  // gradients of keys to those that are there

    // dS from the end to the start.
    __device__ void run_back(State& dstate) const {
        StepValues<S, 2, true> values(my, d_o, workspace.erased);
        my.template for_each_step<true>(values, [&](Index first, int tokens) {
            for (int i = tokens; i-- > 0;) {
                if (workspace.dstates && ends_chunk(first + i))
                    visit_saved(dstate, first + i, [](double& saved, double x) { saved = x; });
                step_back(first + i, i, dstate);
            }
            __syncthreads();
            if (my.warp < tokens) sum_dk(first + my.warp, my.warp);
        });
    }

    // S from the start to the end, once more.
    __device__ void run_again(State& state) const {
        StepValues<S, 3, true> values(my, d_o, workspace.erased, workspace.dwritten);
        my.template for_each_step<false>(values, [&](Index first, int tokens) {
            for (int i = 0; i < tokens; ++i) step_again(i, state);
            const int quantity = my.warp / S::step, i = my.warp % S::step;
            const bool works = quantity < 2 && i < tokens;
            double written[S::parts];
            if (works && quantity == 0) load_written(first + i, written);
            __syncthreads();
            if (works && quantity == 0) sum_dq(first + i, i, written);
            if (works && quantity == 1) sum_dp(first + i, i);
            if (const Index last = first + tokens - 1; workspace.dstates && ends_chunk(last)) {
                __syncthreads();
                add_end(last, state);
            }
        });
    }

  private:
    __device__ bool ends_chunk(Index t) const { return (t + 1) % chunk_rows == 0 || t + 1 == my.in_steps().count; }

    // --- a token

    __device__ void step_back(Index t, int i, State& dstate) const {
        const double beta = my.memory.beta[i];
        double d_o[S::C], written[S::C], dwritten[S::C], dk[S::R];
        my.columns_of(my.memory.values[0][i], d_o);
        my.columns_of(my.memory.values[1][i], written);
        unrolled<S::C>([&](int c) { written[c] *= beta; });
        my.add_product(my.memory.q[i], d_o, dstate);
        my.multiply(my.memory.k[i], dstate, dwritten);
        multiply_columns(dstate, written, dk);
        my.sum_over_columns(dk, my.memory.sums[0][my.warp][i]);
        double* to = workspace.dwritten + my.rows.token(t) * my.call.value_size;
        my.share_columns(dwritten, [&](int j, double x) { to[j] = x; });

        if (my.before_decay) my.scale_rows(my.memory.decay[i], dstate);
        if (my.erases) {
            double de[S::C];
            unrolled<S::C>([&](int c) { de[c] = -beta * dwritten[c]; });
            my.add_product(my.erase_key(i), de, dstate);
        }
        if (!my.before_decay) my.scale_rows(my.memory.decay[i], dstate);
    }
    __device__ void step_again(int i, State& state) const {
        const double beta = my.memory.beta[i];
        double d_o[S::C], written[S::C], de[S::C], row[S::R];
        my.columns_of(my.memory.values[0][i], d_o);
        my.columns_of(my.memory.values[1][i], written);
        my.columns_of(my.memory.values[2][i], de);
        unrolled<S::C>([&](int c) {
            written[c] *= beta;
            de[c] *= -beta;
        });
        if (!my.before_decay) my.scale_rows(my.memory.decay[i], state);
        if (my.erases) {
            multiply_columns(state, de, row);
            my.sum_over_columns(row, my.memory.sums[1][my.warp][i]);
        }
        if (my.before_decay) my.scale_rows(my.memory.decay[i], state);
        my.add_product(my.memory.k[i], written, state);
        multiply_columns(state, d_o, row);
        my.sum_over_columns(row, my.memory.sums[0][my.warp][i]);
    }
    // state·column over the lane's columns.
    __device__ static void multiply_columns(const State& state, const double (&column)[S::C], double (&out)[S::R]) {
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
    // use(channel, element) for those of the lane that exist.
    template <class Use>
    __device__ void each_channel(int size, double (&x)[S::parts], const Use& use) const {
        unrolled<S::parts>([&](int n) {
            if (my.lane + 32 * n < size) use(my.lane + 32 * n, x[n]);
        });
    }
    __device__ Index row_of_slab(Index t) const {
        return my.slab * workspace.rows * workspace.heads + my.rows.token(t);
    }
    __device__ void store_row(float* to, Index t, double (&x)[S::parts]) const {
        to += row_of_slab(t) * my.call.key_size;
        each_channel(my.call.key_size, x,
                     [&](int m, double x) { to[m] = static_cast<float>(adds ? static_cast<double>(to[m]) + x : x); });
    }
    // Terms of gates: of each channel, or their sum.
    __device__ void store_terms(double* to, double (&x)[S::parts]) const {
        if (workspace.channels > 1) return each_channel(workspace.channels, x, [&](int m, double x) { to[m] = x; });
        double sum = 0;
        unrolled<S::parts>([&](int n) { sum += x[n]; });
        sum = sum_of_warp(sum);
        if (my.lane == 0) *to = sum;
    }
    __device__ double* terms(double* of, Index t) const { return of + row_of_slab(t) * workspace.channels; }
    __device__ void load_written(Index t, double (&out)[S::parts]) const {
        unrolled<S::parts>([&](int n) { out[n] = 0; });
        if (workspace.written)
            each_channel(workspace.channels, out, [&](int m, double& x) { x = terms(workspace.written, t)[m]; });
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
        if (!my.erases) return;
        double x[S::parts];
        sum_of_block(1, i, x);
        store_row(workspace.dp, t, x);
        if (!workspace.erase) return;
        unrolled<S::parts>([&](int n) { x[n] *= my.erase_key(i)[my.lane + 32 * n]; });
        store_terms(terms(workspace.erase, t), x);
    }

    // --- ends of chunks

    template <class Visit>
    __device__ void visit_saved(const State& state, Index t, Visit&& visit) const {
        double* saved = workspace.dstates +
                        (my.rows.chunk_of(t) * workspace.slabs + my.slab) * (S::R * S::C * S::threads) + threadIdx.x;
        unrolled<S::R, S::C>([&](int r, int c) { visit(saved[(r * S::C + c) * S::threads], state[r][c]); });
    }
    __device__ void add_end(Index t, const State& state) const {
        double row[S::R], saved[S::R * S::C];
        int n = 0;
        visit_saved(state, t, [&](double x, double) { saved[n++] = x; });
        unrolled<S::R>([&](int r) {
            row[r] = 0;
            unrolled<S::C>([&](int c) { row[r] = fma(state[r][c], saved[r * S::C + c], row[r]); });
        });
        my.sum_over_columns(row, my.memory.sums[0][my.warp][0]);
        __syncthreads();
        if (my.warp != 0) return;
        double x[S::parts];
        sum_of_block(0, 0, x);
        store_terms(
            workspace.ends + (my.slab * workspace.slots * workspace.heads + my.rows.chunk_of(t)) * workspace.channels,
            x);
    }
};

}  // namespace softdelta::cuda
