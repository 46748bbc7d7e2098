// Products of a warp's 16 queries and a tile of N keys made into scores.
#pragma once

#include "engines/cuda/attention/warpgroup/added.h"

namespace softdelta::cuda::warpgroup {

// Queries or keys of a sequence: these kernels' sequences are shorter than 2³⁰.
struct Span {
    int begin = 0, end = 0;

    Span() = default;
    __device__ Span(Index from, Index to) : begin(static_cast<int>(from)), end(static_cast<int>(to)) {}
    template <class Range>
    __device__ explicit Span(const Range& r) : Span(r.begin, r.end) {}
};

// What comes between products and exponentials: nothing but the scale; a bias alone, of each query or of a row that all
// queries share; bias, mask and slopes; or a mask, and a soft cap that the gradients apply together with the
// exponential, for they need its derivative.
enum class Between { nothing, bias, shared_bias, added, cap };
__host__ __device__ constexpr bool is_bias_alone(Between between) {
    return between == Between::bias || between == Between::shared_bias;
}

// A soft cap with nothing else is left to the kernel. Whether queries share a bias that comes alone is said by its
// stride; but a kernel that stores dbias in its place (stores_tiles) needs its tiles, though their rows be one.
inline Between between_of(const AttentionCall& call, bool stores_tiles = false) {
    if (!(call.scale > 0)) return Between::added;
    if (!(call.mask || call.bias || call.alibi_slopes)) return Between::nothing;
    if (call.mask || call.alibi_slopes || call.bias_slopes || call.softcap != 0) return Between::added;
    return call.bias.stride[2] == 0 && !stores_tiles ? Between::shared_bias : Between::bias;
}

// with.template operator()<between>() for one that is known when a call comes.
template <class With>
void with_between(Between between, const With& with) {
    switch (between) {
        case Between::nothing:
            return with.template operator()<Between::nothing>();
        case Between::bias:
            return with.template operator()<Between::bias>();
        case Between::shared_bias:
            return with.template operator()<Between::shared_bias>();
        case Between::added:
            return with.template operator()<Between::added>();
        case Between::cap:
            return with.template operator()<Between::cap>();
    }
}

// Whether take() scales the products: where anything is capped or added. Elsewhere the exponential does.
__device__ inline bool is_scaled(const AttentionCall& call, bool added) {
    return added || call.softcap != 0 || !(call.scale > 0);
}

template <class T, int M, int N, Between between>
class QueryScores {
    static constexpr bool added = between == Between::added;
    using AddedTile = Added<T, M, N>;

  public:
    // The warp's queries are rows [row, row + 16) of the block's, which begin at `first`.
    __device__ QueryScores(const AttentionCall& call, const AttentionSequence& s, int head, int first, int row,
                           int lane)
        : call_(call), s_(s), head_(head), first_(first), row_(row), lane_(lane) {}

    // `bits` are free afterwards: the warp arrives at that counter.
    __device__ void take(const typename AddedTile::Bias& bias, std::uint32_t bits, std::uint32_t bits_free, int at,
                         float (&x)[N / 8][4]) const {
        if constexpr (between == Between::cap) {
            take_mask(bits, bits_free, x);
            return;
        }
        if (!is_scaled(call_, added)) return;
        const bool sloped = call_.bias_slopes || call_.alibi_slopes;
        const bool simple = added && call_.bias && !sloped && call_.softcap == 0;
        if (simple) {
            add(bias, x);
        } else {
#pragma unroll
            for (int n = 0; n < N / 8; ++n)
#pragma unroll
                for (int m = 0; m < 4; ++m) x[n][m] *= call_.scale;
        }
        if (call_.softcap != 0) {
#pragma unroll
            for (int n = 0; n < N / 8; ++n)
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    float slope;
                    x[n][m] = capped(x[n][m], call_.softcap, slope);
                }
        }
        if constexpr (added) {
            if (!simple && (call_.bias || sloped)) add_sloped(bias, at, x);
            take_mask(bits, bits_free, x);
        }
    }

  private:
    __device__ void take_mask(std::uint32_t bits, std::uint32_t bits_free, float (&x)[N / 8][4]) const {
        if (!call_.mask) return;
        hide_masked(bits, x);
        ptx::arrive_as_warp(bits_free, lane_);
    }
    // x = scale·x + bias.
    __device__ void add(const typename AddedTile::Bias& bias, float (&x)[N / 8][4]) const {
#pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            std::uint32_t four[4];
            bias.load_left(four, row_, n, lane_);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float2 two = ptx::unpack(four[c], T());
                float* to = &x[2 * n + c / 2][2 * (c % 2)];
                to[0] = fmaf(to[0], call_.scale, two.x);
                to[1] = fmaf(to[1], call_.scale, two.y);
            }
        }
    }
    __device__ void add_sloped(const typename AddedTile::Bias& bias, int at, float (&x)[N / 8][4]) const {
        const Slopes slopes(call_, s_, head_);
#pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            std::uint32_t four[4] = {};
            if (call_.bias) bias.load_left(four, row_, n, lane_);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float2 two = ptx::unpack(four[c], T());
                const int i = first_ + row_ + lane_ / 4 + 8 * (c % 2), j = at + 16 * n + 8 * (c / 2) + 2 * (lane_ % 4);
                x[2 * n + c / 2][2 * (c % 2)] = slopes.add(x[2 * n + c / 2][2 * (c % 2)], two.x, i, j);
                x[2 * n + c / 2][2 * (c % 2) + 1] = slopes.add(x[2 * n + c / 2][2 * (c % 2) + 1], two.y, i, j + 1);
            }
        }
    }
    __device__ void hide_masked(std::uint32_t bits, float (&x)[N / 8][4]) const {
#pragma unroll
        for (int w = 0; w < N / 32; ++w)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const std::uint32_t word =
                    AddedTile::load_word(bits, row_ + lane_ / 4 + 8 * half, w) >> (2 * (lane_ % 4));
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if ((word >> (8 * (e / 2) + e % 2) & 1u) == 0) x[4 * w + e / 2][2 * half + e % 2] = -INFINITY;
            }
    }

    const AttentionCall& call_;
    const AttentionSequence& s_;
    int head_, first_, row_, lane_;
};

// The lane's part of a bias that comes alone, of a tile of 16 rows and N columns: it lies in registers before the
// products are there that it is added to.
template <class T, int N, bool shared>
class LoneBias {
  public:
    // Rows [row, row + 16) of a tile, rows of its transpose, or one row that all share.
    template <class Tile>
    __device__ void load(const Tile& tile, int row, int lane) {
#pragma unroll
        for (int n = 0; n < N / 16; ++n) tile.load_left(two_[n], row, n, lane);
    }
    template <class Tile>
    __device__ void load_transposed(const Tile& tile, int row, int lane) {
#pragma unroll
        for (int n = 0; n < N / 16; ++n) tile.load_transposed_result(two_[n], 16 * n, row, lane);
    }
    __device__ void load_shared(std::uint32_t base, int lane) {
#pragma unroll
        for (int i = 0; i < N / 8; ++i)
            two_[i / 2][i % 2] = *reinterpret_cast<const std::uint32_t*>(
                shared_at(base + static_cast<std::uint32_t>(16 * i + 4 * (lane % 4))));
    }
    // What is added to x[i][2·half + {0, 1}].
    __device__ float2 at(int i, int half) const {
        return ptx::unpack(two_[i / 2][shared ? i % 2 : 2 * (i % 2) + half], T());
    }

  private:
    std::uint32_t two_[N / 16][shared ? 2 : 4];
};

// x of what the lane's two rows do not see: columns outside of seen[row], of N that begin at `at`.
template <int N>
__device__ inline void hide(const Span (&seen)[2], int at, int lane, float (&x)[N / 8][4], float hidden = -INFINITY) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int begin = seen[half].begin - at - 2 * (lane % 4), end = seen[half].end - at - 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (8 * n + c < begin || 8 * n + c >= end) x[n][2 * half + c] = hidden;
    }
}

}  // namespace softdelta::cuda::warpgroup
