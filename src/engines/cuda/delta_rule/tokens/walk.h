// A walk over the tokens of one value head in f64, for some value columns of its state: what the passes of tokens/
// share. A block has 8 warps, or 16, a lane 8 rows × 4 columns of the state in registers:
//
//     lane = row groups·(column group) + row group
//     rows     row group + row groups·r,  r < 8        so that neighbours read neighbours
//     columns  4·column group + c,        c < 4        of the warp's
//
// A few tokens at a time ("step") are folded into shared memory: q, k, p with norm and scale, e^g, β, and rows of
// values. While they are walked over, the next ones are on their way from memory.
#pragma once

#include <cstddef>

#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/delta_rule/tokens/gradients.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/lanes.h"
#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

// of_steps: a token may have several rows of k, v, p and β.
template <int keys, int of_warps = 8, bool of_steps = false>
struct WalkShape {
    static constexpr bool several = of_steps;
    static constexpr int K = keys, warps = of_warps, threads = 32 * warps, R = 8, C = 4;
    static constexpr int row_groups = K / R, column_groups = 32 / row_groups;
    static constexpr int warp_columns = C * column_groups, slab = warps * warp_columns;
    static constexpr int step = K == 256 ? 2 : 4;                       // tokens
    static constexpr int at_once = warps / 4, rounds = step / at_once;  // of them that a warp of each kind folds
    static constexpr int parts = K / 32;                                // elements of a row of keys for each lane
    using State = double[R][C];                                         // a lane's part of one
    static_assert(R * row_groups == K && rounds * at_once == step);
};

template <class S>
struct WalkMemory {
    double q[S::step][S::K], k[S::step][S::K], p[S::step][S::K], decay[S::step][S::K];
    double beta[S::step];
    double values[3][S::step][S::slab];
    double sums[2][S::warps][S::step][S::K];  // over a warp's columns; backward alone

    static constexpr int forward_bytes = static_cast<int>(offsetof(WalkMemory, sums));
};

// A state of a tensor, [K, V] or [V, K].
struct StateOfTensor {
    const View& v;
    Index offset, row, column;

    __device__ double operator()(int m, int j) const {
        return v ? static_cast<double>(load(v, offset + m * row + j * column)) : 0.0;
    }
};

template <class S>
class Walk {
  public:
    static constexpr int K = S::K, R = S::R, C = S::C;
    using State = typename S::State;

    __device__ Walk(const DeltaCall& call, const DeltaSequence& sequence, int hv, int slab, const TokenRows& rows)
        : call(call), sequence(sequence), rows(rows), head(call, hv), hv(hv), slab(slab) {}

    // --- a lane's part of a state

    template <class Visit>
    __device__ void for_each(State& state, Visit&& visit) const {
        unrolled<R, C>([&](int r, int c) {
            visit(state[r][c], row(r), column + c, row(r) < call.key_size && column + c < call.value_size);
        });
    }
    __device__ int row(int r) const { return row_group + S::row_groups * r; }

    // from(key channel, value column)
    template <class From>
    __device__ void load_state(const From& from, State& state) const {
        for_each(state, [&](double& x, int m, int j, bool inside) { x = inside ? from(m, j) : 0.0; });
    }
    // Four numbers of a tensor at a time, where they lie so: all of them are on their way at once.
    __device__ void load_state(const View& v, State& state) const {
        const Index offset = state_offset(v), row_step = v.stride[call.state_row],
                    column_step = v.stride[call.state_column];
        if (!in_fours(v, offset, row_step, column_step))
            return load_state(StateOfTensor{v, offset, row_step, column_step}, state);
        float4 x[R];
        unrolled<R>([&](int r) { x[r] = row(r) < call.key_size ? __ldcs(four_at(v, offset, row_step, r)) : float4{}; });
        unrolled<R>(
            [&](int r) { state[r][0] = x[r].x, state[r][1] = x[r].y, state[r][2] = x[r].z, state[r][3] = x[r].w; });
    }
    __device__ void store_state(const View& v, Index offset, int row_dim, int column_dim, State& state) const {
        if (in_fours(v, offset, v.stride[row_dim], v.stride[column_dim]))
            return unrolled<R>([&](int r) {
                if (row(r) < call.key_size)
                    __stcs(four_at(v, offset, v.stride[row_dim], r),
                           float4{static_cast<float>(state[r][0]), static_cast<float>(state[r][1]),
                                  static_cast<float>(state[r][2]), static_cast<float>(state[r][3])});
            });
        for_each(state, [&](double x, int m, int j, bool inside) {
            if (inside) store(v, offset + m * v.stride[row_dim] + j * v.stride[column_dim], static_cast<float>(x));
        });
    }
    __device__ Index state_offset(const View& v) const { return sequence.state * v.stride[0] + hv * v.stride[1]; }

    // --- rows of k, v, p and β: one for each token, or options.steps

    __device__ Index token(Index row) const { return S::several ? call.token(row) : row; }
    __device__ bool begins_token(Index row) const { return !S::several || call.begins_token(row); }
    __device__ bool ends_token(Index row) const { return !S::several || call.ends_token(row); }
    __device__ Sequence in_steps() const {
        if constexpr (S::several) return call.in_steps(sequence);
        return sequence;
    }

    // take(first row, how many) for a few folded rows at a time in their order, or from the last on.
    template <bool reverse, class Values, class Take>
    __device__ void for_each_step(Values& values, const Take& take) const {
        const Index steps = (in_steps().count + S::step - 1) / S::step;
        const auto first_of = [&](Index n) { return (reverse ? steps - 1 - n : n) * S::step; };
        Given given = load_given(first_of(0));
        values.load(first_of(0));
        for (Index n = 0; n < steps; ++n) {
            const Index first = first_of(n);
            fold(given);
            values.store();
            __syncthreads();
            given = load_given(first_of(n + 1));
            values.load(first_of(n + 1));
            take(first, static_cast<int>(min(in_steps().count - first, Index(S::step))));
            __syncthreads();
        }
    }
    // Row of the keys that are erased along.
    __device__ const double* erase_key(int i) const { return call.own_p ? memory.p[i] : memory.k[i]; }

    // --- sums

    // Of a lane's numbers for its columns, over the row groups; every lane gets them.
    __device__ void sum_over_rows(double (&x)[C]) const {
        static_assert(C == 4);
        const auto other = [](double y, int lanes) { return __shfl_xor_sync(0xffffffffu, y, lanes); };
        const bool high = (lane & 1) != 0, second = (lane & 2) != 0;
        double a = high ? x[2] : x[0], b = high ? x[3] : x[1];
        a += other(high ? x[0] : x[2], 1);
        b += other(high ? x[1] : x[3], 1);
        double sum = second ? b : a;
        sum += other(second ? a : b, 2);
        unrolled<3>([&](int i) {
            const int lanes = 4 << i;
            if (lanes >= S::row_groups) return;
            sum += other(sum, lanes);
        });
        const double pair = other(sum, 2);
        a = second ? pair : sum;
        b = second ? sum : pair;
        const double c = other(a, 1), d = other(b, 1);
        x[0] = high ? c : a;
        x[1] = high ? d : b;
        x[2] = high ? a : c;
        x[3] = high ? b : d;
    }
    // Σ_rows row·state.
    __device__ void multiply(const double* of_row, const State& state, double (&out)[C]) const {
        unrolled<C>([&](int c) { out[c] = 0; });
        unrolled<R>([&](int r) {
            const double x = of_row[row(r)];
            unrolled<C>([&](int c) { out[c] = fma(x, state[r][c], out[c]); });
        });
        sum_over_rows(out);
    }
    // state ← factor∘state
    __device__ void scale_rows(const double* factor, State& state) const {
        unrolled<R>([&](int r) {
            const double x = factor[row(r)];
            unrolled<C>([&](int c) { state[r][c] *= x; });
        });
    }
    // state ← state + row columnᵀ
    __device__ void add_product(const double* of_row, const double (&of_column)[C], State& state) const {
        unrolled<R>([&](int r) {
            const double x = of_row[row(r)];
            unrolled<C>([&](int c) { state[r][c] = fma(x, of_column[c], state[r][c]); });
        });
    }
    // Of a lane's numbers for its rows, over the warp's columns, into `to` [K].
    __device__ void sum_over_columns(double (&x)[R], double* to) const {
        int first = 0;
#pragma unroll
        for (int lanes = S::row_groups, n = R / 2; lanes < 32; lanes *= 2, n /= 2) {
            const bool high = (lane & lanes) != 0;
            unrolled<R / 2>([&](int r) {
                if (r >= n) return;
                const double given = high ? x[r] : x[n + r];
                x[r] = (high ? x[n + r] : x[r]) + __shfl_xor_sync(0xffffffffu, given, lanes);
            });
            if (high) first += n;
        }
        unrolled<R / S::column_groups>([&](int r) { to[row(first + r)] = x[r]; });
    }
    // The lane's columns of a row in shared memory.
    __device__ void columns_of(const double* values, double (&out)[C]) const {
        unrolled<C>([&](int c) { out[c] = values[own_column + c]; });
    }
    // One column for each of the first C row groups, written by write(column, x).
    template <class Write>
    __device__ void share_columns(const double (&x)[C], Write&& write) const {
        const double mine = row_group == 0 ? x[0] : row_group == 1 ? x[1] : row_group == 2 ? x[2] : x[3];
        if (row_group < C && column + row_group < call.value_size) write(column + row_group, mine);
    }

    const DeltaCall& call;
    const DeltaSequence sequence;
    const TokenRows rows;
    WalkMemory<S>& memory = *reinterpret_cast<WalkMemory<S>*>(ptx::shared_memory());
    const HeadGate head;
    const int hv, slab, warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
                        row_group = lane % S::row_groups;
    // The lane's first, of the slab and of all.
    const int own_column = warp * S::warp_columns + lane / S::row_groups * C, column = slab * S::slab + own_column;
    const bool erases = call.erase != core::Erase::nothing,
               before_decay = call.erase == core::Erase::from_previous_state;

  private:
    __device__ float4* four_at(const View& v, Index offset, Index row_step, int r) const {
        return reinterpret_cast<float4*>(static_cast<float*>(v.data) + offset + row(r) * row_step + column);
    }
    __device__ bool in_fours(const View& v, Index offset, Index row_step, Index column_step) const {
        return v && v.dtype == DType::f32 && column_step == 1 && row_step % 4 == 0 && column + C <= call.value_size &&
               reinterpret_cast<std::uintptr_t>(static_cast<float*>(v.data) + offset + column) % 16 == 0;
    }

    // What the caller gave of a step's tokens. A warp has rows of one kind: q, k, p or the gate with β.
    struct Given {
        float x[S::rounds][S::parts];
        float beta[S::rounds];
        bool decays[S::rounds];
    };
    __device__ Given load_given(Index first) const {
        Given given{};
        const int kind = warp % 4;
        unrolled<S::rounds>([&](int w) {
            const Index t = first + warp / 4 + S::at_once * w;
            if (t < 0 || t >= in_steps().count) return;
            if (kind == 3) {
                given.decays[w] = begins_token(t);
                if (call.g && given.decays[w]) {
                    const bool channel = call.gate == core::Gate::channel;
                    load_parts(call.g, sequence.row(call.g, token(t), hv), channel ? call.g.stride[3] : 0, given.x[w]);
                }
                given.beta[w] = call.beta ? load(call.beta, in_steps().row(call.beta, t, hv)) : 1.0F;
            } else if (kind == 0) {
                if (ends_token(t))
                    load_parts(call.q, sequence.row(call.q, token(t), call.key_head(hv)), call.q.stride[3], given.x[w]);
            } else if (const View& v = kind == 1 ? call.k : call.p; v) {
                load_parts(v, in_steps().row(v, t, call.key_head(hv)), v.stride[3], given.x[w]);
            }
        });
        return given;
    }
    __device__ void load_parts(const View& v, Index at, Index step, float (&out)[S::parts]) const {
        with_type(v, [&](const auto* data) {
            unrolled<S::parts>([&](int i) {
                out[i] = lane + 32 * i < call.key_size ? to_float(data[at + (lane + 32 * i) * step]) : 0.0F;
            });
        });
    }
    __device__ void fold(const Given& given) const {
        const int kind = warp % 4;
        if (kind == 2 && !call.own_p) return;
        unrolled<S::rounds>([&](int w) {
            const int i = warp / 4 + S::at_once * w;
            if (kind == 3)
                fold_gate(given.x[w], given.decays[w], given.beta[w], i);
            else
                fold_key(given.x[w],
                         kind == 0   ? memory.q[i]
                         : kind == 1 ? memory.k[i]
                                     : memory.p[i],
                         kind == 0 ? call.scale : 1.0);
        });
    }
    __device__ void fold_key(const float (&x)[S::parts], double* to, double factor) const {
        if (call.l2norm) {
            double sum = 0;
            unrolled<S::parts>([&](int i) { sum += static_cast<double>(x[i]) * static_cast<double>(x[i]); });
            factor /= sqrt(sum_of_warp(sum) + 1e-6);
        }
        unrolled<S::parts>([&](int i) { to[lane + 32 * i] = factor * static_cast<double>(x[i]); });
    }
    __device__ void fold_gate(const float (&x)[S::parts], bool decays, float beta, int i) const {
        if (decays && call.gate == core::Gate::channel) {
            unrolled<S::parts>([&](int n) {
                const int m = lane + 32 * n;
                const bool inside = m < call.key_size;
                const double dt = inside ? head.bias_of(call, hv, m) : 0.0;
                memory.decay[i][m] = inside ? HeadGate::decay(head.gate(call, x[n], dt)) : 1.0;
            });
        } else {
            const double same = !decays || call.gate == core::Gate::none ? 1.0 : HeadGate::decay(head.gate(call, x[0]));
            unrolled<S::parts>([&](int n) { memory.decay[i][lane + 32 * n] = same; });
        }
        if (lane == 0) memory.beta[i] = exact_beta(call, beta);
    }
};

// Rows of values, an element for each thread and round: of a tensor of k's rows or, of_tokens, of q's, where a token's
// last row has them; then of the workspace.
template <class S, int kinds, bool of_tokens>
struct StepValues {
    static constexpr int rounds = (S::step * S::slab + S::threads - 1) / S::threads;

    const Walk<S>& my;
    const View& tensor;
    const double* saved[2];
    float given[rounds];
    double x[2][rounds];

    __device__ StepValues(const Walk<S>& walk, const View& of, const double* first = nullptr,
                          const double* second = nullptr)
        : my(walk), tensor(of), saved{first, second} {}

    __device__ void load(Index first) {
        for_each([&](int n, int i, int j) {
            const Index t = first + i;
            const int column = my.slab * S::slab + j;
            const bool inside = t >= 0 && t < my.in_steps().count && column < my.call.value_size;
            given[n] = 0;
            if (inside && tensor && (!of_tokens || my.ends_token(t))) {
                const Index row =
                    of_tokens ? my.sequence.row(tensor, my.token(t), my.hv) : my.in_steps().row(tensor, t, my.hv);
                given[n] = cuda::load(tensor, row + column * tensor.stride[3]);
            }
            const Index at = my.rows.token(t) * my.call.value_size + column;
            unrolled<kinds - 1>([&](int kind) { x[kind][n] = inside ? saved[kind][at] : 0.0; });
        });
    }
    __device__ void store() const {
        for_each([&](int n, int i, int j) {
            my.memory.values[0][i][j] = static_cast<double>(given[n]);
            unrolled<kinds - 1>([&](int kind) { my.memory.values[1 + kind][i][j] = x[kind][n]; });
        });
    }

  private:
    template <class Visit>  // visit(round, token of the step, column of the slab)
    __device__ static void for_each(Visit&& visit) {
        unrolled<rounds>([&](int n) {
            const int u = static_cast<int>(threadIdx.x) + n * S::threads;
            if (u < S::step * S::slab) visit(n, u / S::slab, u % S::slab);
        });
    }
};

// The walk from the start: results, or the values before β that the backward pass needs.
template <class S>
struct ForwardWalk {
    const Walk<S> my;
    const WalkOutputs& out;
    const Index interval;  // of states on the way

    __device__ void run(typename S::State& state) const {
        const bool is_padding = my.sequence.state < 0;
        StepValues<S, 1, false> values(my, my.call.v);
        my.template for_each_step<false>(values, [&](Index first, int tokens) {
            for (int i = 0; i < tokens; ++i) {
                if (out.states && my.begins_token(first + i)) store_state(my.token(first + i), state);
                step(first + i, i, is_padding, state);
            }
        });
    }

  private:
    __device__ void store_state(Index t, typename S::State& state) const {
        if (t % interval != 0) return;
        const View& to = out.states;
        const Index which = my.sequence.first_saved + t / interval;
        my.store_state(to, my.sequence.batch * to.stride[0] + which * to.stride[1] + my.hv * to.stride[2],
                       my.call.state_row + 1, my.call.state_column + 1, state);
    }
    __device__ void step(Index t, int i, bool is_padding, typename S::State& state) const {
        double e[S::C], seen[S::C], written[S::C];
        my.columns_of(my.memory.values[0][i], e);
        if (!my.before_decay) my.scale_rows(my.memory.decay[i], state);
        if (my.erases) {
            my.multiply(my.erase_key(i), state, seen);
            unrolled<S::C>([&](int c) { e[c] -= seen[c]; });
        }
        if (my.before_decay) my.scale_rows(my.memory.decay[i], state);
        unrolled<S::C>([&](int c) { written[c] = my.memory.beta[i] * e[c]; });
        my.add_product(my.memory.k[i], written, state);
        if (out.erased) {
            double* to = out.erased + my.rows.token(t) * my.call.value_size;
            my.share_columns(e, [&](int j, double x) { to[j] = x; });
        }
        if (!out.o || !my.ends_token(t)) return;
        double o[S::C];
        my.multiply(my.memory.q[i], state, o);
        const Index row = my.sequence.row(out.o, my.token(t), my.hv);
        my.share_columns(o, [&](int j, double x) {
            store(out.o, row + j * out.o.stride[3], is_padding ? 0.0F : static_cast<float>(x));
        });
    }
};

// A block has a slab of columns of a value head of a sequence.
template <class S>
Grid walk_grid(const DeltaCall& call, const DeltaSequences& sequences, int shared_bytes) {
    return {{blocks_of(call.value_size, S::slab), call.heads, sequences.count}, S::threads, shared_bytes};
}
template <class S>
__device__ Walk<S> walk_of_block(const DeltaCall& call, const DeltaSequences& sequences, const GradientMemory& memory) {
    const int n = static_cast<int>(blockIdx.z), hv = static_cast<int>(blockIdx.y);
    const DeltaSequence s = sequences[n];
    return {call, s, hv, static_cast<int>(blockIdx.x),
            memory.rows_of(call, s, sequences.first + n, sequences.packed, hv)};
}

// [keys] is what a state's rows are filled up to.
template <class Launch>
void with_walk_shape(const DeltaCall& call, const Launch& launch) {
    if (call.steps > 1 && call.key_size <= 128)
        launch(WalkShape<128, 8, true>());
    else if (call.steps > 1)
        launch(WalkShape<256, 8, true>());
    else if (call.key_size <= 64)
        launch(WalkShape<64>());
    else if (call.key_size <= 128)
        launch(WalkShape<128>());
    else
        launch(WalkShape<256>());
}

}  // namespace softdelta::cuda
