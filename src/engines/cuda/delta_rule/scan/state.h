// A warp's part of a state in registers: 16 rows of Sᵀ [V, K] as accumulators, from and to memory.
#pragma once

#include <type_traits>

#include "engines/cuda/delta_rule/chunk.h"
#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/scan/lane_state.h"
#include "engines/cuda/delta_rule/tokens/chunk.h"

namespace softdelta::cuda {

// Blocks of `slab` value columns.
inline Blocks scan_blocks(const ChunkForward& of, int slab) {
    const int columns = of.out.kept.states ? KeptChunks::size : of.call.value_size;
    return {blocks_of(columns, slab), of.call.heads, of.sequences.count};
}

// Value columns of a block at most: a warp has 16, whose states its registers hold.
template <int K>
inline constexpr int most_slab = K > 128 ? 64 : 128;

// Of a value, what the state does not hold yet. factor: e^E, or β of gates of channels.
template <bool channel>
__device__ inline float rest(float value, float factor, float held) {
    return channel ? factor * (value - held) : value - factor * held;
}

template <class T, int K>
class ScanState {
    static constexpr int C = chunk_rows;

  public:
    __device__ ScanState(const ChunkForward& of, const DeltaSequence& s, int hv, int first_column, int warp)
        : call(of.call),
          s(s),
          out(of.out),
          interval(of.sequences.interval),
          hv(hv),
          first_column(first_column),
          warp(warp) {}

    __device__ void load_state() {
        const View v = s.state >= 0 ? call.initial_state : View();
        PlainState plain;
        auto& loaded = plain.of;
        load_lane_state<K>(&v, s.state * v.stride[0] + hv * v.stride[1], v.stride[call.state_row],
                           v.stride[call.state_column], call.key_size, call.value_size, own_column(), lane, loaded);
        for_each_in(loaded, [](float from, float& x) { x = from; });
    }
    __device__ void store_final_state() {
        if (!out.final_state || s.state < 0) return;
        const View& v = out.final_state;
        store_state(v, s.state * v.stride[0] + hv * v.stride[1], v.stride[call.state_row], v.stride[call.state_column]);
    }

    __device__ void store_saved(int c) {
        const View& v = out.states;
        const Index token = Index(c) * C;
        if (token % interval != 0) return;
        store_state(v, s.batch * v.stride[0] + (s.first_saved + token / interval) * v.stride[1] + hv * v.stride[2],
                    v.stride[call.state_row + 1], v.stride[call.state_column + 1]);
    }

    // A state near the largest number of f16, 65504: products read it, and what it makes of keys, as f16. Of f32: one
    // whose products may overflow.
    __device__ bool is_too_large() const {
        constexpr float largest = sizeof(T) == 4 ? 0x1p100F : 4096;
        return !std::is_same_v<T, __nv_bfloat16> &&
               any_of<K / 8, 4>([&](int n, int i) { return !(fabsf(state[n][i]) <= largest); });
    }
    __device__ void take_chunk_by_token(int c) {
        WideState<K> wide;
        for_each_in(wide, [](double& to, float& x) { to = static_cast<double>(x); });
        const View o = out.o;
        take_tokens<K>(&call, s, hv, Index(c) * C, s.rows(c), own_column(), lane, &o, wide);
        for_each_in(wide, [](double& from, float& x) { x = static_cast<float>(from); });
    }

    // S before a chunk, and why it goes token by token; its U, through columns of a tile that are the warp's own. kept:
    // where they lie in out.kept.
    __device__ void keep_state(int reason, bool nonfinite, Index kept) const {
        std::uint32_t packed[K / 16][operand_words<T>];
        to_left<T>(packed, state);
        save_state<T, K>(out.kept.states + kept * KeptChunks::state_elements * static_cast<int>(sizeof(T)),
                         own_column(), lane, packed);
        if (lane == 0) out.kept.keep_reason<T>(kept, reason, nonfinite, call.gate == core::Gate::channel);
    }
    template <class Values, class Sums>
    __device__ void keep_values(const Values& values, const Sums& u, Index kept) const {
        const RowsToTile<T> to{out.kept.U + kept * KeptChunks::value_elements * static_cast<int>(sizeof(T)),
                               first_column, KeptChunks::size};
        if constexpr (sizeof(T) == 4)
            store_transposed<T>(values, warp, lane, u, to);
        else
            store_transposed(values, warp, lane, u, to);
    }

    const DeltaCall& call;
    const DeltaSequence& s;
    const ChunkOutputs& out;
    const Index& interval;  // of states on the way
    const int hv, first_column, warp;
    int lane = static_cast<int>(threadIdx.x) % 32;
    float state[K / 8][4];

  private:
    // No plain array, for the compiler would put others of its size into its place in memory: sums of products.
    struct PlainState {
        LaneState<K> of;
    };

    __device__ int own_column() const { return first_column + 16 * warp + lane / 4; }
    __device__ void store_state(const View& to, Index offset, Index row, Index column_step) {
        const View v = to;
        PlainState plain;
        auto& stored = plain.of;
        for_each_in(stored, [](float& x, float from) { x = from; });
        store_lane_state<K>(&v, offset, row, column_step, call.key_size, call.value_size, own_column(), lane, stored);
    }
    template <class Number, class Visit>
    __device__ void for_each_in(Number (&wide)[K / 8][4], Visit&& visit) {
        unrolled<K / 8, 4>([&](int n, int i) { visit(wide[n][i], state[n][i]); });
    }
};

}  // namespace softdelta::cuda
