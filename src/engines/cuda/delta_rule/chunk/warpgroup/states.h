// The warpgroup that goes from state to state:
//
//     Rᵀ = vᵀ − (Sᵀ pᵀ)∘e^E     Uᵀ = Rᵀ solveᵀ     Sᵀ = e^G_last·Sᵀ + (Uᵀ∘e^(G_last − G)) k
//
// (gates of channels: chunk/scan.h), and nothing else: Uᵀ goes to the other (outputs.h) while products run.
#pragma once

#include "engines/cuda/delta_rule/chunk/scan_state.h"
#include "engines/cuda/delta_rule/chunk/warpgroup/stages.h"

namespace softdelta::cuda::chunk_scan {

// keeps: S before each chunk and U go to out.kept.
template <class T, int K, Keys keys, bool keeps>
class States : public ScanState<T, K> {
    using Layout = Shared<T, K, keys>;
    using State = ScanState<T, K>;
    using State::call_, State::hv_, State::lane_, State::out_, State::state_, State::warp_;
    static constexpr bool channel = Layout::channel, erases = keys != Keys::only_written;

  public:
    using ScanState<T, K>::ScanState;

    // slot: of the first chunk.
    __device__ void run(const Layout& shared, int chunks, Index slot) {
        this->load_state();
        if (shared.begins_with_state(call_, this->s_)) {
            give_state(shared, 0);
            __syncthreads();
            __syncthreads();
        }
        for (int c = 0; c < chunks; ++c) {
            if (out_.states) [[unlikely]]
                this->store_saved(c);
            shared.seen().wait_until_there(c);
            bool odd = false;
            if constexpr (std::is_same_v<T, __half>) odd = ptx::any(odd_barrier, group, this->is_too_large());
            if (odd || !take(shared, c, (slot + c) * call_.heads + hv_)) skip(shared, c);
            shared.stages().release(c, lane_);
        }
        this->store_final_state();
    }

  private:
    // Token by token, outputs included; their warpgroup gets the state. The scores' has read the keys, where it needs
    // them.
    __device__ void skip(const Layout& shared, int c) {
        this->take_chunk_by_token(c);
        if (!out_.o) return;
        if constexpr (!Layout::scored) shared.scores().wait_until_there(c);
        shared.updates().wait_until_free(c);
        ptx::barrier(odd_barrier, group);  // no warp multiplies what the state takes the place of
        give_state(shared, c);
        shared.updates().announce(c, lane_);
    }
    __device__ void give_state(const Layout& shared, int c) const {
#pragma unroll
        for (int n = 0; n < K / 8; ++n)
            shared.state_of(c, n, static_cast<int>(threadIdx.x)) = {state_[n][0], state_[n][1], state_[n][2],
                                                                    state_[n][3]};
    }
    // False, and nothing done, where the chunk is odd. Where others can be waited for, products run.
    __device__ bool take(const Layout& shared, int c, Index kept) {
        const ChunkFactors& f = shared.factors_of(c);
        const int pair = 2 * (lane_ % 4);
        float x[C / 8][4] = {};
        std::uint32_t value[C / 16][4];
        float2 erase[C / 8], write[C / 8];
        {
            std::uint32_t state[K / 16][4];
            to_left<T>(state, state_);
            if constexpr (erases) {
                ptx::begin_products(state, x);
                multiply(x, state, shared.erase(c));
                ptx::commit_products();
            }
            const bool odd = shared.odd_of(c) != 0;
            const SquareTile<T> values = shared.values_of(c);
#pragma unroll
            for (int n = 0; n < C / 16; ++n) values.load_transposed_result(value[n], 16 * n, warp_, lane_);
            if constexpr (erases) load_factors(f.erase, erase);
            if constexpr (keeps) this->keep_state(f.by_token, odd, kept);
            if (odd) [[unlikely]] {
                if constexpr (erases) ptx::wait_for_products<0>(x);
                return false;
            }
            decay_state(shared, c);
        }
        if constexpr (erases) ptx::wait_for_products<0>(x);
#pragma unroll
        for (int n = 0; n < C / 16; ++n)
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                float(&to)[4] = x[2 * n + m / 2];
                const float2 both = ptx::unpack(value[n][m], T());
                const float2 factor = erases ? erase[2 * n + m / 2] : float2{1, 1};
                to[2 * (m % 2)] = rest<channel>(both.x, factor.x, to[2 * (m % 2)]);
                to[2 * (m % 2) + 1] = rest<channel>(both.y, factor.y, to[2 * (m % 2) + 1]);
            }
        if constexpr (erases) {
            std::uint32_t r[C / 16][4];
            to_left<T>(r, x);
            ptx::begin_products(r, x);
            multiply(x, r, shared.solve_of(c));
            ptx::commit_products();
        }
        if constexpr (!channel) load_factors(f.write, write);
        if constexpr (erases) ptx::wait_for_products<0>(x);
        std::uint32_t u[C / 16][4], written[C / 16][4];
        to_left<T>(u, x);
        if constexpr (!channel) {
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) x[n][i] *= i % 2 == 0 ? write[n].x : write[n].y;
        }
        to_left<T>(written, x);
        ptx::begin_products(written, state_);
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth)
            ptx::warpgroup_multiply_mn_major(state_, written[depth], shared.write(c).mn_major_operand(depth), true,
                                             T());
        ptx::commit_products();
        if constexpr (keeps) this->keep_values(shared.values_of(c), u, kept);
        if (out_.o) {
            shared.updates().wait_until_free(c);
            store_left(shared.update_copy(), u);
            if constexpr (!channel) {
                to_left<T>(u, x);  // those that are multiplied are not to be read
                store_left(shared.written_copy(), u);
            }
            shared.updates().announce(c, lane_);
        }
        ptx::wait_for_products<0>(state_);
        return true;
    }
    // Of the lane's columns.
    __device__ void load_factors(const float* from, float2 (&factors)[C / 8]) const {
#pragma unroll
        for (int n = 0; n < C / 8; ++n) factors[n] = *reinterpret_cast<const float2*>(from + 8 * n + 2 * (lane_ % 4));
    }
    __device__ void decay_state(const Layout& shared, int c) {
        const float all = channel ? 1.0F : shared.factors_of(c).last;
#pragma unroll
        for (int n = 0; n < K / 8; ++n) {
            float2 last = {all, all};
            if (channel) last = *reinterpret_cast<const float2*>(shared.last_of(c) + 8 * n + 2 * (lane_ % 4));
#pragma unroll
            for (int i = 0; i < 4; ++i) state_[n][i] *= i % 2 == 0 ? last.x : last.y;
        }
    }
    // x [64, 64] = left [64, 16·depths] rightᵀ
    template <int depths, class Right>
    __device__ static void multiply(float (&x)[C / 8][4], const std::uint32_t (&left)[depths][4], const Right& right) {
#pragma unroll
        for (int depth = 0; depth < depths; ++depth)
            ptx::warpgroup_multiply(x, left[depth], right.rows_operand(depth), depth > 0, T());
    }
    // The warp's 16 rows, held as left operands.
    template <int depths, class Rows>
    __device__ void store_left(const Rows& to, const std::uint32_t (&x)[depths][4]) const {
#pragma unroll
        for (int depth = 0; depth < depths; ++depth)
            ptx::store_matrices(to.unit(16 * warp_ + lane_ % 16, 2 * depth + lane_ / 16), x[depth]);
    }
};

}  // namespace softdelta::cuda::chunk_scan
