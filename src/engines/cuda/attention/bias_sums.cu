// dbias that heads or sequences share, or that slopes multiply: sums of the ds that the kernel of keys has stored, in
// the order of sequences and heads. A launch takes the ds of a turn; sums of several turns are kept as f32.
#include <algorithm>

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/rows.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

constexpr int bias_threads = 256, unit = 8;

// What a turn adds: to bias heads [first_head, first_head + heads) of bias batch rows [first_batch, …).
struct BiasTurn {
    StoredScores ds;
    View dbias, slopes;
    float* kept = nullptr;  // [batches, heads, queries, keys]
    bool first = true, last = true;
    bool shares_sequences = false;
    int heads_each = 1;  // query heads of a bias head
    int first_batch = 0, first_head = 0, heads = 0;
    Index queries = 0, keys = 0;
};

template <class T>
__device__ void load_unit(const T* from, float (&x)[unit]) {
    if constexpr (sizeof(T) == 2) {
        const uint4 eight = *reinterpret_cast<const uint4*>(from);
        const std::uint32_t two[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int e = 0; e < unit; e += 2) {
            const float2 both = ptx::unpack(two[e / 2], T());
            x[e] = both.x, x[e + 1] = both.y;
        }
    } else {
#pragma unroll
        for (int e = 0; e < unit; e += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + e);
            x[e] = four.x, x[e + 1] = four.y, x[e + 2] = four.z, x[e + 3] = four.w;
        }
    }
}

// A thread has eight keys of a query.
template <class T>
__global__ void __launch_bounds__(bias_threads) bias_sum_kernel(const __grid_constant__ BiasTurn turn) {
    const Index units = (turn.keys + unit - 1) / unit, place = Index(blockIdx.x) * bias_threads + threadIdx.x;
    if (place >= turn.queries * units) return;
    const Index i = place / units, j = place % units * unit;
    const int head = turn.first_head + static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
    const StoredScores& ds = turn.ds;
    const int sequences = static_cast<int>(ds.sequences), heads = static_cast<int>(ds.heads);
    const int begin = max(head * turn.heads_each - ds.first_head, 0);
    const int end = min((head + 1) * turn.heads_each - ds.first_head, heads);

    float sum[unit] = {};
    const Index kept = ((Index(blockIdx.z) * turn.heads + blockIdx.y) * turn.queries + i) * (units * unit) + j;
    if (!turn.first) load_unit(turn.kept + kept, sum);
    const Index* stride = ds.view.stride;
    for (int n = turn.shares_sequences ? 0 : batch; n < (turn.shares_sequences ? sequences : batch + 1); ++n) {
        const T* const from = static_cast<const T*>(ds.view.data) + n * stride[0] + i * stride[2] + j;
#pragma unroll 4
        for (int h = begin; h < end; ++h) {
            float x[unit];
            load_unit(from + h * stride[1], x);
            const float slope = turn.slopes ? load(turn.slopes, (ds.first_head + h) * turn.slopes.stride[0]) : 1.0F;
            unrolled<unit>([&](int e) { sum[e] = fmaf(slope, x[e], sum[e]); });
        }
    }
    if (!turn.last) {
#pragma unroll
        for (int e = 0; e < unit; e += 4)
            *reinterpret_cast<float4*>(turn.kept + kept + e) = float4{sum[e], sum[e + 1], sum[e + 2], sum[e + 3]};
        return;
    }
    const View& to = turn.dbias;
    const Index at = (turn.first_batch + batch) * to.stride[0] + head * to.stride[1] + i * to.stride[2];
    const bool whole = to.stride[3] == 1 && j + unit <= turn.keys && to.dtype != DType::f32 &&
                       reinterpret_cast<std::uintptr_t>(static_cast<std::uint16_t*>(to.data) + at + j) % 16 == 0;
    if (whole && (to.dtype == DType::bf16 || to.dtype == DType::f16)) {
        std::uint32_t two[4];
#pragma unroll
        for (int e = 0; e < unit; e += 2)
            two[e / 2] = to.dtype == DType::bf16 ? ptx::pack(sum[e], sum[e + 1], Plane())
                                                 : ptx::pack(sum[e], sum[e + 1], __half());
        *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(to.data) + at + j) =
            uint4{two[0], two[1], two[2], two[3]};
        return;
    }
    unrolled<unit>([&](int e) {
        if (j + e < turn.keys) store(to, at + (j + e) * to.stride[3], sum[e]);
    });
}

// dbias of packed sequences where no tile of keys is: a block has a head of a sequence.
__global__ void __launch_bounds__(bias_threads)
    clear_bias_kernel(const __grid_constant__ AttentionSequences sequences, const __grid_constant__ Gradients grad) {
    const AttentionSequence s = sequences[static_cast<int>(blockIdx.y)];
    const Index from = (s.k_count + tile_rows - 1) / tile_rows * tile_rows, width = grad.bias_keys - from;
    const Index* stride = grad.dbias.stride;
    const Index base = s.mask_batch * stride[0] + Index(blockIdx.x) * stride[1] + from * stride[3];
    for (Index e = threadIdx.x; width > 0 && e < grad.bias_queries * width; e += bias_threads)
        store(grad.dbias, base + e / width * stride[2] + e % width * stride[3], 0);
}

}  // namespace

void launch_bias_sums(const AttentionCall& call, const StoredScores& ds, const Gradients& grad, float* kept, bool first,
                      bool last, cudaStream_t stream) {
    BiasTurn turn;
    turn.ds = ds, turn.dbias = grad.dbias, turn.slopes = call.bias_slopes, turn.kept = kept;
    turn.first = first, turn.last = last;
    turn.shares_sequences = grad.bias_batches == 1;
    turn.heads_each = call.heads / static_cast<int>(grad.bias_heads);
    turn.first_batch = turn.shares_sequences ? 0 : ds.first_sequence;
    turn.first_head = ds.first_head / turn.heads_each;
    turn.heads = (ds.first_head + static_cast<int>(ds.heads) - 1) / turn.heads_each + 1 - turn.first_head;
    turn.queries = grad.bias_queries, turn.keys = grad.bias_keys;
    const Index units = turn.queries * blocks_of(turn.keys, unit);
    const Grid grid{{blocks_of(units, bias_threads), turn.heads, turn.shares_sequences ? 1 : ds.sequences},
                    bias_threads};
    const auto with = [&]<class T>(T) {
        launch(bias_sum_kernel<T>, grid, stream, "attention's gradient of a shared bias", turn);
    };
    if (ds.view.dtype == DType::bf16)
        with(Plane());
    else if (ds.view.dtype == DType::f16)
        with(__half());
    else
        with(0.0F);
}

void launch_clear_bias(const AttentionPass& packed, const Gradients& grad, cudaStream_t stream) {
    launch(clear_bias_kernel, {Blocks(packed.call.heads, packed.sequences.count), bias_threads}, stream,
           "attention's gradient of bias", packed.sequences, grad);
}

}  // namespace softdelta::cuda
