// The causal convolution. A thread walks over the tokens of a tile, for one channel or four neighbours, and keeps the
// last W tokens in registers:
//
//     z_t = bias + Σ_{i<W} weight_i·x_{t−W+1+i},   y_t = act(z_t)
//     dz_t = dy_t·act'(z_t),   dx_s = Σ_{i<W} weight_i·dz_{s+W−1−i},   dweight_i = Σ_t dz_t·x_{t−W+1+i}
//
// A tile may hold parts of several sequences. Each tile has a sum for dweight and dbias; these are added in order
// (partial_sums.h). States are written when all tokens are done, since a state may be updated in place.
#include "engines/cuda/device/grid.h"
#include "engines/cuda/device/workspace.h"
#include "engines/cuda/layer/partial_sums.h"
#include "engines/cuda/layer/passes.h"
#include "engines/cuda/layer/window.h"

namespace softdelta::cuda {

namespace {

constexpr int threads = 128, most_width = static_cast<int>(most_convolution_width);
constexpr int forward_tile = 32, backward_tile = 64;  // tokens
constexpr int step = 4;                               // tokens whose loads are on their way together

// The thread's first channel.
template <int n>
__device__ Index first_channel() {
    return (static_cast<Index>(blockIdx.y) * threads + threadIdx.x) * n;
}

template <int W, class T, int n>
__global__ void __launch_bounds__(threads) forward_tokens(__grid_constant__ const ConvolutionCall c, View y) {
    const Index channel = first_channel<n>();
    if (channel >= c.channels) return;
    const Channels<W, T, n> channels(c, channel);
    for_each_sequence(c, forward_tile, [&](const Sequence& s, Index from, Index to) {
        if (s.state < 0) {  // padding: there is no sequence
            const float zeros[n] = {};
            for (Index t = from; t < to; ++t) store_neighbours<T>(y, channels.row(y, s, t), zeros);
            return;
        }
        float x[W - 1 + step][n];
        unrolled<W - 1>([&](int i) { channels.load_x(s, from - (W - 1) + i, x[i]); });
#pragma unroll 1
        for (Index t = from; t < to; t += step) {
            unrolled<step>([&](int i) {
                if (t + i < to) channels.load_token(s, t + i, x[W - 1 + i]);
            });
#pragma unroll
            for (int i = 0; i < step; ++i) {
                if (t + i >= to) break;
                float result[n];
                unrolled<n>([&](int k) { result[k] = activate(c.activation, channels.sum(x + i, k)); });
                store_neighbours<T>(y, channels.row(y, s, t + i), result);
            }
            unrolled<W - 1, n>([&](int i, int k) { x[i][k] = x[step + i][k]; });
        }
    });
}

// The last tokens of each sequence. In place an element is read before the earlier ones are written, never after.
__global__ void __launch_bounds__(threads)
    store_states(__grid_constant__ const ConvolutionCall c, View final_state, Index kept) {
    const Index channel = first_channel<1>();
    const Sequence s = c.sequences[static_cast<int>(blockIdx.x)];
    if (channel >= c.channels || s.state < 0) return;
    const Index out = s.state * final_state.stride[0] + channel * final_state.stride[1];
    for (Index j = 0; j < kept; ++j) {
        const Index t = s.count - kept + j;
        float x = 0;
        if (t >= 0)
            x = load(c.x, s.row(c.x, t, channel));
        else if (c.state && t + c.kept >= 0)
            x = load(c.state,
                     s.state * c.state.stride[0] + channel * c.state.stride[1] + (t + c.kept) * c.state.stride[2]);
        store(final_state, out + j * final_state.stride[2], x);
    }
}

struct ConvolutionGradients {
    View dy, dfinal_state, dx, dinitial_state;
    Index kept = 0;         // tokens of the states
    float* sums = nullptr;  // [tiles, width + 1, channels] for dweight, dbias
};

// dy of n channels at token t, 0 beyond the sequence.
template <int W, class T, int n>
__device__ void load_dy(const Channels<W, T, n>& channels, const ConvolutionGradients& g, const Sequence& s, Index t,
                        float (&out)[n]) {
    if (g.dy && t < s.count) return load_neighbours<T>(g.dy, channels.row(g.dy, s, t), out);
    unrolled<n>([&](int k) { out[k] = 0; });
}

// What position t gets from the gradient of the final state.
__device__ inline float from_final_state(const ConvolutionGradients& g, const Sequence& s, Index t, Index channel) {
    const Index j = t - (s.count - g.kept);
    if (!g.dfinal_state || j < 0) return 0;
    const View& v = g.dfinal_state;
    return load(v, s.state * v.stride[0] + channel * v.stride[1] + j * v.stride[2]);
}

template <int W, class T, int n>
__global__ void __launch_bounds__(threads)
    backward_tokens(__grid_constant__ const ConvolutionCall c, ConvolutionGradients g) {
    const Index channel = first_channel<n>();
    if (channel >= c.channels) return;
    const Channels<W, T, n> channels(c, channel);
    float dweight[W][n] = {}, dbias[n] = {};
    for_each_sequence(c, backward_tile, [&](const Sequence& s, Index from, Index to) {
        float x[W - 1 + step][n], dz[W - 1 + step][n] = {};
        unrolled<W - 1>([&](int i) { channels.load_x(s, from - (W - 1) + i, x[i]); });
        // dz_t reaches back to dx_{t − W + 1}: W − 1 tokens behind the tile belong to it, but for dweight.
#pragma unroll 1
        for (Index t = from; t < to + W - 1; t += step) {
            float dy[step][n];
            unrolled<step>([&](int i) {
                if (t + i < s.count) channels.load_token(s, t + i, x[W - 1 + i]);
                load_dy(channels, g, s, t + i, dy[i]);
            });
#pragma unroll
            for (int i = 0; i < step; ++i)
#pragma unroll
                for (int k = 0; k < n; ++k) {
                    const bool exists = g.dy && t + i < s.count;
                    const float d = exists ? dy[i][k] * Activated(c.activation, channels.sum(x + i, k)).slope : 0;
                    dz[W - 1 + i][k] = d;
                    if (!exists || t + i >= to) continue;
                    dbias[k] += d;
                    unrolled<W>([&](int j) {
                        if (j >= channels.unused) dweight[j][k] = fmaf(d, x[i + j][k], dweight[j][k]);
                    });
                }
#pragma unroll
            for (int i = 0; i < step; ++i) {
                const Index at = t + i - (W - 1);
                if (!g.dx || at < from || at >= to) continue;
                float dx[n];
                unrolled<n>([&](int k) {
                    dx[k] = from_final_state(g, s, at, channel + k);
                    unrolled<W>([&](int j) {
                        if (j >= channels.unused) dx[k] = fmaf(channels.weight[j][k], dz[W - 1 + i - j][k], dx[k]);
                    });
                });
                store_neighbours<T>(g.dx, channels.row(g.dx, s, at), dx);
            }
            unrolled<W - 1, n>([&](int i, int k) { x[i][k] = x[step + i][k], dz[i][k] = dz[step + i][k]; });
        }
    });
    if (g.sums == nullptr) return;
    float* sums = g.sums + (c.first_tile + blockIdx.x) * (c.width + 1) * c.channels + channel;
    unrolled<n>([&](int k) {
        unrolled<W>([&](int j) {
            if (j >= channels.unused) sums[(j - channels.unused) * c.channels + k] = dweight[j][k];
        });
        sums[c.width * c.channels + k] = dbias[k];
    });
}

// dinitial_state: position t < 0 gets weight_i·dz_{t + W − 1 − i} of the first W − 1 tokens.
__global__ void __launch_bounds__(threads)
    state_gradients(__grid_constant__ const ConvolutionCall c, ConvolutionGradients g) {
    constexpr int W = most_width;
    const Index channel = first_channel<1>();
    const Sequence s = c.sequences[static_cast<int>(blockIdx.x)];
    if (channel >= c.channels) return;
    const Channels<W, AnyType, 1> channels(c, channel);
    float gradient[W - 1][1] = {}, x[W][1];  // of the last W − 1 positions; the last tokens
    unrolled<W - 1>([&](int i) { channels.load_x(s, i - (W - 1), x[i]); });
#pragma unroll
    for (int t = 0; t < W - 1; ++t) {
        if (!g.dy || t >= s.count) break;
        channels.load_x(s, t, x[W - 1]);
        float dy[1];
        load_dy(channels, g, s, t, dy);
        const float dz = dy[0] * Activated(c.activation, channels.sum(x, 0)).slope;
#pragma unroll
        for (int i = 0; i < W - 1 - t; ++i)  // the position t − (W − 1) + i is below 0
            if (i >= channels.unused) gradient[t + i][0] = fmaf(channels.weight[i][0], dz, gradient[t + i][0]);
        unrolled<W - 1>([&](int i) { x[i][0] = x[i + 1][0]; });
    }
    const View& out = g.dinitial_state;
    const Index to = s.state * out.stride[0] + channel * out.stride[1];
    for (Index j = 0; j < g.kept; ++j) {
        const Index t = j - g.kept;
        float sum = from_final_state(g, s, t, channel);
        unrolled<W - 1>([&](int i) {
            if (t == i - (W - 1)) sum += gradient[i][0];
        });
        store(out, to + j * out.stride[2], sum);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

Grid grid_of(Index tiles, Index channels, int of_thread) {
    return {{tiles, blocks_of(channels, threads * of_thread)}, threads};
}

// launch(call, tiles) for up to Sequences::most sequences at a time.
template <class Call, class Launch>
Index for_each_tiles(const Call& call, const core::Tensor& final_state, Index tile_tokens, const Launch& launch_tiles) {
    const core::ConvolutionInputs& in = call.in;
    const Index sequences = core::sequence_count(in), tokens = in.x.shape[1];
    const Index pool = pool_size(in.initial_state, final_state, sequences);
    ConvolutionCall c;
    c.x = view_of(in.x), c.weight = view_of(in.weight), c.bias = view_of(in.bias), c.state = view_of(in.initial_state);
    c.channels = in.x.shape[2];
    c.kept = in.initial_state ? in.initial_state.shape[2] : 0;
    c.width = static_cast<int>(in.weight.shape[1]);
    c.activation = call.options.activation;
    for (Index first = 0; first < sequences; first += Sequences::most) {
        const Index count = std::min<Index>(Sequences::most, sequences - first);
        c.sequences = sequences_of(in, tokens, pool, first, count);
        c.tiles_of_row = blocks_of(tokens, tile_tokens);
        Index tiles = count * c.tiles_of_row;
        if (c.sequences.packed) {
            const bool known = c.sequences.begins_on_host;
            c.first_token = known ? c.sequences.begin[0] : 0;
            tiles = blocks_of((known ? c.sequences.begin[count] : tokens) - c.first_token, tile_tokens);
        }
        launch_tiles(c, tiles);
        c.first_tile += tiles;
    }
    return c.first_tile;
}

// launch_kernel(window, T{}, channels of a thread) for the width, and the types and layouts of what has channels.
template <class Launch>
void with_window(const core::ConvolutionInputs& in, const core::Tensor& other, const core::Tensor& result,
                 const Launch& launch_kernel) {
    if (in.weight.shape[1] > 4)
        return launch_kernel(std::integral_constant<int, most_width>{}, AnyType{}, std::integral_constant<int, 1>{});
    with_neighbours({&in.x, &other, &result}, [&](auto type, auto neighbours) {
        launch_kernel(std::integral_constant<int, 4>{}, type, neighbours);
    });
}

PartialSums sums_of(const engines::ConvolutionBackward& call) {
    const Index tiles = for_each_tiles(call, {}, backward_tile, [](const ConvolutionCall&, Index) {});
    return {tiles, (call.in.weight.shape[1] + 1) * call.in.x.shape[2]};
}

bool wants_sums(const core::ConvolutionGradients& g) {
    return g.dweight || g.dbias;
}

std::size_t sums_bytes(const engines::ConvolutionBackward& call) {
    return wants_sums(call.out) ? static_cast<std::size_t>(sums_of(call).floats()) * sizeof(float) : 0;
}

}  // namespace

void convolution_forward(const engines::ConvolutionForward& call) {
    const OnDevice on(call.in.x.device);
    const cudaStream_t stream = stream_of(call.execution);
    const core::ConvolutionOutputs& out = call.out;
    if (out.y)
        with_window(call.in, {}, out.y, [&](auto window, auto type, auto n) {
            constexpr auto kernel = forward_tokens<window(), decltype(type), n()>;
            for_each_tiles(call, out.final_state, forward_tile, [&](const ConvolutionCall& c, Index tiles) {
                launch(kernel, grid_of(tiles, c.channels, n()), stream, "the convolution", c, view_of(out.y));
            });
        });
    if (!out.final_state || out.final_state.count() == 0) return;
    for_each_tiles(call, out.final_state, forward_tile, [&](const ConvolutionCall& c, Index) {
        launch(store_states, grid_of(c.sequences.count, c.channels, 1), stream, "states of the convolution", c,
               view_of(out.final_state), out.final_state.shape[2]);
    });
}

std::size_t convolution_backward_workspace(const engines::ConvolutionBackward& call) {
    return Workspace::with_alignment(sums_bytes(call));
}

void convolution_backward(const engines::ConvolutionBackward& call) {
    const OnDevice on(call.in.x.device);
    const cudaStream_t stream = stream_of(call.execution);
    const core::ConvolutionGradients& grad = call.out;
    const Workspace workspace(call.execution, sums_bytes(call));
    const core::Tensor& states = grad.dinitial_state ? grad.dinitial_state : grad.dfinal_state;
    ConvolutionGradients g;
    g.dy = view_of(grad.dy), g.dfinal_state = view_of(grad.dfinal_state), g.dx = view_of(grad.dx);
    g.dinitial_state = view_of(grad.dinitial_state);
    g.kept = states ? states.shape[2] : 0;
    g.sums = wants_sums(grad) ? reinterpret_cast<float*>(workspace.data()) : nullptr;
    if (g.dx || g.sums != nullptr)
        with_window(call.in, grad.dy, grad.dx, [&](auto window, auto type, auto n) {
            constexpr auto kernel = backward_tokens<window(), decltype(type), n()>;
            for_each_tiles(call, {}, backward_tile, [&](const ConvolutionCall& c, Index tiles) {
                launch(kernel, grid_of(tiles, c.channels, n()), stream, "gradients of the convolution", c, g);
            });
        });
    if (g.dinitial_state)
        for_each_tiles(call, {}, backward_tile, [&](const ConvolutionCall& c, Index) {
            launch(state_gradients, grid_of(c.sequences.count, c.channels, 1), stream,
                   "gradients of the convolution's states", c, g);
        });
    if (g.sums == nullptr) return;
    const float* sums = sums_of(call).add(g.sums, stream);
    store_sums(sums, 0, grad.dweight, stream);
    store_sums(sums, call.in.weight.shape[1] * call.in.x.shape[2], grad.dbias, stream);
}

}  // namespace softdelta::cuda
