// A call of the convolution as kernels see it: tiles of tokens, and a window of tokens for some channels.
#pragma once

#include "core/layer/convolution.h"
#include "engines/cuda/device/sequences.h"
#include "engines/cuda/layer/activation.h"
#include "engines/cuda/layer/channels.h"

namespace softdelta::cuda {

struct ConvolutionCall {
    View x, weight, bias, state;  // state: the initial one
    Index channels = 0, kept = 0;
    int width = 0;
    core::Activation activation{};
    Sequences sequences{};
    Index first_tile = 0;    // of this launch among all, where partial sums lie
    Index tiles_of_row = 0;  // of a batch row that is not packed
    Index first_token = 0;   // packed: where the launch's first tile begins
};

__device__ inline Index find_sequence(const ConvolutionCall& c, Index token) {  // the first that ends behind it
    int low = 0, high = c.sequences.count;
    while (low < high) {
        const int middle = (low + high) / 2;
        const Sequence s = c.sequences[middle];
        if (s.begin + s.count > token)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// visit(sequence, from, to) for its tokens [from, to) that lie in the block's tile.
template <class Visit>
__device__ void for_each_sequence(const ConvolutionCall& c, Index tile_tokens, const Visit& visit) {
    const Index tile = blockIdx.x;
    const bool packed = c.sequences.packed;
    const Index begin = packed ? c.first_token + tile * tile_tokens : tile % c.tiles_of_row * tile_tokens;
    const Index end = min(begin + tile_tokens, c.sequences.tokens);
    for (Index i = packed ? find_sequence(c, begin) : tile / c.tiles_of_row; i < c.sequences.count; ++i) {
        const Sequence s = c.sequences[static_cast<int>(i)];
        if (s.begin >= end) return;
        const Index from = max(begin, s.begin) - s.begin, to = min(end - s.begin, s.count);
        if (from < to) visit(s, from, to);
        if (!packed) return;
    }
}

// n channels of a call, from `channel` on: their weights, and tokens of a sequence. Weights of a width below W are the
// last of W; what stands before them is not used, for it may be Inf.
template <int W, class T, int n>
struct Channels {
    const ConvolutionCall& c;
    Index channel;
    int unused;
    float weight[W][n], bias[n];

    __device__ Channels(const ConvolutionCall& call, Index first) : c(call), channel(first), unused(W - call.width) {
        unrolled<W, n>([&](int i, int k) {
            weight[i][k] =
                i < unused ? 0 : load(c.weight, (channel + k) * c.weight.stride[0] + (i - unused) * c.weight.stride[1]);
        });
        load_weights(c.bias, channel, 0, bias);
    }

    __device__ Index row(const View& v, const Sequence& s, Index t) const { return s.row(v, t, channel); }
    __device__ void load_token(const Sequence& s, Index t, float (&out)[n]) const {
        load_neighbours<T>(c.x, row(c.x, s, t), out);
    }
    // x at position t; below 0 it is in the state, or 0.
    __device__ void load_x(const Sequence& s, Index t, float (&out)[n]) const {
        if (t >= 0) return load_token(s, t, out);
        const bool is_kept = c.state && t + c.kept >= 0 && s.state >= 0;
        const Index at = s.state * c.state.stride[0] + (t + c.kept) * c.state.stride[2];
        unrolled<n>([&](int k) { out[k] = is_kept ? load(c.state, at + (channel + k) * c.state.stride[1]) : 0; });
    }
    // Before the activation, of x[0] … x[W − 1].
    __device__ float sum(const float (*x)[n], int k) const {
        float z = bias[k];
        unrolled<W>([&](int i) {
            if (i >= unused) z = fmaf(weight[i][k], x[i][k], z);
        });
        return z;
    }
};

}  // namespace softdelta::cuda
