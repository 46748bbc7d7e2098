// Bias and mask of a tile [M queries, N keys] in shared memory: bias as 16-bit numbers, mask as a bit for each key.
#pragma once

#include <cfloat>

#include "engines/cuda/attention/addends.h"
#include "engines/cuda/attention/warpgroup/boxes.h"

namespace softdelta::cuda::warpgroup {

inline constexpr float log2_e = 1.44269504F;

// Whether a bias can be copied eight keys at a time.
inline bool has_bias_units(const View& bias, DType type) {
    return bias.dtype == type && bias.stride[3] == 1 && bias.stride[0] % 8 == 0 && bias.stride[1] % 8 == 0 &&
           bias.stride[2] % 8 == 0 && reinterpret_cast<std::uintptr_t>(bias.data) % 16 == 0;
}

template <class T, int M, int N>
class Added {
    static constexpr int words = N / 32, own_words = M * words / warpgroup_threads;

  public:
    using Bias = Tile<T, N, M>;
    static constexpr int bits_bytes = M * words * 4;

    __device__ Added(const AttentionCall& call, const AttentionSequence& s, int head)
        : call_(call),
          s_(s),
          head_(head),
          mask_(static_cast<const std::uint8_t*>(call.mask.data) + s.mask_batch * call.mask.stride[0] +
                head / call.mask_group * call.mask.stride[1]),
          bias_(static_cast<const T*>(call.bias.data) + s.mask_batch * call.bias.stride[0] +
                head / call.bias_group * call.bias.stride[1]) {}

    // Queries from i on, keys from j on, a multiple of 8; by a warpgroup, in the background.
    __device__ void copy_bias(const Bias& place, Index i, Index j, int thread) const {
        constexpr int step = warpgroup_threads / Bias::units;
        const int u = thread % Bias::units, begin = thread / Bias::units;
        const Index key = j + 8 * u;
        const int keys = static_cast<int>(min(max(s_.k_count - key, Index(0)), Index(8)));
        const int left = keys > 0 ? static_cast<int>(min(s_.q_count - i, Index(M))) - begin : 0;
        const std::uint32_t to = place.unit(begin, u);
        const T* at = bias_ + (i + begin) * call_.bias.stride[2] + key;
        const Index distance = step * call_.bias.stride[2];
        if (0 < keys && keys < 8) return copy_row_ends<M, step>(to, at, distance, left, keys);
        copy_unit_of_rows<M, step>(to, at, distance, left, bias_);
    }

    // One row, which all queries share.
    __device__ void copy_shared_bias(std::uint32_t place, Index j, int thread) const {
        if (thread >= N / 8) return;
        const Index key = j + 8 * thread;
        const int keys = static_cast<int>(min(max(s_.k_count - key, Index(0)), Index(8)));
        const std::uint32_t to = place + static_cast<std::uint32_t>(16 * thread);
        if (0 < keys && keys < 8) return copy_row_ends<1, 1>(to, bias_ + key, 0, 1, keys);
        ptx::copy_async(to, keys > 0 ? bias_ + key : bias_, keys > 0);
    }

    // Either of them for a ring's stage, whose mbarrier TMA's bytes arrive at.
    template <bool by_tma>
    __device__ void bring_bias(const Bias& place, const Boxes& boxes, Index i, Index j, int thread,
                               std::uint32_t full) const {
        if constexpr (by_tma)
            copy_panels(place, boxes, static_cast<int>(j), static_cast<int>(i), box_head(), box_batch(), full);
        else
            copy_bias(place, i, j, thread);
    }
    template <bool by_tma>
    __device__ void bring_shared_bias(std::uint32_t place, const Boxes& boxes, Index j, int thread,
                                      std::uint32_t full) const {
        if constexpr (by_tma)
            copy_box(place, boxes, static_cast<int>(j), 0, box_head(), box_batch(), full);
        else
            copy_shared_bias(place, j, thread);
    }

    // The thread's part of the bits, and where it goes.
    struct Bits {
        std::uint32_t word[own_words];
    };
    __device__ Bits load_bits(Index i, Index j, int thread) const {
        Bits bits;
        const Index row = i + thread * own_words / words, first = j + thread * own_words % words * 32;
        const Index* stride = call_.mask.stride;
        const std::uint8_t* from = mask_ + row * stride[2] + first * stride[3];
#pragma unroll
        for (int w = 0; w < own_words; ++w) {
            bits.word[w] = 0;
            const Index left = row < s_.q_count ? s_.k_count - first - 32 * w : Index(0);
            if (left <= 0) continue;
            if (stride[3] == 0) {
                bits.word[w] = *from != 0 ? ~0u : 0u;
            } else if (left >= 32 && stride[3] == 1 && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
                const uint4 low = *reinterpret_cast<const uint4*>(from + 32 * w);
                const uint4 high = *reinterpret_cast<const uint4*>(from + 32 * w + 16);
                bits.word[w] = four(low.x) | four(low.y) << 4 | four(low.z) << 8 | four(low.w) << 12 |
                               four(high.x) << 16 | four(high.y) << 20 | four(high.z) << 24 | four(high.w) << 28;
            } else {
#pragma unroll 1
                for (int c = 0; c < 32 && c < left; ++c)
                    bits.word[w] |= std::uint32_t{from[(32 * w + c) * stride[3]] != 0} << c;
            }
        }
        return bits;
    }
    __device__ static void store_bits(std::uint32_t to, const Bits& bits, int thread) {
        unrolled<own_words>([&](int w) {
            *reinterpret_cast<std::uint32_t*>(
                shared_at(to + static_cast<std::uint32_t>(4 * (thread * own_words + w)))) = bits.word[w];
        });
    }
    // 32 keys of a query.
    __device__ static std::uint32_t load_word(std::uint32_t bits, int row, int word) {
        return *reinterpret_cast<const std::uint32_t*>(
            shared_at(bits + static_cast<std::uint32_t>(4 * (row * words + word))));
    }

  private:
    __device__ int box_head() const {
        return coordinate(call_.bias, 1, head_ / call_.bias_group);
    }
    __device__ int box_batch() const {
        return coordinate(call_.bias, 0, s_.mask_batch);
    }

    // Of rows that end within the unit, element by element: copies in the background are whole units.
    template <int rows, int step>
    __device__ static void copy_row_ends(std::uint32_t to, const T* at, Index distance, int left, int keys) {
#pragma unroll 1
        for (int r = 0; r < rows; r += step, at += distance) {
            std::uint32_t two[4] = {};
            unrolled<7>([&](int e) {
                if (r < left && e < keys)
                    two[e / 2] |= std::uint32_t{reinterpret_cast<const std::uint16_t*>(at)[e]} << (16 * (e % 2));
            });
            *reinterpret_cast<uint4*>(shared_at(to + static_cast<std::uint32_t>(r * 128))) =
                uint4{two[0], two[1], two[2], two[3]};
        }
    }

    // A bit for each of four bytes that is not 0.
    __device__ static std::uint32_t four(std::uint32_t x) {
        const std::uint32_t ones = (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) >> 7 & 0x01010101u;
        return ones * 0x10204080u >> 28;
    }

    const AttentionCall& call_;
    const AttentionSequence& s_;
    int head_;
    const std::uint8_t* mask_;
    const T* bias_;
};

// What a head adds to its scores besides the bias as it lies.
struct Slopes {
    float bias = 1, alibi = 0;
    int diagonal = 0;  // key minus query where the distance is 0

    __device__ Slopes(const AttentionCall& call, const AttentionSequence& s, int head)
        : bias(bias_slope(call, head)),
          alibi(alibi_slope(call, head)),
          diagonal(static_cast<int>(s.k_count - s.q_count)) {}

    // A score with what is added to it: finite numbers stay finite.
    __device__ float add(float score, float x, int query, int key) const {
        if (x == -INFINITY) return x;  // masks, whatever the slope
        const int distance = query + diagonal - key;
        const float sum = bias * x - alibi * static_cast<float>(distance < 0 ? -distance : distance);
        score += isnan(x) ? x : fminf(fmaxf(sum, -FLT_MAX), FLT_MAX);
        return score < -FLT_MAX ? -FLT_MAX : score;
    }
};

// A score and, if wanted, its derivative by what is capped: cap·tanh(x / cap).
__device__ inline float capped(float x, float cap, float& slope) {
    const float e = ptx::exp2(-2 * log2_e * fabsf(x / cap)), t = (1 - e) / (1 + e);
    slope = 4 * e / ((1 + e) * (1 + e));
    return copysignf(cap * t, x);
}

}  // namespace softdelta::cuda::warpgroup
