// Shared memory of the scan by warpgroups (roles.h): stages of chunks to come, and what one warpgroup hands to another.
#pragma once

#include "engines/cuda/delta_rule/chunk/folded.h"
#include "engines/cuda/warpgroup/pipeline.h"

namespace softdelta::cuda::chunk_scan {

inline constexpr int C = chunk_rows, slab = 64;                      // value columns of a block
inline constexpr int group = 128;                                    // threads
inline constexpr int odd_barrier = 2, output_barrier = 3;            // of one warpgroup each
enum class Keys { plain, scored, own_p, with_gates, only_written };  // scored: plain, and the record has scores

// What a block scans: columns from the first on of a value head, in a sequence of the launch.
struct ScanPlace {
    int sequence, hv, first_column;
};

template <class T, int K, Keys keys>
struct Shared {
    static constexpr bool channel = keys == Keys::with_gates, scored = channel || keys == Keys::scored;
    using Record = FoldedChunk<K, channel>;
    static constexpr int key_bytes = Record::key_bytes, square_bytes = Record::square_bytes;
    static constexpr int key_tiles = channel || keys == Keys::own_p ? 3 : 2;
    static constexpr int values = key_tiles * key_bytes, score = values + square_bytes,
                         solve = score + (scored ? square_bytes : 0), factors = solve + square_bytes,
                         after = factors + static_cast<int>(sizeof(ChunkFactors));
    static constexpr int stage_bytes = (after +
                                        (channel  ? K * 4
                                         : scored ? 0
                                                  : static_cast<int>(sizeof(KeyDecays))) +
                                        1023) /
                                       1024 * 1024;
    static constexpr int count = channel ? 2 : 3;
    using Stages = Pipeline<count>;
    using Single = Pipeline<1>;
    static constexpr int update = count * stage_bytes, written = update + (channel ? 0 : square_bytes),
                         made_score = written + square_bytes, counters = made_score + (scored ? 0 : square_bytes);
    static constexpr int seen_counters = counters + Stages::bytes, update_counters = seen_counters + Stages::bytes,
                         score_counters = update_counters + Single::bytes, odd = score_counters + Single::bytes,
                         bytes = odd + 4 * count;
    static_assert(bytes <= 227 * 1024);

    std::uint32_t base;

    __device__ std::uint32_t stage(int c, int offset) const {
        return base + static_cast<std::uint32_t>(Stages::stage(c) * stage_bytes + offset);
    }
    // As in a record: read, erase, write; those of plain keys read, write.
    __device__ KeyTile<T, K> read(int c) const { return {stage(c, 0)}; }
    __device__ KeyTile<T, K> erase(int c) const { return {stage(c, key_bytes)}; }
    __device__ KeyTile<T, K> write(int c) const { return {stage(c, (key_tiles - 1) * key_bytes)}; }
    __device__ SquareTile<T> values_of(int c) const { return {stage(c, values)}; }
    __device__ SquareTile<T> score_of(int c) const { return {scored ? stage(c, score) : base + made_score}; }
    __device__ SquareTile<T> solve_of(int c) const { return {stage(c, solve)}; }
    __device__ std::uint32_t record_of(int c) const { return stage(c, scored ? score : solve); }
    __device__ ChunkFactors& factors_of(int c) const {
        return *reinterpret_cast<ChunkFactors*>(shared_at(stage(c, factors)));
    }
    __device__ const KeyDecays& decays_of(int c) const {
        return *reinterpret_cast<const KeyDecays*>(shared_at(stage(c, after)));
    }
    __device__ const float* last_of(int c) const { return reinterpret_cast<const float*>(shared_at(stage(c, after))); }
    // Uᵀ [64, 64], and with its decays.
    __device__ SquareTile<T> update_copy() const { return {base + update}; }
    __device__ SquareTile<T> written_copy() const { return {base + written}; }
    // A state for the other warpgroup, in the place of a chunk's keys: that before the first chunk, or what one that
    // went token by token left. Four numbers of each thread side by side.
    __device__ float4& state_of(int c, int n, int thread) const {
        return *reinterpret_cast<float4*>(shared_at(stage(c, 16 * (n * group + thread))));
    }
    __device__ Stages stages() const { return {base + counters}; }
    __device__ Stages seen() const { return {base + seen_counters}; }  // ready for products, and odd or not
    __device__ Single updates() const { return {base + update_counters}; }
    __device__ Single scores() const { return {base + score_counters}; }
    // Whether the chunk goes token by token.
    __device__ int& odd_of(int c) const {
        return *reinterpret_cast<int*>(shared_at(base + odd + 4u * static_cast<std::uint32_t>(Stages::stage(c))));
    }
    __device__ static bool begins_with_state(const DeltaCall& call, const DeltaSequence& s) {
        return call.initial_state && s.state >= 0;
    }
    __device__ void start() const {
        stages().start(2 * group, 3 * 4);
        for (const Single& each : {updates(), scores()}) each.start(4, 4);
        seen().start(4, 4);
    }
};

}  // namespace softdelta::cuda::chunk_scan
