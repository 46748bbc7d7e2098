// Shared memory of the two scans over chunks, and what copies them there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/saved.h"
#include "engines/cuda/tile/ring.h"

namespace softdelta::cuda {

constexpr int copy_warps = 4;

// What the scans need besides, for gates of channels.
struct ChannelFactors {
    float last[128];  // e^G_last
    float beta[chunk_rows];
    int by_token;
};
static_assert(sizeof(ChannelFactors) <= sizeof(RowFactors));

// key_tiles: of q, k and p in a stage; squares: those of the record in it; reverse: from the last chunk to the first;
// warpgroups: four warps multiply together.
template <class T, int K, int warps, Keys kind, bool warpgroups, int key_tiles, int squares, bool reverse>
struct ColumnMemory {
    static constexpr bool channel = kind == Keys::with_gates, split = false;
    static constexpr int C = chunk_rows, slab = 16 * warps;
    static constexpr int key_bytes = Tile<T, K>::bytes(C), values_at = key_tiles * key_bytes,
                         squares_at = values_at + Tile<T, slab>::bytes(C),
                         factors_at = squares_at + squares * ChunkRecord::square_bytes;
    static constexpr int stage_bytes = (factors_at + static_cast<int>(sizeof(RowFactors)) + 1023) / 1024 * 1024;
    static constexpr int turn_bytes = 16, shared_bytes = 227 * 1024;
    // What is made goes to memory from tiles of its own, where there is room besides two stages: states by the copy
    // engine, rows of values by the warps that copy.
    static constexpr int warp_state_bytes = 16 * K * 2, made_at = warps * warp_state_bytes,
                         made_tiles = reverse ? 2 : 1, made_bytes = Tile<T, slab>::bytes(C);
    static constexpr int staged_bytes = made_at + made_tiles * made_bytes + 2 * turn_bytes;
    static constexpr bool staged = warpgroups && staged_bytes + 2 * (stage_bytes + turn_bytes) <= shared_bytes;
    static constexpr int staging_bytes = staged ? staged_bytes - 2 * turn_bytes : 0;
    static constexpr int stages =
        warpgroups ? std::min(4, (shared_bytes - staging_bytes - 2 * turn_bytes) / (stage_bytes + turn_bytes)) : 2;
    static constexpr int staging_at = stages * stage_bytes, counters_at = staging_at + staging_bytes,
                         bytes = counters_at + (warpgroups ? (stages + 2) * turn_bytes : 0);
    static_assert(warpgroups || stage_bytes <= least_shared_bytes);
    using KeyRows = std::conditional_t<warpgroups || kind == Keys::with_gates, KeyTile<T, K>, Tile<T, K>>;
    using Values = Tile<T, slab>;
    using Square = Tile<T, C>;

    __device__ unsigned turn(int c) const { return static_cast<unsigned>(reverse ? chunks - 1 - c : c); }
    __device__ Ring<stages> turns() const { return {base + counters_at}; }
    __device__ std::uint32_t stage(int c) const {
        // A card has one or two: no division, which every place in a tile would take.
        const unsigned at =
            warpgroups ? turn(c) % static_cast<unsigned>(stages) : turn(c) & static_cast<unsigned>(stages_of_card - 1);
        return base + at * static_cast<unsigned>(stage_bytes);
    }

    // Rows of a chunk that was made, and whether there are any.
    __device__ Ring<1> made_turns() const { return {base + counters_at + stages * turn_bytes}; }
    __device__ int& has_made() const {
        return *reinterpret_cast<int*>(shared_at(base + counters_at + (stages + 1) * turn_bytes));
    }
    __device__ Values made(int which) const { return {base + staging_at + made_at + which * made_bytes}; }

    __device__ KeyRows keys(int c, int which) const { return {stage(c) + which * key_bytes}; }
    __device__ Values values(int c) const { return {stage(c) + values_at}; }
    __device__ Square square(int c, int which) const {
        return {stage(c) + squares_at + which * ChunkRecord::square_bytes};
    }
    __device__ const RowFactors& factors(int c) const {
        return *reinterpret_cast<const RowFactors*>(shared_at(stage(c) + factors_at));
    }

    template <int bytes>
    __device__ static void copy_record(std::uint32_t to, const char* from, int thread) {
        copy_bytes<bytes, 32 * copy_warps>(to, from, thread);
    }
    // The last squares of a record, those of the stage, and its factors. Where nothing is erased there is no inverse.
    __device__ void copy_squares(int c, const char* record, bool erases, int thread) const {
        constexpr int first = ChunkRecord::factors - squares * ChunkRecord::square_bytes;
        constexpr int factors = static_cast<int>(sizeof(RowFactors));
        if (erases) {
            copy_record<ChunkRecord::bytes - first>(square(c, 0).base, record + first, thread);
            return;
        }
        if (squares == 2) copy_record<ChunkRecord::square_bytes>(square(c, 0).base, record, thread);
        copy_record<factors>(stage(c) + factors_at, record + ChunkRecord::factors, thread);
    }

    __device__ ChannelFactors& channel_factors(int c) const {
        return *reinterpret_cast<ChannelFactors*>(shared_at(stage(c) + factors_at));
    }
    __device__ void copy_channel_factors(int c, const char* record, int thread) const {
        using Record = FoldedChunk<128, true>;
        ChannelFactors& f = channel_factors(c);
        const auto* made = reinterpret_cast<const ChunkFactors*>(record + Record::factors);
        copy_record<static_cast<int>(sizeof f.last)>(stage(c) + factors_at, record + Record::last, thread);
        copy_record<static_cast<int>(sizeof f.beta)>(
            stage(c) + factors_at + static_cast<int>(offsetof(ChannelFactors, beta)),
            reinterpret_cast<const char*>(made->beta()), thread);
        if (thread == 0) f.by_token = made->by_token;
    }
    __device__ const float* beta_of(int c) const { return channel ? channel_factors(c).beta : factors(c).beta; }
    __device__ const float* last_of(int c) const { return channel ? channel_factors(c).last : &factors(c).last; }
    // Whatever its values are: the record says so.
    __device__ bool goes_by_token(int c) const {
        return (channel ? channel_factors(c).by_token : factors(c).by_token) != 0;
    }

    const std::uint32_t base;
    const int chunks;          // of the sequence
    const int stages_of_card;  // one or two, where not warpgroups have them
};

// Of f32 numbers, from the end: no room for two stages. k alone, which is read first and last, is there twice.
template <int K, int warps, Keys kind, int key_tiles, int squares>
struct ColumnMemory<float, K, warps, kind, false, key_tiles, squares, true> {
    using Record = RecordOf<float>;
    using KeyRows = KeyTile<float, K>;
    using Values = Tile<float, 16 * warps>;
    using Square = Tile<float, chunk_rows>;
    static constexpr bool channel = false, split = true, staged = false;
    static constexpr int C = chunk_rows, slab = 16 * warps, key_bytes = KeyRows::bytes(C),
                         factor_bytes = static_cast<int>(sizeof(RowFactors));
    static constexpr int values_at = (key_tiles + 1) * key_bytes, squares_at = values_at + Values::bytes(C),
                         factors_at = squares_at + squares * Record::square_bytes,
                         bytes = factors_at + 2 * factor_bytes;

    __device__ KeyRows keys(int c, int which) const {
        return {base + static_cast<std::uint32_t>((which == 0 ? 0 : which == 1 ? 1 + c % 2 : 3) * key_bytes)};
    }
    __device__ Values values(int) const { return {base + values_at}; }
    __device__ Values made(int) const { return values(0); }  // nothing is handed on
    __device__ Square square(int, int which) const { return {base + squares_at + which * Record::square_bytes}; }
    __device__ std::uint32_t factors_of(int c) const {
        return base + static_cast<std::uint32_t>(factors_at + c % 2 * factor_bytes);
    }
    __device__ const RowFactors& factors(int c) const {
        return *reinterpret_cast<const RowFactors*>(shared_at(factors_of(c)));
    }
    __device__ const float* beta_of(int c) const { return factors(c).beta; }
    __device__ const float* last_of(int c) const { return &factors(c).last; }
    __device__ bool goes_by_token(int c) const { return factors(c).by_token != 0; }

    const std::uint32_t base;
    const int chunks;  // of the sequence
    const int stages_of_card;
};

}  // namespace softdelta::cuda
