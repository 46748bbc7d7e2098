// Forward with more than 256 channels, and whatever else no kernel of tiles takes: a block has one query of a head and
// walks over its keys in f64.
#include "engines/cuda/attention/addends.h"
#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/row_end.h"
#include "engines/cuda/attention/rows.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

constexpr int wide_threads = 128, most_channels = most_forward_channels,
              own_channels = (most_channels + wide_threads - 1) / wide_threads;

__global__ void __launch_bounds__(wide_threads)
    wide_forward_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ ForwardOutputs out) {
    const AttentionCall& call = pass.call;
    const RowTile own = pass.sequences.tile(pass.sequences.of_queries, static_cast<int>(blockIdx.x) / tile_rows);
    if (!own) return;
    const AttentionSequence s = pass.sequences[own.i];
    const int thread = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.y);
    const Index i = own.first + blockIdx.x % tile_rows;
    if (i >= s.q_count || !out.redo.takes(own, call.heads, head)) return;
    auto* const q = reinterpret_cast<float*>(ptx::shared_memory());      // [channels]
    auto* const weights = reinterpret_cast<double*>(q + most_channels);  // [wide_threads], of a key each
    const Rows queries = Rows::of_queries(call.q, s, head, call.channels);
    const Rows keys = Rows::of_keys(call.k, call, s, head / call.group, call.channels);
    const Rows values = Rows::of_keys(call.v, call, s, head / call.group, call.value_channels);
    const Addends addends(call, s, head);
    for (int c = thread; c < call.channels; c += wide_threads) q[c] = queries.at(i, c);
    __syncthreads();

    constexpr double infinity = INFINITY;
    double top = -infinity, sum = 0, o[own_channels] = {};
    bool seen = false;
    const Range all = visible_keys(call, s, i);
    for (Index at = all.begin; at < all.end; at += wide_threads) {
        const Index j = at + thread;
        const float addend = j < all.end ? addends.at(i, j) : -INFINITY;
        double score = -infinity;
        if (addend != -INFINITY) {
            score = 0;
            for (int c = 0; c < call.channels; ++c)
                score += static_cast<double>(q[c]) * static_cast<double>(keys.at(j, c));
            score *= static_cast<double>(call.scale);
            if (call.softcap != 0)
                score = static_cast<double>(call.softcap) * tanh(score / static_cast<double>(call.softcap));
            // Rounded as in the other kernels: f64 would keep digits of the score that the addend has lost.
            score = static_cast<double>(static_cast<float>(score) + addend);
        }
        __syncthreads();
        weights[thread] = score;
        __syncthreads();
        double highest = top;
        for (int t = 0; t < wide_threads; ++t)
            if (weights[t] > highest || isnan(weights[t])) highest = weights[t];
        const double factor = top == highest ? 1 : exp(top - highest);
        top = highest;
        __syncthreads();
        weights[thread] = addend == -INFINITY ? 0.0 : exp(score - top);
        __syncthreads();
        sum *= factor;
        for (int t = 0; t < wide_threads; ++t) sum += weights[t];
        seen = seen || sum != 0;
        if (!out.o) continue;
        for (double& x : o) x *= factor;
        for (int t = 0; t < wide_threads; ++t) {
            if (weights[t] == 0) continue;
            unrolled<own_channels>([&](int n) {
                const int c = thread + wide_threads * n;
                if (c < call.value_channels) o[n] += weights[t] * static_cast<double>(values.at(at + t, c));
            });
        }
    }
    const RowEnd end = end_of_row(call, head, static_cast<float>(top), static_cast<float>(sum), seen);
    if (thread == 0) store_row_end(call, out, s, head, i, end);
    if (!out.o) return;
    const Index row = s.batch * out.o.stride[0] + (s.q_begin + i) * out.o.stride[1] + head * out.o.stride[2];
    unrolled<own_channels>([&](int n) {
        const int c = thread + wide_threads * n;
        if (c < call.value_channels)
            store(out.o, row + c * out.o.stride[3],
                  end.scale == 0 ? 0.0F : static_cast<float>(o[n] * static_cast<double>(end.scale)));
    });
}

}  // namespace

void launch_wide_forward(const AttentionPass& pass, const ForwardOutputs& out, cudaStream_t stream) {
    launch(wide_forward_kernel,
           {row_block_grid<false>(row_blocks(pass.sequences.of_queries, pass.call.queries, 1), pass.call.heads,
                                  pass.sequences.of_queries, pass.sequences),
            wide_threads,
            most_channels * static_cast<int>(sizeof(float)) + wide_threads * static_cast<int>(sizeof(double))},
           stream, "attention of many channels", pass, out);
}

}  // namespace softdelta::cuda
