// What the two scans over chunks share: a block has some value columns of a head of a sequence. A consumer warp holds
// 16 rows of Sᵀ or dSᵀ [V, K] as accumulators; right operands lie in shared memory, where four warps copy those of the
// next chunk meanwhile (chunk/scan.cu). Grouped: four warps multiply together (sm_90a), and wait for their tiles alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "engines/cuda/copy_engine.h"
#include "engines/cuda/delta_rule/chunk/lane_state.h"
#include "engines/cuda/delta_rule/chunk/rows.h"
#include "engines/cuda/delta_rule/chunk/tokens.h"
#include "engines/cuda/delta_rule/chunk_backward/saved.h"
#include "engines/cuda/delta_rule/turns.h"

namespace softdelta::cuda {

constexpr int copy_warps = 4;

// Keys as given, with p of their own, or with the decays of channels as the record has them.
enum class KeyKind { plain, own_p, with_gates };

// What the scans need besides, for gates of channels.
struct ChannelFactors {
    float last[128];  // e^G_last
    float beta[chunk_rows];
    int by_token;
};
static_assert(sizeof(ChannelFactors) <= sizeof(RowFactors));

// What a copying thread copies of a head's rows, chunk after chunk: its places are found once.
template <class T, int columns>
class ChunkRows {
    static constexpr int threads = 32 * copy_warps, units = columns / 8, rows_at_once = threads / units;
    static_assert(rows_at_once % 8 == 0);

  public:
    __device__ ChunkRows(const View& view, const DeltaSequence& s, int head, int first, int size, int thread)
        : from_(static_cast<const T*>(view.data) + s.batch * view.stride[0] +
                (s.begin + thread / units) * view.stride[1] + head * view.stride[2] + first + 8 * (thread % units)),
          stride_(view.stride[1]),
          row_(thread / units),
          inside_(first + 8 * (thread % units) < size) {}

    // Of chunk c, which has so many rows; zeros where there are none.
    template <int panel_rows>
    __device__ void copy(const Tile<T, columns, panel_rows>& tile, int c, int rows, int thread) const {
        constexpr int step_bytes = rows_at_once * (panel_rows > 0 ? 128 : Tile<T, columns>::row_bytes);
        const T* from = from_ + c * (chunk_rows * stride_);
        const Index step = rows_at_once * stride_;
        std::uint32_t to = tile.unit(row_, thread % units);
        if (rows >= chunk_rows && inside_) {
#pragma unroll
            for (int i = 0; i < chunk_rows / rows_at_once; ++i, from += step)
                ptx::copy_async(to + static_cast<std::uint32_t>(i * step_bytes), from, true);
            return;
        }
#pragma unroll 1
        for (int row = row_; row < chunk_rows; row += rows_at_once, from += step, to += step_bytes) {
            const bool take = inside_ && row < rows;
            ptx::copy_async(to, take ? from : from_, take);
        }
    }

  private:
    const T* from_;
    const Index stride_;
    const int row_;
    const bool inside_;
};

// key_tiles: of q, k and p in a stage; squares: those of the record in it; reverse: from the last chunk to the first.
template <class T, int K, int warps, KeyKind kind, bool grouped, int key_tiles, int squares, bool reverse>
class ColumnScan {
  public:
    static constexpr bool channel = kind == KeyKind::with_gates;
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
    static constexpr bool staged = grouped && staged_bytes + 2 * (stage_bytes + turn_bytes) <= shared_bytes;
    static constexpr int staging_bytes = staged ? staged_bytes - 2 * turn_bytes : 0;
    static constexpr int stages =
        grouped ? std::min(4, (shared_bytes - staging_bytes - 2 * turn_bytes) / (stage_bytes + turn_bytes)) : 2;
    static constexpr int staging_at = stages * stage_bytes, counters_at = staging_at + staging_bytes,
                         bytes = counters_at + (grouped ? (stages + 2) * turn_bytes : 0);
    using KeyRows = std::conditional_t<grouped || kind == KeyKind::with_gates, KeyTile<T, K>, Tile<T, K>>;
    using Values = Tile<T, slab>;
    using Square = Tile<T, C>;

    __device__ ColumnScan(const DeltaCall& the_call, const DeltaSequences& sequences, int sequence,
                          const SavedChunks& the_saved)
        : call(the_call),
          saved(the_saved),
          s(sequences[sequence]),
          hv(static_cast<int>(blockIdx.y)),
          first_column(static_cast<int>(blockIdx.x) * slab),
          warp(static_cast<int>(threadIdx.x) / 32),
          lane(static_cast<int>(threadIdx.x) % 32),
          first_slot(saved.slot(s, sequences.first + sequence, 0, sequences.packed)),
          base(ptx::shared_address(ptx::shared_memory())),
          chunks(static_cast<int>((s.count + C - 1) / C)) {}

    __device__ int rows(int c) const { return static_cast<int>(min(s.count - Index(c) * C, Index(C))); }
    __device__ unsigned turn(int c) const { return static_cast<unsigned>(reverse ? chunks - 1 - c : c); }
    __device__ Turns turns() const { return {base + counters_at, stages}; }
    __device__ std::uint32_t stage(int c) const {
        return base + turn(c) % static_cast<unsigned>(stages) * static_cast<unsigned>(stage_bytes);
    }

    // Of the copying warps copy(c), which copies(thread) returns, and store(c, thread) of what was made; of the others
    // take(c), a chunk later, and end().
    template <class Copies, class Store, class Take, class End>
    __device__ void run(const View& first_state, const Copies& copies, const Store& store, const Take& take,
                        const End& end) {
        if constexpr (grouped) {
            if (threadIdx.x == 0) {
                turns().start(2 * 32 * copy_warps, warps);
                made_turns().start(warps, copy_warps);
            }
            __syncthreads();
        }
        if (warp >= warps)
            run_copies(static_cast<int>(threadIdx.x) - 32 * warps, copies, store);
        else
            run_products(first_state, take, end);
    }

    // Rows of a chunk that was made, and whether there are any.
    __device__ Turns made_turns() const { return {base + counters_at + stages * turn_bytes, 1}; }
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

    // Bytes side by side.
    template <int bytes>
    __device__ static void copy_record(std::uint32_t to, const char* from, int thread) {
        constexpr int at_once = 16 * 32 * copy_warps;
        from += 16 * thread;
        to += 16u * static_cast<std::uint32_t>(thread);
#pragma unroll
        for (int i = 0; i < bytes; i += at_once)
            if (i + at_once <= bytes || i + 16 * thread < bytes)
                ptx::copy_async(to + static_cast<std::uint32_t>(i), from + i, true);
    }
    // The last squares of a record, those of the stage, and its factors. Where nothing is erased there is no inverse.
    __device__ void copy_squares(int c, const char* record, int thread) const {
        constexpr int first = ChunkRecord::factors - squares * ChunkRecord::square_bytes;
        constexpr int factors = static_cast<int>(sizeof(RowFactors));
        if (call.erase != core::Erase::nothing) {
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
    // Whatever its values are: the record says so.
    __device__ bool goes_by_token(int c) {
        return (channel ? channel_factors(c).by_token : factors(c).by_token) != 0;
    }
    // state∘e^G_last
    __device__ void decay_state(int c) {
        const float* last = channel ? channel_factors(c).last + 2 * (lane % 4) : &factors(c).last;
#pragma unroll
        for (int n = 0; n < K / 8; ++n) {
            const float2 factor = channel ? *reinterpret_cast<const float2*>(last + 8 * n) : make_float2(*last, *last);
#pragma unroll
            for (int i = 0; i < 4; ++i) state_[n][i] *= i % 2 == 0 ? factor.x : factor.y;
        }
    }

    // --- states

    // use(wide): the lane's part of the state in f64; round(x) makes f32 of it.
    template <class Use, class Round>
    __device__ void with_wide_state(const Use& use, const Round& round) {
        WideState<K> wide;
#pragma unroll
        for (int n = 0; n < K / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) wide[n][i] = static_cast<double>(state_[n][i]);
        use(wide);
#pragma unroll
        for (int n = 0; n < K / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) state_[n][i] = round(wide[n][i]);
    }
    __device__ int own_column() const {
        return first_column + 16 * warp + lane / 4;
    }
    __device__ void load_state(const View& from, float (&state)[K / 8][4]) const {
        const View v = s.state >= 0 ? from : View();
        load_lane_state<K>(&v, s.state * v.stride[0] + hv * v.stride[1], v.stride[call.state_row],
                           v.stride[call.state_column], call.key_size, call.value_size, own_column(), lane, state);
    }
    __device__ void store_state(const View& to, float (&state)[K / 8][4]) const {
        if (!to || s.state < 0) return;
        const View v = to;
        store_lane_state<K>(&v, s.state * v.stride[0] + hv * v.stride[1], v.stride[call.state_row],
                            v.stride[call.state_column], call.key_size, call.value_size, own_column(), lane, state);
    }

    // --- products

    // x [16, 64] += left [16, 16·depths] rightᵀ, right [64, 16·depths]; triangular: a lower triangle.
    template <int depths, class Right>
    __device__ void multiply_transposed(const std::uint32_t (&left)[depths][4], const Right& right, bool triangular,
                                        float (&x)[C / 8][4]) const {
#pragma unroll
        for (int depth = 0; depth < depths; ++depth)
#pragma unroll
            for (int n = 0; n < C / 16; ++n) {
                if (triangular && n < depth) continue;
                std::uint32_t b[4];
                right.load_right(b, 16 * n, depth, lane);
                ptx::multiply(x[2 * n], left[depth], b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], left[depth], b[2], b[3], T());
            }
    }
    // x [16, 64] += left [16, 64] right, a lower triangle [64, 64].
    __device__ void multiply_lower(const std::uint32_t (&left)[C / 16][4], const Square& right,
                                   float (&x)[C / 8][4]) const {
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth)
#pragma unroll
            for (int n = 0; n <= depth; ++n) {
                std::uint32_t b[4];
                right.load_right_mn_major(b, 16 * depth, n, lane);
                ptx::multiply(x[2 * n], left[depth], b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], left[depth], b[2], b[3], T());
            }
    }
    // state [16, K] += left [16, 64] right [64, K]
    __device__ void add_to_state(const std::uint32_t (&left)[C / 16][4], const KeyRows& right,
                                 float (&state)[K / 8][4]) const {
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth)
#pragma unroll
            for (int n = 0; n < K / 16; ++n) {
                std::uint32_t b[4];
                right.load_right_mn_major(b, 16 * depth, n, lane);
                ptx::multiply(state[2 * n], left[depth], b[0], b[1], T());
                ptx::multiply(state[2 * n + 1], left[depth], b[2], b[3], T());
            }
    }

    // --- products of a warpgroup, in the background

    // x [64, 64] = left [64, 16·depths] rightᵀ
    template <int depths, class Right>
    __device__ static void group_multiply_transposed(const std::uint32_t (&left)[depths][4], const Right& right,
                                                     float (&x)[C / 8][4]) {
#pragma unroll
        for (int depth = 0; depth < depths; ++depth)
            ptx::warpgroup_multiply(x, left[depth], right.rows_operand(depth), depth > 0, T());
        ptx::commit_products();
    }
    // x [64, 64] = left [64, 64] right
    __device__ static void group_multiply(const std::uint32_t (&left)[C / 16][4], const Square& right,
                                          float (&x)[C / 8][4]) {
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth)
            ptx::warpgroup_multiply_mn_major(x, left[depth], right.mn_major_operand(depth), depth > 0, T());
        ptx::commit_products();
    }
    // state [64, K] += left [64, 64] right [64, K]
    __device__ void group_add_to_state(const std::uint32_t (&left)[C / 16][4], const KeyRows& right) {
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth)
            ptx::warpgroup_multiply_mn_major(state_, left[depth], right.mn_major_operand(depth), true, T());
        ptx::commit_products();
    }
    // The state as it is now, to a tile in memory, while products read what was made of it. After a branch or barrier,
    // which keeps it from being done before they begin.
    __device__ void save_state_of(char* to) const {
        std::uint32_t state[K / 16][4];
        to_left<T>(state, state_);
        if constexpr (!staged) return save_state<T, K>(to, own_column(), lane, state);
        const Tile<T, K> own{base + staging_at + static_cast<std::uint32_t>(warp * warp_state_bytes)};
        if (lane == 0) wait_for_stored_boxes();  // what was there
        __syncwarp();
#pragma unroll
        for (int depth = 0; depth < K / 16; ++depth)
            ptx::store_matrices(own.unit(lane % 16, 2 * depth + lane / 16), state[depth]);
        ptx::publish_to_products();
        __syncwarp();
        if (lane == 0) store_bytes(to + (first_column + 16 * warp) * (K * 2), own.base, warp_state_bytes);
    }
    // The warp's columns of rows that were made, for those who store; give(tile) where there are any.
    template <class Give>
    __device__ void hand_on(int c, bool some, const Give& give) const {
        made_turns().wait_until_free(turn(c));
        if (threadIdx.x == 0) has_made() = some ? 1 : 0;
        if (some) give();
        made_turns().come(turn(c), lane);
    }
    __device__ void give_rows(int which, const float (&x)[C / 8][4]) const {
        std::uint32_t packed[C / 16][4];
        to_left<T>(packed, x);
#pragma unroll
        for (int n = 0; n < C / 16; ++n)
            ptx::store_matrices_transposed(
                made(which).unit(16 * n + 8 * (lane / 16) + lane % 8, 2 * warp + lane / 8 % 2), packed[n]);
    }
    // store(row, unit of the tile, eight elements)
    template <class Store>
    __device__ void for_each_made(int which, int thread, const Store& store) const {
#pragma unroll 2
        for (int i = 0; i < C * Values::units / (32 * copy_warps); ++i) {
            const int at = i * 32 * copy_warps + thread, row = at / Values::units, u = at % Values::units;
            store(row, u, *reinterpret_cast<const uint4*>(shared_at(made(which).unit(row, u))));
        }
    }
    // To a tile [64, V] in memory, and to a tensor of value heads.
    __device__ void save_made(int which, int thread, char* to) const {
        for_each_made(which, thread, [&](int row, int u, const uint4& eight) {
            const int unit = first_column / 8 + u;
            *reinterpret_cast<uint4*>(to + row * saved.size * 2 + ((unit ^ (row & 7)) << 4)) = eight;
        });
    }
    __device__ void write_made(int c, int which, int thread, const View& to) const {
        auto* data = static_cast<T*>(to.data) + s.batch * to.stride[0] + hv * to.stride[2] + first_column +
                     (s.begin + Index(c) * C) * to.stride[1];
        for_each_made(which, thread, [&](int row, int u, const uint4& eight) {
            if (row < rows(c) && first_column + 8 * u < call.value_size)
                *reinterpret_cast<uint4*>(data + row * to.stride[1] + 8 * u) = eight;
        });
    }
    __device__ void load_values(int c, std::uint32_t (&out)[C / 16][4]) const {
#pragma unroll
        for (int n = 0; n < C / 16; ++n) values(c).load_transposed_result(out[n], 16 * n, warp, lane);
    }

    // --- rows of values [64, 16] of the warp, transposed: through its columns of the tile, which nobody else reads

    // To a tile [64, V] in memory.
    __device__ void save_rows(int c, const float (&x)[C / 8][4], char* to) const {
        std::uint32_t packed[C / 16][4];
        to_left<T>(packed, x);
        cuda::save_rows<grouped>(values(c), warp, lane, packed, first_column, saved.size, to);
    }
    // To a tensor of value heads.
    __device__ void write_rows(int c, const float (&x)[C / 8][4], const View& to) const {
        auto* data = static_cast<T*>(to.data) + s.batch * to.stride[0] + hv * to.stride[2] + first_column;
        std::uint32_t packed[C / 16][4];
        to_left<T>(packed, x);
        store_transposed<grouped>(values(c), warp, lane, packed, [&](int row, int u, const uint4& eight) {
            if (row < rows(c) && first_column + 8 * u < call.value_size)
                *reinterpret_cast<uint4*>(data + (s.begin + Index(c) * C + row) * to.stride[1] + 8 * u) = eight;
        });
    }
    // Of the warp's columns, or the warpgroup's.
    __device__ bool values_are_odd(int c) const {
        constexpr int barrier = 2;
        const bool odd = has_nonfinite_values<T>(values(c), warp, lane);
        return grouped ? ptx::any(barrier + warp / 4, 128, odd) : __any_sync(0xffffffffu, odd);
    }

    const DeltaCall& call;
    const SavedChunks& saved;
    const DeltaSequence s;
    const int hv, first_column, warp;
    int lane;
    const Index first_slot;  // of the sequence
    const std::uint32_t base;
    const int chunks;
    float state_[K / 8][4];

  private:
    // A chunk's stage is free when its rows are made: so they are stored after the copies into that stage, and nobody
    // waits for a thread that waits for him.
    template <class Copies, class Store>
    __device__ void run_copies(int thread, const Copies& copies, const Store& store) const {
        if constexpr (warps == 8) ptx::release_registers<40>();
        const auto copy = copies(thread);
        if constexpr (grouped) {
            constexpr int later = reverse ? -stages : stages;
            const auto store_made = [&](int c) {
                made_turns().wait_until_there(turn(c));
                ptx::forget(thread);  // copying warps have few registers
                if (has_made() != 0) store(c, thread);
                made_turns().release(turn(c), lane);
            };
            for_each_chunk(chunks, [&](int c) {
                turns().wait_until_free(turn(c));
                copy(c);
                turns().fill_with_copies(turn(c));
                ptx::arrive(turns().filled(turn(c)));
                if (staged && turn(c) >= stages) store_made(c - later);
            });
            if (staged)
                for (int i = max(chunks - stages, 0); i < chunks; ++i) store_made(reverse ? chunks - 1 - i : i);
            return;
        }
        if (chunks > 0) copy(reverse ? chunks - 1 : 0);
        ptx::wait_for_copies();
        __syncthreads();
        for_each_chunk(chunks, [&](int c) {
            if (reverse ? c > 0 : c + 1 < chunks) copy(reverse ? c - 1 : c + 1);
            ptx::wait_for_copies();
            __syncthreads();
        });
    }
    template <class Take, class End>
    __device__ void run_products(const View& first_state, const Take& take, const End& end) {
        if constexpr (warps == 8) ptx::take_registers<232>();
        {
            LaneState<K> state;
            load_state(first_state, state);
#pragma unroll
            for (int n = 0; n < K / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) state_[n][i] = state[n][i];
        }
        if constexpr (!grouped) __syncthreads();
        for_each_chunk(chunks, [&](int c) {
            if constexpr (grouped) turns().wait_until_filled(turn(c));
            if constexpr (grouped) ptx::forget(lane);  // registers are too few for places that depend on it
            take(c);
            if constexpr (grouped)
                turns().release(turn(c), lane);
            else
                __syncthreads();
        });
        if (staged && lane == 0) wait_for_stored_boxes();
        end();
    }
    template <class Use>
    __device__ static void for_each_chunk(int chunks, const Use& use) {
        if constexpr (reverse)
            for (int c = chunks; c-- > 0;) use(c);
        else
            for (int c = 0; c < chunks; ++c) use(c);
    }
};

}  // namespace softdelta::cuda
