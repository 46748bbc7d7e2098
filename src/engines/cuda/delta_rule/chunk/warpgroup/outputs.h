// The warpgroup of the outputs: oᵀ = (Sᵀ qᵀ)∘scale·e^G + Uᵀ scoreᵀ. It has a state of its own, which follows the other
// warpgroup's: that one waits for nothing but its Uᵀ to be taken.
#pragma once

#include "engines/cuda/delta_rule/chunk/rows.h"
#include "engines/cuda/delta_rule/chunk/scan_state.h"
#include "engines/cuda/delta_rule/chunk/warpgroup/stages.h"

namespace softdelta::cuda::chunk_scan {

template <class T, int K, Keys keys>
class Outputs : public ScanState<T, K> {
    using Layout = Shared<T, K, keys>;
    using State = ScanState<T, K>;
    using State::call_, State::first_column_, State::hv_, State::lane_, State::out_, State::rows, State::s_,
        State::state_, State::warp_;
    static constexpr bool channel = Layout::channel;

  public:
    using ScanState<T, K>::ScanState;

    __device__ void run(const Layout& shared, int chunks) {
        for (auto& four : state_)
            for (float& x : four) x = 0;
        if (shared.begins_with_state(call_, s_)) {  // the other warpgroup loads it
            __syncthreads();
            take_state(shared, 0);
            __syncthreads();
        }
        for (int c = 0; c < chunks; ++c) {
            shared.seen().wait_until_there(c);
            if (out_.o) take(shared, c);
            shared.stages().release(c, lane_);
        }
    }

  private:
    __device__ void take(const Layout& shared, int c) {
        if (goes_by_token(shared, c)) [[unlikely]] {  // then its state comes in the place of q
            shared.updates().wait_until_there(c);
            if constexpr (!Layout::scored) shared.scores().wait_until_there(c);
            take_state(shared, c);
            shared.updates().release(c, lane_);
            if constexpr (!Layout::scored) shared.scores().release(c, lane_);
            return;
        }
        const int pair = 2 * (lane_ % 4);
        float x[C / 8][4] = {};
        std::uint32_t state[K / 16][4];
        to_left<T>(state, state_);
        ptx::begin_products(state, x);
#pragma unroll
        for (int depth = 0; depth < K / 16; ++depth)
            ptx::warpgroup_multiply(x, state[depth], shared.read(c).rows_operand(depth), depth > 0, T());
        ptx::commit_products();
        const float all = channel ? 1.0F : shared.factors_of(c).last;
#pragma unroll
        for (int n = 0; n < K / 8; ++n) {
            float2 last = {all, all};
            if (channel) last = *reinterpret_cast<const float2*>(shared.last_of(c) + 8 * n + pair);
#pragma unroll
            for (int i = 0; i < 4; ++i) state_[n][i] *= i % 2 == 0 ? last.x : last.y;
        }
        shared.updates().wait_until_there(c);
        if constexpr (!Layout::scored) shared.scores().wait_until_there(c);
        ptx::wait_for_products<0>(x);
        std::uint32_t u[C / 16][4], written[C / 16][4];
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth) {
            shared.update_copy().load_left(u[depth], 16 * warp_, depth, lane_);
            shared.written_copy().load_left(written[depth], 16 * warp_, depth, lane_);
        }
        shared.updates().release(c, lane_);
        if constexpr (!channel) {
#pragma unroll
            for (int n = 0; n < C / 8; ++n) {
                const float2 read = *reinterpret_cast<const float2*>(shared.factors_of(c).read + 8 * n + pair);
#pragma unroll
                for (int i = 0; i < 4; ++i) x[n][i] *= i % 2 == 0 ? read.x : read.y;
            }
        }
        ptx::begin_products(u, x, written, state_);
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth)
            ptx::warpgroup_multiply(x, u[depth], shared.score_of(c).rows_operand(depth), true, T());
        ptx::commit_products();
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth)
            ptx::warpgroup_multiply_mn_major(state_, written[depth], shared.write(c).mn_major_operand(depth), true,
                                             T());
        ptx::commit_products();
        ptx::wait_for_products<1>(x);
        if constexpr (!Layout::scored) shared.scores().release(c, lane_);
        store(shared.values_of(c), c, x);
        ptx::wait_for_products<0>(state_);
    }
    // As the other warpgroup decides it: both have the same state.
    __device__ bool goes_by_token(const Layout& shared, int c) const {
        const bool odd = shared.odd_of(c) != 0;
        if constexpr (std::is_same_v<T, __half>) return ptx::any(output_barrier, group, odd || this->is_too_large());
        return odd;
    }
    __device__ void take_state(const Layout& shared, int c) {
#pragma unroll
        for (int n = 0; n < K / 8; ++n) {
            const float4 from = shared.state_of(c, n, static_cast<int>(threadIdx.x) % group);
            state_[n][0] = from.x, state_[n][1] = from.y, state_[n][2] = from.z, state_[n][3] = from.w;
        }
    }
    // Through the tile of values, which nobody reads any more.
    __device__ void store(const SquareTile<T>& values, int c, const float (&x)[C / 8][4]) const {
        const View& o = out_.o;
        auto* data = static_cast<T*>(o.data) + s_.batch * o.stride[0] + (s_.begin + Index(c) * C) * o.stride[1] +
                     hv_ * o.stride[2] + first_column_;
        store_transposed<T>(values, warp_, lane_, x, [&](int row, int u, const uint4& eight) {
            if (row < rows(c) && first_column_ + 8 * u < call_.value_size)
                *reinterpret_cast<uint4*>(data + row * o.stride[1] + 8 * u) = eight;
        });
    }
};

}  // namespace softdelta::cuda::chunk_scan
