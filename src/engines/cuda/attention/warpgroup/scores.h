// What comes between products and exponentials: scale, bias, slopes, soft cap, mask.
#pragma once

#include "engines/cuda/attention/warpgroup/added.h"

namespace softdelta::cuda::warpgroup {

enum class Between {
    nothing,      // but the scale
    bias,         // alone, of each query
    shared_bias,  // alone, a row that all queries share
    added,        // bias, mask, slopes
    cap           // and a mask: the gradients need the cap's derivative, and apply it with the exponential
};
__host__ __device__ constexpr bool is_bias_alone(Between between) {
    return between == Between::bias || between == Between::shared_bias;
}

// A soft cap with nothing else is left to the kernel. The stride of a bias that comes alone says whether queries share
// it. A kernel that stores dbias in its place (stores_tiles) needs its tiles even then.
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

// Whether Scores::take() scales the products: where anything is capped or added. Elsewhere the exponential does.
__device__ inline bool is_scaled(const AttentionCall& call, bool added) {
    return added || call.softcap != 0 || !(call.scale > 0);
}
// Of scores in e^x = 2^(c·x): what take() has left of the scale is in c, and in the factor of maxima.
__device__ inline float scale_left(const AttentionCall& call, bool added) {
    return is_scaled(call, added) ? 1.0F : call.scale;
}
__device__ inline float exponent_scale(const AttentionCall& call, bool added) {
    return is_scaled(call, added) ? log2_e : call.scale * log2_e;
}

// P·2^weight_exponent of a product q·k, which becomes what ds is multiplied by: P∘softcap'. x of −∞ is hidden.
template <class T>
__device__ inline float take_capped(float& x, const AttentionCall& call, float lse) {
    const float u = x * call.scale / call.softcap;
    const float e = ptx::exp2(-2 * log2_e * fabsf(u)), of = __fdividef(1.0F, 1 + e);
    const float score = copysignf(call.softcap * (1 - e) * of, u);
    const float p = x == -INFINITY ? 0.0F : ptx::exp2(fmaf(score, log2_e, -lse));
    x = p * (4 * e * of * of);
    return p;
}
// A product that is −∞ is not hidden.
template <int N>
__device__ inline void keep_from_hiding(Acc<64, N>& x) {
    x.each([](float& e, int, int) { e = e == -INFINITY ? -FLT_MAX : e; });
}

// The lane's part of a bias that comes alone, of a tile of 16 rows and N columns: it lies in registers before the
// products are there that it is added to.
template <class T, int N, bool shared>
class LoneBias {
  public:
    // Rows [row, row + 16) of a tile, rows of its transpose, or one row that all share.
    template <class Tile>
    __device__ void fetch(const Tile& tile, int row, int lane) {
        unrolled<N / 16>([&](int n) { tile.load_left(two_[n], row, n, lane); });
    }
    template <class Tile>
    __device__ void fetch_transposed(const Tile& tile, int row, int lane) {
        unrolled<N / 16>([&](int n) { tile.load_transposed_result(two_[n], 16 * n, row, lane); });
    }
    __device__ void fetch_shared(std::uint32_t base, int lane) {
        unrolled<N / 8>([&](int i) {
            two_[i / 2][i % 2] = *reinterpret_cast<const std::uint32_t*>(
                shared_at(base + static_cast<std::uint32_t>(16 * i + 4 * (lane % 4))));
        });
    }
    // What is added to the pair that begins at this column.
    __device__ float2 at(int half, int column) const {
        const int i = column / 8;
        return ptx::unpack(two_[i / 2][shared ? i % 2 : 2 * (i % 2) + half], T());
    }

  private:
    std::uint32_t two_[N / 16][shared ? 2 : 4];
};

// Products of a warp's 16 rows of the block's M and a tile of N columns made into scores: rows are queries and columns
// keys, or with by_key the other way round.
template <class T, int M, int N, Between between, bool by_key = false>
class Scores {
    static constexpr bool added = between == Between::added;
    using AddedTile = std::conditional_t<by_key, Added<T, N, M>, Added<T, M, N>>;
    using BiasTile = typename AddedTile::Bias;
    using Products = Acc<64, N>;

  public:
    // The warp's rows are [row, row + 16) of the block's, which begin at `first`.
    __device__ Scores(const AttentionCall& call, const AttentionSequence& s, int head, int first, int row, int lane)
        : call_(call), s_(s), head_(head), first_(first), row_(row), lane_(lane) {}

    // The mask's `bits` are read afterwards.
    __device__ void take(const BiasTile& bias, std::uint32_t bits, int at, Products& x) const {
        if constexpr (between == Between::cap) {
            if (call_.mask) hide_masked(bits, x);
            return;
        }
        if (!is_scaled(call_, added)) return;
        const bool sloped = call_.bias_slopes || call_.alibi_slopes;
        const bool simple = added && !by_key && call_.bias && !sloped && call_.softcap == 0;
        if (simple)
            scale_and_add(bias, x);
        else
            x.scale(call_.scale);
        if (!by_key && call_.softcap != 0) {
            x.each([&](float& e, int, int) {
                float slope;
                e = capped(e, call_.softcap, slope);
            });
        }
        if constexpr (added) {
            if (by_key && !sloped) {
                if (call_.bias) add(bias, x);
            } else if (!simple && (call_.bias || sloped)) {
                add_sloped(bias, at, x);
            }
            if (call_.mask) hide_masked(bits, x);
        }
    }

    // A bias that comes alone.
    template <bool shared>
    __device__ void take(const LoneBias<T, N, shared>& bias, Products& x) const {
        x.each_pair([&](float& e, float& next, int half, int column) {
            const float2 two = bias.at(half, column);
            e = fmaf(e, call_.scale, two.x);
            next = fmaf(next, call_.scale, two.y);
        });
    }

  private:
    __device__ void load(std::uint32_t (&four)[4], const BiasTile& bias, int n) const {
        if constexpr (by_key)
            bias.load_transposed_result(four, 16 * n, row_, lane_);
        else
            bias.load_left(four, row_, n, lane_);
    }
    __device__ void scale_and_add(const BiasTile& bias, Products& x) const {
        x.template each_pair_with<T>([&](auto& four, int n) { load(four, bias, n); },
                                     [&](float& e, float& next, float2 two, int, int) {
                                         e = fmaf(e, call_.scale, two.x);
                                         next = fmaf(next, call_.scale, two.y);
                                     });
    }
    __device__ void add(const BiasTile& bias, Products& x) const {
        x.template each_pair_with<T>([&](auto& four, int n) { load(four, bias, n); },
                                     [](float& e, float& next, float2 two, int, int) {
                                         // hidden, though its product is no number
                                         e = two.x == -INFINITY ? two.x : e + two.x;
                                         next = two.y == -INFINITY ? two.y : next + two.y;
                                     });
    }
    __device__ void add_sloped(const BiasTile& bias, int at, Products& x) const {
        const Slopes slopes(call_, s_, head_);
        x.template each_pair_with<T>(
            [&](auto& four, int n) {
                if (call_.bias) load(four, bias, n);
            },
            [&](float& e, float& next, float2 two, int half, int column) {
                const int row = first_ + row_ + lane_ / 4 + 8 * half, of = at + column + own_column(lane_);
                if constexpr (by_key) {
                    e = slopes.add(e, two.x, of, row);
                    next = slopes.add(next, two.y, of + 1, row);
                } else {
                    e = slopes.add(e, two.x, row, of);
                    next = slopes.add(next, two.y, row, of + 1);
                }
            });
    }
    __device__ void hide_masked(std::uint32_t bits, Products& x) const {
        const int row = row_ + lane_ / 4, own = own_column(lane_);
        x.each([&](float& e, int half, int column) {
            std::uint32_t seen;
            if constexpr (by_key)
                seen = AddedTile::load_word(bits, column + own, row_ / 32) >> (row % 32) >> (8 * half);
            else
                seen = AddedTile::load_word(bits, row + 8 * half, column / 32) >> own >> (column % 32);
            if ((seen & 1u) == 0) e = -INFINITY;
        });
    }

    const AttentionCall& call_;
    const AttentionSequence& s_;
    int head_, first_, row_, lane_;
};

}  // namespace softdelta::cuda::warpgroup
