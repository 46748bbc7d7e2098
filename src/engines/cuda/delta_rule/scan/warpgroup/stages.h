// Shared memory of the scan by warpgroups (roles.h): stages of chunks to come, and what one warpgroup hands to another.
#pragma once

#include "engines/cuda/delta_rule/chunk.h"
#include "engines/cuda/tile/ring.h"

namespace softdelta::cuda::chunk_scan {
inline constexpr int C = chunk_rows, slab = 64;                 // value columns of a warpgroup's state
inline constexpr int by_token_barrier = 2, output_barrier = 3;  // of those with states, of the outputs' warpgroup

// What a block scans: columns from the first on of a value head, in a sequence of the launch.
struct ScanPlace {
    int sequence, hv, first_column;
};

// slabs: warpgroups that have states, of 64 value columns each.
template <class T, int K, Keys keys, int slabs>
struct Shared {
    static constexpr bool channel = keys == Keys::with_gates, scored = channel || keys == Keys::scored;
    using Record = FoldedChunk<K, channel>;
    using Values = Tile<T, slabs * slab, C>;
    static constexpr int key_bytes = Record::key_bytes, square_bytes = Record::square_bytes;
    static constexpr int key_tiles = channel || keys == Keys::own_p ? 3 : 2;
    static constexpr int values = key_tiles * key_bytes, score = values + slabs * square_bytes,
                         solve = score + (scored ? square_bytes : 0), factors = solve + square_bytes,
                         after = factors + static_cast<int>(sizeof(ChunkFactors));
    static constexpr int stage_bytes = (after +
                                        (channel  ? K * 4
                                         : scored ? 0
                                                  : static_cast<int>(sizeof(KeyDecays))) +
                                        1023) /
                                       1024 * 1024;
    // As many stages as there is room for beside the state.
    static constexpr int state_bytes = slabs * slab * K * 2, most_bytes = 227 * 1024 - 1024,
                         room = (most_bytes - state_bytes) / stage_bytes, count = room < 4 ? room : 4;
    using Stages = Ring<count>;
    using Single = Ring<1>;
    static constexpr int state = count * stage_bytes, counters = state + state_bytes,
                         seen_counters = counters + Stages::bytes, update_counters = seen_counters + Stages::bytes,
                         state_counters = update_counters + Stages::bytes, by_token = state_counters + Single::bytes,
                         bytes = by_token + 4 * count;
    static_assert(count >= 2 && bytes <= 227 * 1024);
    static_assert(Values::bytes(C) <= key_bytes);  // outputs leave by way of the tile of q

    std::uint32_t base;

    __device__ std::uint32_t stage(int c, int offset) const {
        return base + static_cast<std::uint32_t>(Stages::stage(c) * stage_bytes + offset);
    }
    // As in a record: read, erase, write; those of plain keys read, write.
    __device__ KeyTile<T, K> read(int c) const { return {stage(c, 0)}; }
    __device__ KeyTile<T, K> erase(int c) const { return {stage(c, key_bytes)}; }
    __device__ KeyTile<T, K> write(int c) const { return {stage(c, (key_tiles - 1) * key_bytes)}; }
    __device__ Values values_of(int c) const { return {stage(c, values)}; }  // then U
    __device__ Values outputs_of(int c) const { return {stage(c, 0)}; }
    __device__ SquareTile<T> score_of(int c) const { return {stage(c, score)}; }
    __device__ SquareTile<T> solve_of(int c) const { return {stage(c, solve)}; }
    __device__ std::uint32_t record_of(int c) const { return stage(c, scored ? score : solve); }
    __device__ ChunkFactors& factors_of(int c) const {
        return *reinterpret_cast<ChunkFactors*>(shared_at(stage(c, factors)));
    }
    __device__ const KeyDecays& decays_of(int c) const {
        return *reinterpret_cast<const KeyDecays*>(shared_at(stage(c, after)));
    }
    __device__ const float* last_of(int c) const { return reinterpret_cast<const float*>(shared_at(stage(c, after))); }
    // Sᵀ before a chunk, as products read it.
    __device__ Tile<T, K, slabs * slab> state_copy() const { return {base + state}; }
    __device__ Stages stages() const { return {base + counters}; }
    __device__ Stages seen() const { return {base + seen_counters}; }       // ready for products, and looked at
    __device__ Stages updates() const { return {base + update_counters}; }  // U is in the place of the values
    __device__ Single states() const { return {base + state_counters}; }
    // Whether the chunk goes token by token.
    __device__ int& by_token_of(int c) const {
        return *reinterpret_cast<int*>(shared_at(base + by_token + 4u * static_cast<std::uint32_t>(Stages::stage(c))));
    }
    // Of so many threads that copy, and that look.
    __device__ void start(int copying, int looking) const {
        stages().start(2 * copying, 4 * (slabs + 1));
        seen().start(looking / 32, 1);
        updates().start(4 * slabs, 1);
        states().start(4 * slabs, 4);
    }
};

}  // namespace softdelta::cuda::chunk_scan
