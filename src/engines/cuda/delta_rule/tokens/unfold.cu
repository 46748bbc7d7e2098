// From gradients of what the walks folded to gradients of the operands: sums over slabs of columns, the value heads of
// a group and tokens, each in one order; the adjoints of the l2 norm, of β and of gates.
#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/delta_rule/tokens/gradients.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/lanes.h"
#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

namespace {

constexpr int threads = 128;
constexpr int most_parts = 8;  // elements of a row of keys for each lane

// The warp's number among all, and how many there are.
__device__ Index own_warp() {
    return Index(blockIdx.x) * (threads / 32) + threadIdx.x / 32;
}
__device__ Index offset_of(const View& v, Index tokens, Index row, Index head) {
    return row / tokens * v.stride[0] + row % tokens * v.stride[1] + head * v.stride[2];
}

// dq, dk and dp of a row and key head, one of them by a warp.
__global__ void __launch_bounds__(threads)
    unfold_keys_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ GradientViews grad,
                       const __grid_constant__ GradientMemory memory) {
    const int lane = static_cast<int>(threadIdx.x) % 32, key_heads = call.key_heads();
    const Index unit = own_warp(), row = unit / (3 * key_heads);
    const int kind = static_cast<int>(unit % 3), head = static_cast<int>(unit / 3 % key_heads);
    if (row >= memory.rows) return;
    const View& to = kind == 0 ? grad.dq : kind == 1 ? grad.dk : grad.dp;
    if (!to) return;
    const bool erases = call.erase != core::Erase::nothing;
    double d[most_parts] = {};
    const auto add = [&](const float* parts) {
        for (int slab = 0; slab < memory.slabs; ++slab)
            for (int i = 0; i < call.group; ++i) {
                const float* from =
                    parts + ((slab * memory.rows + row) * call.heads + call.value_head(head, i)) * call.key_size;
                unrolled<most_parts>([&](int n) {
                    if (lane + 32 * n < call.key_size) d[n] += static_cast<double>(from[lane + 32 * n]);
                });
            }
    };
    if (kind < 2) add(kind == 0 ? memory.dq : memory.dk);
    if (erases && kind == (call.own_p ? 2 : 1)) add(memory.dp);

    const double factor = kind == 0 ? static_cast<double>(call.scale) : 1.0;
    unrolled<most_parts>([&](int n) { d[n] *= factor; });
    if (call.l2norm) {  // y = x r: dx = r (dy − y Σ dy∘y)
        const View& from = kind == 0 ? call.q : kind == 1 ? call.k : call.p;
        const Index at = offset_of(from, call.tokens, row, head);
        double y[most_parts], squares = 0, along = 0;
        unrolled<most_parts>([&](int n) {
            const int m = lane + 32 * n;
            y[n] = m < call.key_size ? static_cast<double>(load(from, at + m * from.stride[3])) : 0.0;
            squares += y[n] * y[n];
        });
        const double r = 1 / sqrt(sum_of_warp(squares) + 1e-6);
        unrolled<most_parts>([&](int n) { along += d[n] * (y[n] *= r); });
        along = sum_of_warp(along);
        unrolled<most_parts>([&](int n) { d[n] = r * (d[n] - y[n] * along); });
    }
    const Index at = offset_of(to, call.tokens, row, head);
    unrolled<most_parts>([&](int n) {
        if (lane + 32 * n < call.key_size) store(to, at + (lane + 32 * n) * to.stride[3], static_cast<float>(d[n]));
    });
}

// dv and dβ of a row and value head by a warp.
__global__ void __launch_bounds__(threads)
    unfold_values_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ GradientViews grad,
                         const __grid_constant__ GradientMemory memory) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Index unit = own_warp(), row = unit / call.heads;
    const int hv = static_cast<int>(unit % call.heads);
    if (row >= memory.rows) return;
    const float given = call.beta ? load(call.beta, offset_of(call.beta, call.tokens, row, hv)) : 1.0F;
    const double beta = call.beta ? exact_beta(call, given) : 1.0;
    double dbeta = 0;
    for (int j = lane; j < call.value_size; j += 32) {
        const double dw = memory.dwritten[unit * call.value_size + j];
        dbeta = fma(dw, memory.erased[unit * call.value_size + j], dbeta);
        if (const View& v = grad.dv)
            store(v, offset_of(v, call.tokens, row, hv) + j * v.stride[3], static_cast<float>(beta * dw));
    }
    if (!grad.dbeta) return;
    dbeta = sum_of_warp(dbeta);
    if (lane == 0)
        store(grad.dbeta, offset_of(grad.dbeta, call.tokens, row, hv),
              static_cast<float>(beta_adjoint(call, given, dbeta)));
}

// dg of a chunk's tokens, channel by channel: from its end backwards,
//     dg_t = rowsum(S∘dS)_end + Σ_{s ≥ t} (q∘dq − k∘dk + p∘dp)_s
// erasing from the previous state: without p∘dp of token t itself.
__global__ void __launch_bounds__(threads)
    unfold_token_gates_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                              const __grid_constant__ GradientViews grad, const __grid_constant__ GradientMemory memory,
                              int blocks) {
    const int u = static_cast<int>(blockIdx.x) % blocks * threads + static_cast<int>(threadIdx.x);
    const Index c = static_cast<Index>(blockIdx.x) / blocks;
    const int hv = u / memory.channels, channel = u % memory.channels;
    const int n = static_cast<int>(blockIdx.z);
    const DeltaSequence s = sequences[n];
    const Index first = c * GradientMemory::chunk;
    if (hv >= call.heads || first >= s.count) return;
    const Index slot = memory.slot(s, sequences.first + n, c, sequences.packed);
    const Index slab_terms = memory.rows * call.heads * memory.channels;
    const bool erases = call.erase != core::Erase::nothing;
    const HeadGate head(call, hv);
    double dt = head.bias;
    if (call.dt_bias && call.gate == core::Gate::channel)
        dt = static_cast<double>(load(call.dt_bias, (Index(hv) * memory.channels + channel) * call.dt_bias.stride[0]));

    GateSweep of{0};
    for (int slab = 0; slab < memory.slabs; ++slab)
        of.dg += memory.ends[((slab * memory.slots + slot) * call.heads + hv) * memory.channels + channel];
    const int count = static_cast<int>(min(s.count - first, Index(GradientMemory::chunk)));
    for (int i = count; i-- > 0;) {
        const Index t = s.begin + first + i;
        const Index at = ((s.batch * call.tokens + t) * call.heads + hv) * memory.channels + channel;
        double written = 0, erased = 0;
        for (int slab = 0; slab < memory.slabs; ++slab) {
            written += memory.written[slab * slab_terms + at];
            if (erases) erased += memory.erase[slab * slab_terms + at];
        }
        const auto place = [&](const View& v) {
            return s.batch * v.stride[0] + t * v.stride[1] + hv * v.stride[2] +
                   (call.gate == core::Gate::channel ? channel * v.stride[3] : 0);
        };
        const double dx = of.take(call, head, call.g ? load(call.g, place(call.g)) : 0.0F, dt, written, erased);
        if (call.g && grad.dg) store(grad.dg, place(grad.dg), static_cast<float>(dx));
    }
    const Index share = (slot * call.heads + hv) * memory.channels + channel;
    memory.shares[share] = of.sum;
    memory.shares[memory.slots * call.heads * memory.channels + share] = of.dA_log;
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
        if (which == 0 && grad.ddt_bias)
            store(grad.ddt_bias, (Index(hv) * memory.channels + channel) * grad.ddt_bias.stride[0],
                  static_cast<float>(sum));
    }
    __syncthreads();
    if (thread > 1) return;
    const View& to = thread == 0 ? grad.dg_gamma : grad.dA_log;
    sum = 0;
    for (int m = 0; m < memory.channels; ++m) sum += sums[thread * memory.channels + m];
    if (to) store(to, hv * to.stride[0], static_cast<float>(sum));
}

unsigned blocks_of(Index warps) {
    return static_cast<unsigned>((warps + threads / 32 - 1) / (threads / 32));
}

}  // namespace

void launch_unfold_tokens(const DeltaCall& call, Index rows, const GradientViews& grad, const GradientMemory& memory,
                          cudaStream_t stream) {
    if (grad.dq || grad.dk || grad.dp)
        launch(unfold_keys_kernel, {dim3(blocks_of(rows * call.key_heads() * 3)), threads}, stream, "gradients of keys",
               call, grad, memory);
    if (grad.dv || grad.dbeta)
        launch(unfold_values_kernel, {dim3(blocks_of(rows * call.heads)), threads}, stream, "gradients of values", call,
               grad, memory);
}

void launch_unfold_token_gates(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                               const GradientMemory& memory, cudaStream_t stream) {
    const int blocks = (call.heads * memory.channels + threads - 1) / threads;
    const Index chunks = (call.tokens + GradientMemory::chunk - 1) / GradientMemory::chunk;
    launch(unfold_token_gates_kernel,
           {dim3(static_cast<unsigned>(blocks * chunks), 1, static_cast<unsigned>(sequences.count)), threads}, stream,
           "gradients of gates", call, sequences, grad, memory, blocks);
}

void launch_sum_shares(const DeltaCall& call, const GradientViews& grad, const GradientMemory& memory,
                       cudaStream_t stream) {
    launch(sum_shares_kernel,
           {dim3(static_cast<unsigned>(call.heads)), sum_threads, sum_threads * static_cast<int>(sizeof(double))},
           stream, "gradients of a gate's parameters", call, grad, memory);
}

}  // namespace softdelta::cuda
