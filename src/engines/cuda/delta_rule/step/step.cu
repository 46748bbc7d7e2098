// The recurrence of a head, one block for 64 columns of its state, which stays in f32 registers:
//
//     lane = 16·(row group) + column group
//     a lane of warp w holds rows [16·w + 8·row group, + 8) × columns [4·column group, + 4)
//
// A warp reads two rows of 256 bytes at once, and a block's whole part of a state is on its way before the first
// number is used: states are most of what moves. What a token brings lies in shared memory. A sum over rows is 8
// multiply-adds in a lane, a shuffle, and a sum over the warps in their order, so that every sum has one order.
#include <algorithm>
#include <type_traits>

#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/delta_rule/passes.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/lanes.h"
#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

namespace {

constexpr int R = 8, C = 4;  // rows and columns of a lane
constexpr int slab = 64;     // columns of a block

struct TokenOutputs {
    View o, final_state, states;
};

// A folded token, and sums of the warps: those that erasing needs, and what q reads.
template <int warps>
struct TokenMemory {
    static constexpr int K = 16 * warps;
    float q[K], k[K], p[K], decay[K];
    double g[K];
    float sums[2][warps][slab];
    double exact_sums[2][warps][slab];
    float beta;
    int rises;  // a gate is positive
};

// A lane's part of a state.
struct LaneTile {
    float x[R][C];
    int first_row, first_column, rows, columns;  // of the whole state: K, V

    // Of a tensor whose rows and columns lie so far apart; four at a time where neighbours lie side by side in f32.
    __device__ void load_from(const View& v, Index offset, Index row, Index column) {
        const bool done =
            by_fours(v, offset, row, column, [](const float4* at, bool inside, float& a, float& b, float& c, float& d) {
                const float4 four = inside ? __ldcs(at) : float4{0, 0, 0, 0};
                a = four.x, b = four.y, c = four.z, d = four.w;
            });
        if (done) return;
        with_type(v, [&](const auto* from) {
            visit([&](int r, int c, float& element, bool inside) {
                element = inside ? to_float(from[offset + (first_row + r) * row + (first_column + c) * column]) : 0.0F;
            });
        });
    }
    __device__ void store_to(const View& v, Index offset, Index row, Index column) {
        const bool done =
            by_fours(v, offset, row, column, [](float4* at, bool inside, float a, float b, float c, float d) {
                if (inside) __stcs(at, float4{a, b, c, d});
            });
        if (done) return;
        with_type(v, [&](auto* to) {
            visit([&](int r, int c, float element, bool inside) {
                if (inside) assign(to + offset + (first_row + r) * row + (first_column + c) * column, element);
            });
        });
    }

    // element(r, c, x, whether it exists)
    template <class Element>
    __device__ void visit(Element&& element) {
        unrolled<R, C>(
            [&](int r, int c) { element(r, c, x[r][c], first_row + r < rows && first_column + c < columns); });
    }

  private:
    // use(four neighbours in memory, whether they exist, the lane's), if there are such.
    template <class Use>
    __device__ bool by_fours(const View& v, Index offset, Index row, Index column, const Use& use) {
        float* data = static_cast<float*>(v.data) + offset + first_row * row + first_column * column;
        if (v.dtype != DType::f32 || reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return false;
        const auto four = [&](Index at) { return reinterpret_cast<float4*>(data + at); };
        if (column == 1 && row % 4 == 0 && first_column + C <= columns) {
            unrolled<R>([&](int r) { use(four(r * row), first_row + r < rows, x[r][0], x[r][1], x[r][2], x[r][3]); });
            return true;
        }
        if (row != 1 || column % 4 != 0 || first_row + R > rows) return false;
        unrolled<C, R / 4>([&](int c, int i) {
            const int r = 4 * i;
            use(four(c * column + r), first_column + c < columns, x[r][c], x[r + 1][c], x[r + 2][c], x[r + 3][c]);
        });
        return true;
    }
};

// How a lane takes a folded token: in f32, or in f64 where gates rise, since what is erased may be beyond f32 where the
// state after it is not. Sums over rows go through the warps' places, and what q reads stays there.
template <class Number, int warps>
struct Take {
    TokenMemory<warps>& memory;
    int first_row;
    bool erases, before_decay;

    __device__ void run(const float (&v)[C], float (&x)[R][C]) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        Number seen[C] = {}, read[C] = {};
        if (erases) {
            unrolled<R>([&](int r) {
                const Number p = static_cast<Number>(memory.p[first_row + r]) * (before_decay ? Number(1) : decay(r));
                unrolled<C>([&](int c) { seen[c] = fma(p, static_cast<Number>(x[r][c]), seen[c]); });
            });
            put_sums(0, lane, seen);
            __syncthreads();
            unrolled<C>([&](int c) { seen[c] = 0; });
            unrolled<warps, C>([&](int w, int c) { seen[c] += sums(0)[w][C * (lane % 16) + c]; });
        }
        const auto beta = static_cast<Number>(memory.beta);
        unrolled<C>([&](int c) { seen[c] = beta * (static_cast<Number>(v[c]) - seen[c]); });
        unrolled<R>([&](int r) {
            const auto q = static_cast<Number>(memory.q[first_row + r]),
                       k = static_cast<Number>(memory.k[first_row + r]);
            const Number factor = decay(r);
            unrolled<C>([&](int c) {
                const Number y = fma(k, seen[c], factor * static_cast<Number>(x[r][c]));
                read[c] = fma(q, y, read[c]);
                x[r][c] = static_cast<float>(y);
            });
        });
        put_sums(1, lane, read);
    }

  private:
    static constexpr bool exact = std::is_same_v<Number, double>;

    __device__ Number decay(int r) const {
        if constexpr (exact)
            return exp(fmin(memory.g[first_row + r], 700.0));  // 0·e^g is 0, however large g
        else
            return memory.decay[first_row + r];
    }
    __device__ auto& sums(int which) const {
        if constexpr (exact)
            return memory.exact_sums[which];
        else
            return memory.sums[which];
    }
    __device__ void put_sums(int which, int lane, const Number (&x)[C]) const {
        unrolled<C>([&](int c) {
            const Number sum = x[c] + __shfl_xor_sync(0xffffffffu, x[c], 16);
            if (lane < 16) sums(which)[threadIdx.x / 32][C * lane + c] = sum;
        });
    }
};

// On copies, not inlined: the ordinary way keeps its registers.
struct LaneCopy {
    float v[C], x[R][C];
};
template <int warps>
__device__ __attribute__((noinline)) void take_exactly(TokenMemory<warps>* memory, int first_row, bool erases,
                                                       bool before_decay, LaneCopy* lane) {
    Take<double, warps>{*memory, first_row, erases, before_decay}.run(lane->v, lane->x);
}

template <int warps>
class Tokens {
    using Memory = TokenMemory<warps>;

  public:
    __device__ Tokens(const DeltaCall& call, const DeltaSequence& s, int hv, int first_column)
        : call_(call),
          s_(s),
          head_(call, hv),
          hv_(hv),
          state{{}, 16 * warp_ + 8 * (lane_ / 16), first_column + 4 * (lane_ % 16), call.key_size, call.value_size} {}

    __device__ Index offset(const View& v, Index t, int head) const { return s_.row(v, t, head); }

    // Four warps bring a token: q, k, p, and gates with β.
    __device__ void fold(Index t) const {
        const int h = call_.key_head(hv_);
        if (warp_ == 0) fold_row(call_.q, offset(call_.q, t, h), memory.q);
        if (warp_ == 1) fold_row(call_.k, offset(call_.k, t, h), memory.k);
        if (warp_ == 2) {
            const View& p = call_.own_p ? call_.p : call_.k;
            fold_row(p, offset(p, t, h), memory.p);
        }
        if (warp_ == 3) fold_gates(t);
    }

    // After take() and a barrier: what q reads of a column of the block.
    __device__ float read(int column) const {
        float sum = 0;
        double exact = 0;
        unrolled<warps>([&](int w) {
            sum += memory.sums[1][w][column];
            if (memory.rises != 0) exact += memory.exact_sums[1][w][column];
        });
        return memory.rises != 0 ? static_cast<float>(exact) : sum;
    }

    Memory& memory = *reinterpret_cast<Memory*>(ptx::shared_memory());

  private:
    static constexpr int parts = Memory::K / 32;  // of a row for each lane

    __device__ void fold_row(const View& v, Index row, float (&to)[Memory::K]) const {
        float x[parts], sum = 0;
        load_row(v, row, v.stride[3], parts * lane_, call_.key_size, x);
        if (call_.l2norm) {  // x/√(Σx² + 1e-6)
            unrolled<parts>([&](int i) { sum = fmaf(x[i], x[i], sum); });
            sum = sum_of_warp(sum) + 1e-6F;
            if (isinf(sum)) [[unlikely]] {  // squares that f32 does not hold, beside which 1e-6 is nothing
                sum = 0;
                unrolled<parts>([&](int i) {
                    x[i] *= 0x1p-100F;
                    sum = fmaf(x[i], x[i], sum);
                });
                sum = sum_of_warp(sum);
            }
            const float factor = 1 / sqrtf(sum);
            unrolled<parts>([&](int i) { x[i] *= factor; });
        }
        unrolled<parts>([&](int i) { to[parts * lane_ + i] = x[i]; });
    }
    __device__ void fold_gates(Index t) const {
        bool rises = false;
        if (call_.gate == core::Gate::channel) {
            float g[parts];
            make_gates(call_, head_, s_.batch, s_.begin + t, hv_, parts * lane_, call_.key_size, g);
            rises = any_of<parts>([&](int i) { return g[i] > 0; });
            unrolled<parts>([&](int i) {
                memory.g[parts * lane_ + i] = static_cast<double>(g[i]);
                memory.decay[parts * lane_ + i] = expf(g[i]);
            });
        } else {
            const double g = call_.gate == core::Gate::none
                                 ? 0.0
                                 : head_.gate(call_, call_.g ? load(call_.g, offset(call_.g, t, hv_)) : 0.0F);
            const auto decay = static_cast<float>(exp(g));
            rises = g > 0;
            unrolled<parts>([&](int i) {
                memory.g[parts * lane_ + i] = g;
                memory.decay[parts * lane_ + i] = decay;
            });
        }
        rises = __any_sync(0xffffffffu, rises);
        if (lane_ != 0) return;
        memory.rises = rises ? 1 : 0;
        memory.beta = call_.erase == core::Erase::nothing ? 1.0F : make_beta(call_, s_.batch, s_.begin + t, hv_);
    }

    const DeltaCall& call_;
    const DeltaSequence& s_;
    const HeadGate head_;
    const int hv_, warp_ = static_cast<int>(threadIdx.x) / 32, lane_ = static_cast<int>(threadIdx.x) % 32;

  public:
    LaneTile state;
};

template <int warps>
__device__ void take_sequence(const DeltaCall& call, const DeltaSequences& sequences, const TokenOutputs& out,
                              const DeltaSequence& s) {
    const int tiles = (call.value_size + slab - 1) / slab;
    const int hv = static_cast<int>(blockIdx.x) / tiles, first_column = static_cast<int>(blockIdx.x) % tiles * slab;
    const bool is_padding = s.state < 0;
    Tokens<warps> tokens(call, s, hv, first_column);
    LaneTile& state = tokens.state;
    if (const View& v = call.initial_state; v && !is_padding)
        state.load_from(v, s.state * v.stride[0] + hv * v.stride[1], v.stride[call.state_row],
                        v.stride[call.state_column]);
    const bool erases = call.erase != core::Erase::nothing;
    const bool before_decay = call.erase == core::Erase::from_previous_state;
    for (Index t = 0; t < s.count; ++t) {
        tokens.fold(t);
        float v[C];
        load_row(call.v, tokens.offset(call.v, t, hv), call.v.stride[3], state.first_column, call.value_size, v);
        __syncthreads();
        if (out.states && t % sequences.interval == 0) {
            const View& to = out.states;
            const Index which = s.first_saved + t / sequences.interval;
            state.store_to(to, s.batch * to.stride[0] + which * to.stride[1] + hv * to.stride[2],
                           to.stride[call.state_row + 1], to.stride[call.state_column + 1]);
        }
        if (tokens.memory.rises != 0) {
            LaneCopy copy;
            unrolled<C>([&](int c) { copy.v[c] = v[c]; });
            state.visit([&](int r, int c, float x, bool) { copy.x[r][c] = x; });
            take_exactly<warps>(&tokens.memory, state.first_row, erases, before_decay, &copy);
            state.visit([&](int r, int c, float& x, bool) { x = copy.x[r][c]; });
        } else {
            Take<float, warps>{tokens.memory, state.first_row, erases, before_decay}.run(v, state.x);
        }
        __syncthreads();
        if (const int column = static_cast<int>(threadIdx.x);
            out.o && column < slab && first_column + column < call.value_size)
            store(out.o, tokens.offset(out.o, t, hv) + (first_column + column) * out.o.stride[3],
                  is_padding ? 0.0F : call.scale * tokens.read(column));
        if (t + 1 < s.count) __syncthreads();  // the next token takes this one's place
    }
    if (const View& v = out.final_state; v && !is_padding)
        state.store_to(v, s.state * v.stride[0] + hv * v.stride[1], v.stride[call.state_row],
                       v.stride[call.state_column]);
}

// A block has a sequence; where others take most of them, it looks for its own among 32 at a time.
template <int warps>
__global__ void __launch_bounds__(32 * warps, 24 / warps)
    step_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                const __grid_constant__ TokenOutputs out) {
    const int width = sequences.scattered ? 32 : 1, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int first = static_cast<int>(blockIdx.y) * width; first < sequences.count;
         first += static_cast<int>(gridDim.y) * width) {
        unsigned left = 1;
        if (sequences.scattered)
            left = __ballot_sync(0xffffffffu, first + lane < sequences.count && sequences.takes(first + lane));
#pragma unroll 1
        for (int i = first; left != 0; left >>= 1, ++i) {
            if ((left & 1) == 0) continue;
            take_sequence<warps>(call, sequences, out, sequences[i]);
            if (sequences.scattered) __syncthreads();  // the next takes this one's memory
        }
    }
}

template <int warps>
void launch_tokens(const DeltaCall& call, const DeltaSequences& sequences, const TokenOutputs& out,
                   cudaStream_t stream) {
    const int tiles = (call.value_size + slab - 1) / slab;
    const int blocks = call.heads * tiles,
              at_once = std::max(1, multiprocessors() * (24 / warps) / blocks);  // that the card has room for
    const Blocks grid(blocks, sequences.scattered ? std::min(sequences.count, at_once) : sequences.count);
    launch(step_kernel<warps>, {grid, 32 * warps, static_cast<int>(sizeof(TokenMemory<warps>))}, stream,
           "the delta rules' token kernel", call, sequences, out);
}

// f32 sums do not keep what its operands have.
bool has_f32(const core::DeltaInputs& in) {
    return in.q.dtype == core::DType::f32 || in.k.dtype == core::DType::f32 || in.v.dtype == core::DType::f32;
}

}  // namespace

Index few_tokens(const core::DeltaInputs& in) {
    if (has_f32(in)) return 40;
    return 8;  // f32 states that are rounded more often lose digits that a chunk keeps
}

void step_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                  const core::DeltaOutputs& out, const TokenRange& taken) {
    if (has_f32(in) || options.steps > 1) return tokens_forward(in, options, execution, out, taken);
    const OnDevice device(in.q.device);
    const DeltaCall call = delta_call(in, options);
    const TokenOutputs outputs{view_of(out.o), view_of(out.final_state), view_of(out.states)};
    for_each_sequences(in, options, out.final_state, taken, [&](const DeltaSequences& some) {
        const auto run = call.key_size <= 64    ? launch_tokens<4>
                         : call.key_size <= 128 ? launch_tokens<8>
                                                : launch_tokens<16>;
        run(call, some, outputs, stream_of(execution));
    });
}

}  // namespace softdelta::cuda
