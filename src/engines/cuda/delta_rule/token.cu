// The recurrence of a head, one warp for some columns of its state:
//
//     lane = row groups·(column group) + row group
//     a lane holds rows [R·row group, R·row group + R) × columns [C·column group, C·column group + C)
//
// Sums over rows are R multiply-adds in a lane and three or four shuffles among the row groups. Warps share nothing, so
// no barrier is needed, and every sum has one order.
#include "engines/cuda/delta_rule/token.h"

#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/grid.h"

namespace softdelta::cuda {

namespace {

constexpr int C = 4;  // columns of a lane
constexpr int block_warps = 4;

struct TokenOutputs {
    View o, final_state, states;
};

template <int groups, class Number>
__device__ Number sum_over_row_groups(Number x) {
#pragma unroll
    for (int lanes = 1; lanes < groups; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

// x ← x/√(Σx² + 1e-6)
template <int groups, int R>
__device__ void normalize(float (&x)[R]) {
    float sum = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) sum = fmaf(x[r], x[r], sum);
    const float factor = 1 / sqrtf(sum_over_row_groups<groups>(sum) + 1e-6F);
#pragma unroll
    for (int r = 0; r < R; ++r) x[r] *= factor;
}

// A lane's part of a state: R rows, C columns; `groups` lanes share the rows of a column.
template <int R, int groups>
struct State {
    float x[R][C];
    int first_row, first_column, rows, columns;  // of the whole state: K, V

    // Of a tensor whose rows and columns lie so far apart; four columns at a time where they are neighbours in f32.
    __device__ void load_from(const View& v, Index offset, Index row, Index column) {
        if (is_dense(v, offset, row, column)) {
            const float* data = static_cast<const float*>(v.data) + offset + first_column;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const float4 four = first_row + r < rows
                                        ? __ldcs(reinterpret_cast<const float4*>(data + (first_row + r) * row))
                                        : float4{0, 0, 0, 0};
                x[r][0] = four.x, x[r][1] = four.y, x[r][2] = four.z, x[r][3] = four.w;
            }
            return;
        }
        with_type(v, [&](const auto* data) {
            visit([&](int r, int c, float& element, bool inside) {
                element = inside ? to_float(data[offset + r * row + c * column]) : 0.0F;
            });
        });
    }
    __device__ void store_to(const View& v, Index offset, Index row, Index column) {
        if (is_dense(v, offset, row, column)) {
            float* data = static_cast<float*>(v.data) + offset + first_column;
#pragma unroll
            for (int r = 0; r < R; ++r)
                if (first_row + r < rows)
                    __stcs(reinterpret_cast<float4*>(data + (first_row + r) * row),
                           float4{x[r][0], x[r][1], x[r][2], x[r][3]});
            return;
        }
        with_type(v, [&](auto* data) {
            visit([&](int r, int c, float element, bool inside) {
                if (inside) assign(data + offset + r * row + c * column, element);
            });
        });
    }

    // Σ_rows row·x for each column of the lane.
    __device__ void multiply(const float (&row)[R], float (&out)[C]) const {
#pragma unroll
        for (int c = 0; c < C; ++c) {
            float sum = 0;
#pragma unroll
            for (int r = 0; r < R; ++r) sum = fmaf(row[r], x[r][c], sum);
            out[c] = sum_over_row_groups<groups>(sum);
        }
    }
    __device__ void add_product(const float (&row)[R], const float (&column)[C]) {
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < C; ++c) x[r][c] = fmaf(row[r], column[c], x[r][c]);
    }

    // x ← factor∘x; n: 1 for all rows, or R
    template <int n>
    __device__ void scale(const float (&factor)[n]) {
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < C; ++c) x[r][c] *= factor[n == 1 ? 0 : r];
    }

  private:
    static_assert(C == 4);
    __device__ bool is_dense(const View& v, Index offset, Index row, Index column) const {
        return v.dtype == DType::f32 && column == 1 && row % 4 == 0 && first_column + C <= columns &&
               reinterpret_cast<std::uintptr_t>(static_cast<float*>(v.data) + offset + first_column) % 16 == 0;
    }
    template <class Element>
    __device__ void visit(Element&& element) {
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < C; ++c)
                element(first_row + r, first_column + c, x[r][c], first_row + r < rows && first_column + c < columns);
    }
};

// A whole token in f64, for gates that rise: what is erased may be beyond f32 where the state after it is not. It works
// on a copy of the lane's numbers, not inlined: the ordinary way keeps its registers.
template <int R>
struct ExactToken {
    float x[R][C];  // the state, before and after
    double g[R];
    float q[R], k[R], p[R], v[C];
    float read[C];  // Sᵀq after the token
    double beta;
    bool erases, before_decay;
};

template <int R, int groups>
__device__ __attribute__((noinline)) void take_exactly(ExactToken<R>& t) {
#pragma unroll 1
    for (int r = 0; r < R; ++r) t.g[r] = exp(t.g[r] > 700 ? 700.0 : t.g[r]);  // 0·e^g is 0, however large g
#pragma unroll 1
    for (int c = 0; c < C; ++c) {
        double seen = 0, read = 0;
#pragma unroll 1
        for (int r = 0; r < R; ++r)
            seen = fma(static_cast<double>(t.p[r]), (t.before_decay ? 1.0 : t.g[r]) * static_cast<double>(t.x[r][c]),
                       seen);
        seen = t.erases ? sum_over_row_groups<groups>(seen) : 0.0;
        const double written = t.beta * (static_cast<double>(t.v[c]) - seen);
#pragma unroll 1
        for (int r = 0; r < R; ++r) {
            const double y = fma(static_cast<double>(t.k[r]), written, t.g[r] * static_cast<double>(t.x[r][c]));
            read = fma(static_cast<double>(t.q[r]), y, read);
            t.x[r][c] = static_cast<float>(y);
        }
        t.read[c] = static_cast<float>(sum_over_row_groups<groups>(read));
    }
}

template <int R, int row_groups, bool channel_gate>
__global__ void __launch_bounds__(32 * block_warps, 4)
    token_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                 const __grid_constant__ TokenOutputs out) {
    constexpr int warp_columns = 32 / row_groups * C;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int tile = static_cast<int>(blockIdx.x) * block_warps + static_cast<int>(threadIdx.x) / 32;
    const int tiles = (call.value_size + warp_columns - 1) / warp_columns;
    if (tile >= tiles * call.heads) return;
    const int hv = tile / tiles, h = call.key_head(hv);
    const int row = lane % row_groups * R, column = tile % tiles * warp_columns + lane / row_groups * C;
    const DeltaSequence s = sequences[static_cast<int>(blockIdx.y)];
    const bool is_padding = s.state < 0;

    const auto offset = [&](const View& v, Index t, int head) {
        return s.batch * v.stride[0] + (s.begin + t) * v.stride[1] + head * v.stride[2];
    };
    const auto load_key = [&](const View& v, Index t, float(&x)[R]) {
        load_row(v, offset(v, t, h), v.stride[3], row, call.key_size, x);
        if (call.l2norm) normalize<row_groups>(x);
    };

    State<R, row_groups> state{{}, row, column, call.key_size, call.value_size};
    if (const View& v = call.initial_state; v && !is_padding)
        state.load_from(v, s.state * v.stride[0] + hv * v.stride[1], v.stride[call.state_row],
                        v.stride[call.state_column]);

    const HeadGate head(call, hv);
    const bool erases = call.erase != core::Erase::nothing;
    const bool before_decay = call.erase == core::Erase::from_previous_state;
    for (Index t = 0; t < s.count; ++t) {
        if (out.states && t % sequences.interval == 0) {
            const View& v = out.states;
            const Index which = s.first_saved + t / sequences.interval;
            state.store_to(v, s.batch * v.stride[0] + which * v.stride[1] + hv * v.stride[2],
                           v.stride[call.state_row + 1], v.stride[call.state_column + 1]);
        }
        float q[R], k[R], p[R];
        load_key(call.q, t, q);
        load_key(call.k, t, k);
        if (call.own_p) {
            load_key(call.p, t, p);
        } else {
#pragma unroll
            for (int r = 0; r < R; ++r) p[r] = k[r];
        }

        float v[C], read[C];
        load_row(call.v, offset(call.v, t, hv), call.v.stride[3], column, call.value_size, v);
        const float beta = erases ? make_beta(call, s.batch, s.begin + t, hv) : 1.0F;
        const auto take = [&](const auto& factor) {
            float erased[C] = {}, write[C];
            if (before_decay) state.multiply(p, erased);
            if (call.gate != core::Gate::none) state.scale(factor);
            if (erases && !before_decay) state.multiply(p, erased);
#pragma unroll
            for (int c = 0; c < C; ++c) write[c] = beta * (v[c] - erased[c]);
            state.add_product(k, write);
            if (out.o) state.multiply(q, read);
        };
        const auto take_rising = [&](const auto& gate) {
            ExactToken<R> token;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                token.g[r] = gate(r);
                token.q[r] = q[r], token.k[r] = k[r], token.p[r] = p[r];
            }
            token.beta = static_cast<double>(beta);
            token.erases = erases;
            token.before_decay = before_decay;
#pragma unroll
            for (int c = 0; c < C; ++c) {
                token.v[c] = v[c];
#pragma unroll
                for (int r = 0; r < R; ++r) token.x[r][c] = state.x[r][c];
            }
            take_exactly<R, row_groups>(token);
#pragma unroll
            for (int c = 0; c < C; ++c) {
                read[c] = token.read[c];
#pragma unroll
                for (int r = 0; r < R; ++r) state.x[r][c] = token.x[r][c];
            }
        };
        if constexpr (channel_gate) {
            float g[R], factor[R], highest = 0;
            make_gates(call, head, s.batch, s.begin + t, hv, row, call.key_size, g);
#pragma unroll
            for (int r = 0; r < R; ++r) highest = fmaxf(highest, g[r]);
            if (__any_sync(0xffffffffu, highest > 0)) {
                take_rising([&](int r) { return static_cast<double>(g[r]); });
            } else {
#pragma unroll
                for (int r = 0; r < R; ++r) factor[r] = expf(g[r]);
                take(factor);
            }
        } else {
            const double g[1] = {call.gate == core::Gate::none
                                     ? 0.0
                                     : head.gate(call, call.g ? load(call.g, offset(call.g, t, hv)) : 0.0F)};
            const float factor[1] = {static_cast<float>(exp(g[0]))};
            if (g[0] > 0)
                take_rising([&](int) { return g[0]; });
            else
                take(factor);
        }
        if (!out.o) continue;
        if (lane % row_groups != 0) continue;
        with_type(out.o, [&](auto* data) {
#pragma unroll
            for (int c = 0; c < C; ++c)
                if (column + c < call.value_size)
                    assign(data + offset(out.o, t, hv) + (column + c) * out.o.stride[3],
                           is_padding ? 0.0F : call.scale * read[c]);
        });
    }
    if (const View& v = out.final_state; v && !is_padding)
        state.store_to(v, s.state * v.stride[0] + hv * v.stride[1], v.stride[call.state_row],
                       v.stride[call.state_column]);
}

template <int R, int row_groups>
void launch_tokens(const DeltaCall& call, const DeltaSequences& sequences, const TokenOutputs& out,
                   cudaStream_t stream) {
    constexpr int warp_columns = 32 / row_groups * C;
    const int tiles = call.heads * ((call.value_size + warp_columns - 1) / warp_columns);
    const dim3 grid(static_cast<unsigned>((tiles + block_warps - 1) / block_warps),
                    static_cast<unsigned>(sequences.count));
    const auto kernel =
        call.gate == core::Gate::channel ? token_kernel<R, row_groups, true> : token_kernel<R, row_groups, false>;
    launch(kernel, {grid, 32 * block_warps}, stream, "the delta rules' token kernel", call, sequences, out);
}

}  // namespace

bool takes_few_tokens(const core::DeltaInputs& in) {
    for (const core::Tensor* t : {&in.q, &in.k, &in.v})
        if (t->dtype == core::DType::f32) return false;  // f32 sums do not keep what f32 operands have
    constexpr Index most = 8;  // f32 states that are rounded more often lose digits that a chunk keeps
    const Index sequences = core::sequence_count(in);
    if (!in.cu_seqlens || !in.cu_seqlens.device.is_cpu())
        return in.q.shape[1] <= most * (in.cu_seqlens ? sequences : 1);
    for (Index n = 0; n < sequences; ++n)
        if (core::load_index(in.cu_seqlens, (n + 1) * in.cu_seqlens.stride[0]) -
                core::load_index(in.cu_seqlens, n * in.cu_seqlens.stride[0]) >
            most)
            return false;
    return true;
}

void token_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out) {
    const OnDevice device(in.q.device);
    const DeltaCall call = delta_call(in, options);
    const TokenOutputs outputs{view_of(out.o), view_of(out.final_state), view_of(out.states)};
    for_each_sequences(in, options, out.final_state, [&](const DeltaSequences& some) {
        const auto run = call.key_size <= 64    ? launch_tokens<8, 8>
                         : call.key_size <= 128 ? launch_tokens<8, 16>
                                                : launch_tokens<8, 32>;
        run(call, some, outputs, stream_of(execution));
    });
}

}  // namespace softdelta::cuda
