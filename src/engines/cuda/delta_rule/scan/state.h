// A warp's part of a state in registers: 16 rows of Sᵀ [V, K] as accumulators, from and to memory.
#pragma once

#include <type_traits>

#include "engines/cuda/delta_rule/chunk.h"
#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/scan/lane_state.h"
#include "engines/cuda/delta_rule/tokens/chunk.h"

namespace softdelta::cuda {

// Blocks of `slab` value columns.
inline dim3 scan_blocks(const DeltaCall& call, const DeltaSequences& sequences, const ChunkOutputs& out, int slab) {
    const int columns = out.kept.states ? KeptChunks::size : call.value_size;
    return {static_cast<unsigned>((columns + slab - 1) / slab), static_cast<unsigned>(call.heads),
            static_cast<unsigned>(sequences.count)};
}

// Of a value, what the state does not hold yet. factor: e^E, or β of gates of channels.
template <bool channel>
__device__ inline float rest(float value, float factor, float held) {
    return channel ? factor * (value - held) : value - factor * held;
}

template <class T, int K>
class ScanState {
    static constexpr int C = chunk_rows;

  public:
    __device__ ScanState(const DeltaCall& call, const DeltaSequences& sequences, const DeltaSequence& s,
                         const ChunkOutputs& out, int hv, int first_column, int warp)
        : call_(call),
          sequences_(sequences),
          s_(s),
          out_(out),
          hv_(hv),
          first_column_(first_column),
          warp_(warp),
          lane_(static_cast<int>(threadIdx.x) % 32) {}

    __device__ void load_state() {
        const View v = s_.state >= 0 ? call_.initial_state : View();
        PlainState plain;
        auto& state = plain.of;
        load_lane_state<K>(&v, s_.state * v.stride[0] + hv_ * v.stride[1], v.stride[call_.state_row],
                           v.stride[call_.state_column], call_.key_size, call_.value_size, own_column(), lane_, state);
        for_each_in(state, [](float from, float& x) { x = from; });
    }
    __device__ void store_final_state() {
        if (!out_.final_state || s_.state < 0) return;
        const View& v = out_.final_state;
        store_state(v, s_.state * v.stride[0] + hv_ * v.stride[1], v.stride[call_.state_row],
                    v.stride[call_.state_column]);
    }

    __device__ void store_saved(int c) {
        const View& v = out_.states;
        const Index token = Index(c) * C;
        if (token % sequences_.interval != 0) return;
        store_state(
            v,
            s_.batch * v.stride[0] + (s_.first_saved + token / sequences_.interval) * v.stride[1] + hv_ * v.stride[2],
            v.stride[call_.state_row + 1], v.stride[call_.state_column + 1]);
    }

    // A state near the largest number of f16, 65504: products read it, and what it makes of keys, as f16.
    __device__ bool is_too_large() const {
        bool nonfinite = false;
        if constexpr (std::is_same_v<T, __half>) {
            constexpr float largest_state = 4096;
#pragma unroll
            for (int n = 0; n < K / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) nonfinite = nonfinite || !(fabsf(state_[n][i]) <= largest_state);
        }
        return nonfinite;
    }
    __device__ void take_chunk_by_token(int c) {
        WideState<K> wide;
        for_each_in(wide, [](double& to, float& x) { to = static_cast<double>(x); });
        const View o = out_.o;
        take_tokens<K>(&call_, s_, hv_, Index(c) * C, rows(c), own_column(), lane_, &o, wide);
        for_each_in(wide, [](double& from, float& x) { x = static_cast<float>(from); });
    }

    // S before a chunk, and why it goes token by token; its U, through columns of a tile that are the warp's own. kept:
    // where they lie in out.kept.
    __device__ void keep_state(int reason, bool nonfinite, Index kept) const {
        std::uint32_t state[K / 16][4];
        to_left<T>(state, state_);
        save_state<T, K>(out_.kept.states + kept * KeptChunks::state_bytes, own_column(), lane_, state);
        if (lane_ == 0) out_.kept.keep_reason(kept, reason, nonfinite, call_.gate == core::Gate::channel);
    }
    template <class Values>
    __device__ void keep_values(const Values& values, const std::uint32_t (&u)[C / 16][4], Index kept) const {
        save_rows(values, warp_, lane_, u, first_column_, KeptChunks::size,
                  out_.kept.U + kept * KeptChunks::value_bytes);
    }

  protected:
    __device__ int rows(int c) const {
        return static_cast<int>(min(s_.count - Index(c) * C, Index(C)));
    }

    const DeltaCall& call_;
    const DeltaSequences& sequences_;
    const DeltaSequence& s_;
    const ChunkOutputs& out_;
    const int hv_, first_column_, warp_;
    int lane_;
    float state_[K / 8][4];

  private:
    // No plain array, for the compiler would put others of its size into its place in memory: sums of products.
    struct PlainState {
        LaneState<K> of;
    };

    __device__ int own_column() const {
        return first_column_ + 16 * warp_ + lane_ / 4;
    }
    __device__ void store_state(const View& to, Index offset, Index row, Index column_step) {
        const View v = to;
        PlainState plain;
        auto& state = plain.of;
        for_each_in(state, [](float& x, float from) { x = from; });
        store_lane_state<K>(&v, offset, row, column_step, call_.key_size, call_.value_size, own_column(), lane_, state);
    }
    template <class Number, class Visit>
    __device__ void for_each_in(Number (&wide)[K / 8][4], Visit&& visit) {
#pragma unroll
        for (int n = 0; n < K / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) visit(wide[n][i], state_[n][i]);
    }
};

}  // namespace softdelta::cuda
