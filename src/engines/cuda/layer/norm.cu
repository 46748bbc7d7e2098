// The gated norm, a warp for each row of D channels:
//
//     n = x r,  r = 1/√(mean x² + ε),  y = w n f(z)
//     dn = dy w f(z),  dx = r (dn − n mean(dn n)),  dz = dy w n f'(z),  dw = Σ dy n f(z)
//
// A row of more channels than the lanes hold at once is read twice: for its sums, and, then in the first cache, for its
// results. dw is a sum over rows: a warp adds
// 64 of them, and the sums of warps are added in order (partial_sums.h).
#include <limits>

#include "engines/cuda/device/grid.h"
#include "engines/cuda/device/workspace.h"
#include "engines/cuda/layer/activation.h"
#include "engines/cuda/layer/channels.h"
#include "engines/cuda/layer/partial_sums.h"
#include "engines/cuda/layer/passes.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

namespace {

constexpr int warps = 8, lanes = 32;
constexpr std::uint32_t rows_of_sum = 64;

// Of a warp: several of those that share their weights in registers.
template <bool held>
constexpr std::uint32_t rows_of_warp = held ? 4 : 1;

// A row's place in a tensor [B, T, H, D].
struct Place {
    Index batch, token, head;

    __device__ Index offset(const View& v, int channel) const {
        return batch * v.stride[0] + token * v.stride[1] + head * v.stride[2] + channel * v.stride[3];
    }
};

struct NormCall {
    View x, z, weight;
    std::uint32_t rows = 0, tokens = 0, heads = 0;
    int channels = 0;
    core::Activation gate{};
    float epsilon = 0;

    __device__ Place place(std::uint32_t row) const {
        const std::uint32_t token = row / heads;
        return {token / tokens, token % tokens, row % heads};
    }
    __device__ float scale(float squares) const { return 1 / sqrtf(squares / static_cast<float>(channels) + epsilon); }
};

// n neighbours of a row.
template <class T, int n>
struct Part {
    float x[n], z[n], weight[n];

    __device__ void load(const NormCall& c, const Place& at, int first) {
        load_neighbours<T>(c.x, at.offset(c.x, first), x);
        if (c.z) load_neighbours<T>(c.z, at.offset(c.z, first), z);
    }
    __device__ void load_weight(const NormCall& c, int first) { load_weights(c.weight, first, 1, weight); }
    __device__ Activated gate(const NormCall& c, int i) const {
        return {c.z ? c.gate : core::Activation::none, c.z ? z[i] : 1};
    }
};

__device__ inline int lane() {
    return static_cast<int>(threadIdx.x) % lanes;
}
__device__ inline std::uint32_t warp() {
    return blockIdx.x * warps + threadIdx.x / lanes;
}

// Where f32 does not hold the squares of a row, those of this times the row are summed. ε vanishes beside them.
constexpr float shrunk = 0x1p-100F;

// Rows of a warp. A row that the lanes hold at once (held) is read once, and the weights once for all of them.
template <class T, int n, bool held>
__global__ void __launch_bounds__(warps* lanes) norm_rows(NormCall c, View y) {
    const std::uint32_t first_row = warp() * rows_of_warp<held>;
    const int first = lane() * n;
    Part<T, n> part;
    if (held && first < c.channels) part.load_weight(c, first);
#pragma unroll 1
    for (std::uint32_t row = first_row; row < min(first_row + rows_of_warp<held>, c.rows); ++row) {
        const Place at = c.place(row);
        const auto sum_squares = [&](float factor, bool loads) {
            float squares = 0;
            for (int d = first; d < c.channels; d += lanes * n) {
                if (loads) part.load(c, at, d);
                unrolled<n>([&](int i) { squares = fmaf(factor * part.x[i], factor * part.x[i], squares); });
            }
            return sum_of_warp(squares);
        };
        const float squares = sum_squares(1, true);
        float r = c.scale(squares);
        if (isinf(squares)) [[unlikely]]
            r = shrunk / sqrtf(sum_squares(shrunk, !held) / static_cast<float>(c.channels));
        for (int d = first; d < c.channels; d += lanes * n) {
            if (!held) part.load(c, at, d), part.load_weight(c, d);
            float result[n];
            unrolled<n>([&](int i) { result[i] = part.weight[i] * (part.x[i] * r) * part.gate(c, i).value; });
            store_neighbours<T>(y, at.offset(y, d), result);
        }
    }
}

struct NormGradients {
    View dy, dx, dz;
    float* scales = nullptr;  // [rows] r, for dw
    float* sums = nullptr;    // [sums, channels]
};

template <class T, int n, bool held>
__global__ void __launch_bounds__(warps* lanes, held&& std::is_same_v<T, float> ? 4 : 5)
    norm_gradients(NormCall c, NormGradients g) {
    const std::uint32_t first_row = warp() * rows_of_warp<held>;
    const int first = lane() * n;
    Part<T, n> part;
    if (held && first < c.channels) part.load_weight(c, first);
#pragma unroll 1
    for (std::uint32_t row = first_row; row < min(first_row + rows_of_warp<held>, c.rows); ++row) {
        const Place at = c.place(row);
        float dy[n];
        const auto load_part = [&](int d) {
            part.load(c, at, d);
            if (!held) part.load_weight(c, d);
            load_neighbours<T>(g.dy, at.offset(g.dy, d), dy);
        };
        const auto sum = [&](float factor, bool loads) {  // Σ x², Σ dn x
            float squares = 0, product = 0;
            for (int d = first; d < c.channels; d += lanes * n) {
                if (loads) load_part(d);
                unrolled<n>([&](int i) {
                    const float x = factor * part.x[i];
                    squares = fmaf(x, x, squares);
                    product = fmaf(dy[i] * part.weight[i] * part.gate(c, i).value, x, product);
                });
            }
            return float2{sum_of_warp(squares), sum_of_warp(product)};
        };
        const float2 sums = sum(1, true);
        float r = c.scale(sums.x);
        float mean = sums.y * r / static_cast<float>(c.channels);
        if (isinf(sums.x)) [[unlikely]] {
            const float2 small = sum(shrunk, !held);
            const float of_shrunk = 1 / sqrtf(small.x / static_cast<float>(c.channels));
            r = shrunk * of_shrunk;
            mean = small.y * of_shrunk / static_cast<float>(c.channels);
        }
        if (g.scales != nullptr && lane() == 0) g.scales[row] = r;
        for (int d = first; d < c.channels; d += lanes * n) {
            if (!held) load_part(d);
            float dx[n], dz[n];
            unrolled<n>([&](int i) {
                const Activated gate = part.gate(c, i);
                const float normal = part.x[i] * r, of_weight = dy[i] * part.weight[i];
                dx[i] = r * (of_weight * gate.value - normal * mean);
                dz[i] = of_weight * normal * gate.slope;
            });
            if (g.dx) store_neighbours<T>(g.dx, at.offset(g.dx, d), dx);
            if (g.dz) store_neighbours<T>(g.dz, at.offset(g.dz, d), dz);
        }
    }
}

// A warp sums 64 rows of n·32 channels.
template <class T, int n>
__global__ void __launch_bounds__(warps* lanes) sum_weight_gradients(NormCall c, NormGradients g) {
    const std::uint32_t first = warp() * rows_of_sum;
    const int d = (static_cast<int>(blockIdx.y) * lanes + lane()) * n;
    if (first >= c.rows || d >= c.channels) return;
    float sums[n] = {};
#pragma unroll 4
    for (std::uint32_t row = first; row < min(first + rows_of_sum, c.rows); ++row) {
        const Place at = c.place(row);
        Part<T, n> part;
        part.load(c, at, d);
        float dy[n];
        load_neighbours<T>(g.dy, at.offset(g.dy, d), dy);
        const float r = g.scales[row];
        unrolled<n>([&](int i) { sums[i] = fmaf(dy[i] * (part.x[i] * r), part.gate(c, i).value, sums[i]); });
    }
    unrolled<n>([&](int i) { g.sums[static_cast<Index>(warp()) * c.channels + d + i] = sums[i]; });
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

template <bool held>
Index row_blocks(const core::NormInputs& in) {
    return blocks_of(blocks_of(row_count(in), rows_of_warp<held>), warps);
}

PartialSums sums_of(const engines::NormBackward& call) {
    return {blocks_of(row_count(call.in), rows_of_sum), call.in.x.shape[3]};
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

// launch_kernel(T{}, neighbours, held) for the types and layouts of these tensors.
template <class Launch>
void with_rows(const std::initializer_list<const core::Tensor*>& tensors, const Launch& launch_kernel) {
    with_neighbours(tensors, [&](auto type, auto n) {
        if ((*tensors.begin())->shape[3] <= lanes * n())
            launch_kernel(type, n, std::true_type{});
        else
            launch_kernel(type, n, std::false_type{});
    });
}

void norm_forward(const engines::NormForward& call) {
    const OnDevice on(call.in.x.device);
    with_rows({&call.in.x, &call.in.z, &call.out.y}, [&](auto type, auto n, auto held) {
        launch(norm_rows<decltype(type), n(), held()>, {row_blocks<held()>(call.in), warps * lanes},
               stream_of(call.execution), "the gated norm", norm_call(call), view_of(call.out.y));
    });
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
    const PartialSums sums = sums_of(call);
    with_rows({&call.in.x, &call.in.z, &grad.dy, &grad.dx, &grad.dz}, [&](auto type, auto n, auto held) {
        launch(norm_gradients<decltype(type), n(), held()>, {row_blocks<held()>(call.in), warps * lanes}, stream,
               "gradients of the gated norm", c, g);
        if (grad.dweight)
            launch(sum_weight_gradients<decltype(type), n()>,
                   {{blocks_of(sums.rows, warps), blocks_of(c.channels, lanes * n())}, warps * lanes}, stream,
                   "gradients of the gated norm's weights", c, g);
    });
    if (!grad.dweight) return;
    store_sums(sums.add(memory.sums, stream), 0, grad.dweight, stream);
}

}  // namespace softdelta::cuda
