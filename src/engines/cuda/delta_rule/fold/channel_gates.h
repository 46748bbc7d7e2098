// Gates of channels, two channels and 16 rows for a thread.
#pragma once

#include <type_traits>

#include "engines/cuda/delta_rule/gate.h"

namespace softdelta::cuda {
class PairGates {
  public:
    float2 g[16];

    // Channels m and m + 1 of value head hv; rows beyond `rows` have 0.
    __device__ PairGates(const DeltaCall& call, int hv, int m, int rows)
        : g{}, call_(call), m_(m), rows_(rows), dt_{0, 0}, given_(false), packed_(false) {
        if (rows <= 0 || !call.raw.bias) return;
        const View& bias = call.raw.bias;
        const Index first = (Index(hv) * call.key_size + m) * bias.stride[0];
        dt_ = {cuda::load(bias, first), cuda::load(bias, first + bias.stride[0])};
    }

    // What the caller gave from this row on. Loads of pairs that lie side by side do not wait for each other: those of
    // 16 bits stay as they are, in x, until make().
    __device__ void load(Index first_row) {
        const View& v = call_.g;
        given_ = true;
        with_type(v, [&](const auto* data) {
            using G = std::remove_cvref_t<decltype(*data)>;
            const G* at = data + first_row + m_ * v.stride[3];
            const bool pairs =
                v.stride[3] == 1 && v.stride[1] % 2 == 0 && reinterpret_cast<std::uintptr_t>(at) % (2 * sizeof(G)) == 0;
            if (!pairs) {
#pragma unroll 1
                for (int i = 0; i < 16; ++i) {
                    float2 both = {0, 0};
                    if (i < rows_) both = {to_float(at[i * v.stride[1]]), to_float(at[i * v.stride[1] + v.stride[3]])};
                    unrolled<16>([&](int to) {
                        if (to == i) g[to] = both;
                    });
                }
                return;
            }
            packed_ = sizeof(G) == 2;
            unrolled<16>([&](int i) {
                if constexpr (sizeof(G) == 4)
                    g[i] = ptx::load_pair(at, i < rows_);
                else
                    g[i].x = __uint_as_float(ptx::load_word(at, i < rows_));
                at += v.stride[1];
            });
        });
    }
    __device__ void make(const HeadGate& head) {
        if (packed_) unpack();
        if (!given_) {
            for_each([&](float, float) { return head.constant; });
        } else if (call_.raw_gate == core::RawGate::softplus) {
            for_each([&](float x, float dt) { return -head.rate * fast_softplus(x + dt); });
        } else if (call_.raw_gate == core::RawGate::lower_bound) {
            // σ(x) = 1 / (1 + e^−x): e^−x may be infinite, and then σ(x) is 0.
            const float bound = static_cast<float>(call_.lower_bound), rate = -log2_e * head.rate;
            for_each([&](float x, float dt) { return __fdividef(bound, 1 + ptx::exp2(rate * (x + dt))); });
        }
        if (rows_ >= 16) return;
        unrolled<16>([&](int i) {
            if (i >= rows_) g[i] = {0, 0};
        });
    }
    // Whether those of a channel that are positive exceed this together, or one is NaN.
    __device__ bool rise_far(float most) const {
        if (!any_of<16>([&](int i) { return !(g[i].x <= 0 && g[i].y <= 0); })) return false;
        float x = 0, y = 0;
        unrolled<16>([&](int i) {
            x += fmaxf(g[i].x, 0.0F);
            y += fmaxf(g[i].y, 0.0F);
        });
        return any_of<16>([&](int i) { return isnan(g[i].x) || isnan(g[i].y); }) || !(fmaxf(x, y) <= most);
    }

  private:
    template <class Gate>
    __device__ void for_each(const Gate& gate) {
        unrolled<16>([&](int i) { g[i] = {gate(g[i].x, dt_.x), gate(g[i].y, dt_.y)}; });
    }
    __device__ void unpack() {
        const bool bf16 = call_.g.dtype == DType::bf16;
        unrolled<16>([&](int i) {
            float2& x = g[i];
            const std::uint32_t both = __float_as_uint(x.x);
            x = bf16 ? ptx::unpack(both, __nv_bfloat16()) : ptx::unpack(both, __half());
        });
    }

    const DeltaCall& call_;
    const int m_, rows_;
    float2 dt_;
    bool given_, packed_;
};

}  // namespace softdelta::cuda
