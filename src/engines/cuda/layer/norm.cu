// The gated norm, a warp for each row of D channels:
//
//     n = x r,  r = 1/√(mean x² + ε),  y = w n f(z)
//     dn = dy w f(z),  dx = r (dn − n mean(dn n)),  dz = dy w n f'(z),  dw = Σ dy n f(z)
//
// A row is read twice: for its sums, and, then in the first cache, for its results. dw is a sum over rows: a warp adds
// 64 of them, and the sums of warps are added in order (partial_sums.h).
#include "engines/cuda/layer/norm.h"

#include <limits>

#include "engines/cuda/grid.h"
#include "engines/cuda/lanes.h"
#include "engines/cuda/layer/activation.h"
#include "engines/cuda/layer/channels.h"
#include "engines/cuda/layer/partial_sums.h"
#include "engines/cuda/workspace.h"

namespace softdelta::cuda {

namespace {

constexpr int warps = 8, lanes = 32;
constexpr std::uint32_t rows_of_sum = 64;

struct NormCall {
    View x, z, weight;
    std::uint32_t rows = 0, tokens = 0, heads = 0;
    int channels = 0;
    core::Activation gate{};
    float epsilon = 0;

    // Where a row of a tensor [B, T, H, D] begins.
    __device__ Index row(const View& v, std::uint32_t i) const {
        const std::uint32_t token = i / heads;
        return token / tokens * v.stride[0] + token % tokens * v.stride[1] + i % heads * v.stride[2];
    }
    __device__ float scale(float squares) const { return 1 / sqrtf(squares / static_cast<float>(channels) + epsilon); }
};

// n neighbours of a row.
template <int n>
struct Part {
    float x[n], z[n], weight[n];

    __device__ Part(const NormCall& c, std::uint32_t row, int first) {
        load_neighbours(c.x, c.row(c.x, row) + first * c.x.stride[3], x);
        if (c.z) load_neighbours(c.z, c.row(c.z, row) + first * c.z.stride[3], z);
        load_weights(c.weight, first, 1, weight);
    }
};
template <int n>
__device__ void load_part(const NormCall& c, const View& v, std::uint32_t row, int first, float (&out)[n]) {
    load_neighbours(v, c.row(v, row) + first * v.stride[3], out);
}

__device__ inline int lane() {
    return static_cast<int>(threadIdx.x) % lanes;
}
__device__ inline std::uint32_t warp() {
    return blockIdx.x * warps + threadIdx.x / lanes;
}

template <int n>
__global__ void __launch_bounds__(warps* lanes) norm_rows(NormCall c, View y) {
    const std::uint32_t row = warp();
    if (row >= c.rows) return;
    float squares = 0;
    for (int d = lane() * n; d < c.channels; d += lanes * n) {
        float x[n];
        load_part(c, c.x, row, d, x);
#pragma unroll
        for (int i = 0; i < n; ++i) squares = fmaf(x[i], x[i], squares);
    }
    const float r = c.scale(sum_of_warp(squares));
    for (int d = lane() * n; d < c.channels; d += lanes * n) {
        const Part<n> part(c, row, d);
        float result[n];
#pragma unroll
        for (int i = 0; i < n; ++i)
            result[i] = part.weight[i] * (part.x[i] * r) * (c.z ? activate(c.gate, part.z[i]) : 1);
        store_neighbours(y, c.row(y, row) + d * y.stride[3], result);
    }
}

struct NormGradients {
    View dy, dx, dz;
    float* scales = nullptr;  // [rows] r, for dw
    float* sums = nullptr;    // [sums, channels]
};

template <int n>
__global__ void __launch_bounds__(warps* lanes) norm_gradients(NormCall c, NormGradients g) {
    const std::uint32_t row = warp();
    if (row >= c.rows) return;
    float squares = 0, product = 0;  // Σ x², Σ dn x
    for (int d = lane() * n; d < c.channels; d += lanes * n) {
        const Part<n> part(c, row, d);
        float dy[n];
        load_part(c, g.dy, row, d, dy);
#pragma unroll
        for (int i = 0; i < n; ++i) {
            squares = fmaf(part.x[i], part.x[i], squares);
            product = fmaf(dy[i] * part.weight[i] * (c.z ? activate(c.gate, part.z[i]) : 1), part.x[i], product);
        }
    }
    const float r = c.scale(sum_of_warp(squares));
    const float mean = sum_of_warp(product) * r / static_cast<float>(c.channels);
    if (g.scales != nullptr && lane() == 0) g.scales[row] = r;
    for (int d = lane() * n; d < c.channels; d += lanes * n) {
        const Part<n> part(c, row, d);
        float dy[n], dx[n], dz[n];
        load_part(c, g.dy, row, d, dy);
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float normal = part.x[i] * r, of_weight = dy[i] * part.weight[i];
            dx[i] = r * (of_weight * (c.z ? activate(c.gate, part.z[i]) : 1) - normal * mean);
            dz[i] = c.z ? of_weight * normal * derivative(c.gate, part.z[i]) : 0;
        }
        if (g.dx) store_neighbours(g.dx, c.row(g.dx, row) + d * g.dx.stride[3], dx);
        if (g.dz) store_neighbours(g.dz, c.row(g.dz, row) + d * g.dz.stride[3], dz);
    }
}

// A warp sums 64 rows of n·32 channels.
template <int n>
__global__ void __launch_bounds__(warps* lanes) sum_weight_gradients(NormCall c, NormGradients g) {
    const std::uint32_t first = warp() * rows_of_sum;
    const int d = (static_cast<int>(blockIdx.y) * lanes + lane()) * n;
    if (first >= c.rows || d >= c.channels) return;
    float sums[n] = {};
#pragma unroll 4
    for (std::uint32_t row = first; row < min(first + rows_of_sum, c.rows); ++row) {
        float x[n], z[n], dy[n];
        load_part(c, c.x, row, d, x);
        load_part(c, g.dy, row, d, dy);
        if (c.z) load_part(c, c.z, row, d, z);
        const float r = g.scales[row];
#pragma unroll
        for (int i = 0; i < n; ++i) sums[i] = fmaf(dy[i] * (x[i] * r), c.z ? activate(c.gate, z[i]) : 1, sums[i]);
    }
#pragma unroll
    for (int i = 0; i < n; ++i) g.sums[static_cast<Index>(warp()) * c.channels + d + i] = sums[i];
}

// ---------------------------------------------------------------------------------------------------------------------

Index row_count(const core::NormInputs& in) {
    return in.x.shape[0] * in.x.shape[1] * in.x.shape[2];
}

template <class Call>
NormCall norm_call(const Call& call) {
    const core::NormInputs& in = call.in;
    NormCall c;
    c.x = view_of(in.x), c.z = view_of(in.z), c.weight = view_of(in.weight);
    c.rows = static_cast<std::uint32_t>(row_count(in));
    c.tokens = static_cast<std::uint32_t>(in.x.shape[1]);
    c.heads = static_cast<std::uint32_t>(in.x.shape[2]);
    c.channels = static_cast<int>(in.x.shape[3]);
    c.gate = call.options.gate;
    c.epsilon = static_cast<float>(call.options.epsilon);
    return c;
}

unsigned blocks_of(Index warps_needed) {
    return static_cast<unsigned>((warps_needed + warps - 1) / warps);
}

PartialSums sums_of(const engines::NormBackward& call) {
    return {(row_count(call.in) + rows_of_sum - 1) / rows_of_sum, call.in.x.shape[3]};
}

// r of every row, and sums for dw.
struct NormMemory {
    float *scales = nullptr, *sums = nullptr;
    std::size_t bytes = 0;

    NormMemory(const engines::NormBackward& call, std::byte* memory) {
        if (!call.out.dweight) return;
        MemoryParts parts(memory);
        scales = parts.take<float>(row_count(call.in));
        sums = parts.take<float>(sums_of(call).floats());
        bytes = parts.used();
    }
};

}  // namespace

std::string refuse_norm(const core::NormInputs& in) {
    constexpr Index most = std::numeric_limits<std::int32_t>::max();
    for (const Index n : {row_count(in), in.x.shape[3]})
        if (n > most) return "x: more than " + std::to_string(most) + " rows or channels on a GPU";
    return "";
}

void norm_forward(const engines::NormForward& call) {
    const OnDevice on(call.in.x.device);
    const bool neighbours = has_neighbours(call.in.x) && has_neighbours(call.in.z) && has_neighbours(call.out.y);
    launch(neighbours ? norm_rows<most_neighbours> : norm_rows<1>, {{blocks_of(row_count(call.in))}, warps * lanes},
           stream_of(call.execution), "the gated norm", norm_call(call), view_of(call.out.y));
}

std::size_t norm_backward_workspace(const engines::NormBackward& call) {
    return Workspace::with_alignment(NormMemory(call, nullptr).bytes);
}

void norm_backward(const engines::NormBackward& call) {
    const OnDevice on(call.in.x.device);
    const cudaStream_t stream = stream_of(call.execution);
    const core::NormGradients& grad = call.out;
    const Workspace workspace(call.execution, NormMemory(call, nullptr).bytes);
    const NormMemory memory(call, workspace.data());
    const NormCall c = norm_call(call);
    const NormGradients g{view_of(grad.dy), view_of(grad.dx), view_of(grad.dz), memory.scales, memory.sums};
    const bool neighbours = has_neighbours(call.in.x) && has_neighbours(call.in.z) && has_neighbours(grad.dy) &&
                            has_neighbours(grad.dx) && has_neighbours(grad.dz);
    launch(neighbours ? norm_gradients<most_neighbours> : norm_gradients<1>,
           {{blocks_of(row_count(call.in))}, warps * lanes}, stream, "gradients of the gated norm", c, g);
    if (!grad.dweight) return;
    const PartialSums sums = sums_of(call);
    const Index channels_of_warp = lanes * (neighbours ? most_neighbours : 1);
    launch(neighbours ? sum_weight_gradients<most_neighbours> : sum_weight_gradients<1>,
           {{blocks_of(sums.rows), static_cast<unsigned>((c.channels + channels_of_warp - 1) / channels_of_warp)},
            warps * lanes},
           stream, "gradients of the gated norm's weights", c, g);
    store_sums(sums.add(memory.sums, stream), 0, grad.dweight, stream);
}

}  // namespace softdelta::cuda
