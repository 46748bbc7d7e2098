// What is added to the scores of a tile, and what soft caps make of them.
#pragma once

#include <cfloat>

#include "engines/cuda/attention/call.h"

namespace softdelta::cuda {

// The order of addends where the top_w largest of a row are kept: NaN must show.
__device__ inline float rank_of(float addend) {
    return isnan(addend) ? INFINITY : addend;
}

// Of a bias and a distance of keys: finite numbers stay finite, and −∞ masks whatever the slope.
__device__ inline float sloped(float bias, float slope, float alibi, Index distance) {
    if (!isfinite(bias)) return bias;
    const float sum = slope * bias - alibi * static_cast<float>(distance < 0 ? -distance : distance);
    return fminf(fmaxf(sum, -FLT_MAX), FLT_MAX);
}

// What is added to the scores of a head, −∞ where a query may not see a key.
class Addends {
  public:
    __device__ Addends(const AttentionCall& call, const AttentionSequence& s, int head)
        : call_(call),
          s_(s),
          mask_(s.mask_batch * call.mask.stride[0] + head / call.mask_group * call.mask.stride[1]),
          bias_(s.mask_batch * call.bias.stride[0] + head / call.bias_group * call.bias.stride[1]),
          kept_(call.kept == nullptr ? nullptr : call.kept + call.row_of(s, head)),
          bias_slope_(bias_slope(call, head)),
          alibi_slope_(alibi_slope(call, head)) {}

    __device__ float at(Index i, Index j) const {
        const float addend = before_selection(i, j);
        if (kept_ == nullptr || addend == -INFINITY || kept_[i].keeps(rank_of(addend), j)) return addend;
        return -INFINITY;
    }
    __device__ float before_selection(Index i, Index j) const {
        if (i >= s_.q_count) return -INFINITY;
        const Range keys = visible_keys(call_, s_, i);
        if (j < keys.begin || j >= keys.end) return -INFINITY;
        const Index* stride = call_.mask.stride;
        if (call_.mask && static_cast<const std::uint8_t*>(call_.mask.data)[mask_ + i * stride[2] + j * stride[3]] == 0)
            return -INFINITY;
        float bias = 0;
        if (call_.bias) bias = load(call_.bias, bias_ + i * call_.bias.stride[2] + j * call_.bias.stride[3]);
        return sloped(bias, bias_slope_, alibi_slope_, i + s_.k_count - s_.q_count - j);
    }

  private:
    const AttentionCall& call_;
    const AttentionSequence& s_;
    Index mask_, bias_;
    const KeptKeys* kept_;
    float bias_slope_, alibi_slope_;
};

// The bias of a tile in shared memory, −∞ where a query may not see a key: own rows [own, own + rows) against streamed
// rows [at, at + n). Own rows are queries and streamed ones keys, or with by_key the other way round.
template <int rows, int n, bool by_key>
class BiasTile {
  public:
    static constexpr int row = n + 8;  // so that the rows of a warp's load lie in different banks
    static constexpr int bytes = rows * row * static_cast<int>(sizeof(float));

    __device__ BiasTile(float* data, const AttentionCall& call, const AttentionSequence& s, int head)
        : data_(data), call_(call), s_(s), addends_(call, s, head) {}

    // Whether all of the tile is seen and nothing is added: then it is not filled.
    __device__ bool is_plain(Index own, Index at) const {
        if (call_.mask || call_.bias || call_.alibi_slopes) return false;
        const Index i = by_key ? at : own, j = by_key ? own : at;
        const Index last = i + (by_key ? n : rows) - 1, end = j + (by_key ? rows : n);
        return last < s_.q_count && visible_keys(call_, s_, last).begin <= j && visible_keys(call_, s_, i).end >= end;
    }

    // By all threads of the block, which waits before and after. Out of line: it is slow and large enough as it is.
    __device__ __attribute__((noinline)) void fill(Index own, Index at, int thread, int threads) const {
        constexpr int keys = by_key ? rows : n;
        for (int e = thread; e < rows * n; e += threads) {
            const int of_query = e / keys, of_key = e % keys;  // neighbours read neighbouring keys
            const Index i = (by_key ? at : own) + of_query, j = (by_key ? own : at) + of_key;
            data_[by_key ? of_key * row + of_query : of_query * row + of_key] = addends_.at(i, j);
        }
    }

    __device__ float at(int own_row, int column) const { return data_[own_row * row + column]; }

  private:
    float* data_;
    const AttentionCall& call_;
    const AttentionSequence& s_;
    Addends addends_;
};

// cap·tanh(x / cap), and its derivative.
__device__ __attribute__((noinline)) inline float2 soft_cap(float x, float cap) {
    const float u = x / cap, e = expf(-2 * fabsf(u));
    return {cap * tanhf(u), 4 * e / ((1 + e) * (1 + e))};  // 1 − tanh² has no digits left where tanh saturates
}

}  // namespace softdelta::cuda
