// What the two scans over chunks share: a block has some value columns of a head of a sequence. A consumer warp holds
// 16 rows of Sᵀ or dSᵀ [V, K] as accumulators. Right operands lie in shared memory; four warps copy those of the next
// chunk meanwhile (scan/scan.cu). Warpgroups: four warps multiply together (sm_90a), and wait for their tiles alone.
#pragma once

#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/scan/backward/memory.h"
#include "engines/cuda/delta_rule/scan/lane_state.h"
#include "engines/cuda/delta_rule/tokens/chunk.h"
#include "engines/cuda/tile/copy.h"

namespace softdelta::cuda {

// Of the block's memory: ColumnMemory.
template <class T, int K, int warps, Keys kind, bool warpgroups, int key_tiles, int squares, bool reverse>
class ColumnScan {
  public:
    using Memory = ColumnMemory<T, K, warps, kind, warpgroups, key_tiles, squares, reverse>;
    using KeyRows = typename Memory::KeyRows;
    using Square = typename Memory::Square;
    using Values = typename Memory::Values;
    static constexpr bool channel = Memory::channel, staged = Memory::staged;
    static constexpr int C = chunk_rows, slab = Memory::slab;

    __device__ ColumnScan(const ChunkGradients& of, int sequence, int stages)
        : m{ptx::shared_address(ptx::shared_memory()), of.sequences[sequence].chunks(), stages},
          call(of.call),
          saved(of.saved),
          s(of.sequences[sequence]) {}

    // Of the copying warps copies of chunks with rows of `values`, and store(c, thread) of what was made; of the others
    // take(c), a chunk later, and end().
    template <class Store, class Take, class End>
    __device__ void run(const View& first_state, const View& values, const Store& store, const Take& take,
                        const End& end) {
        if constexpr (warpgroups) {
            if (threadIdx.x == 0) {
                m.turns().start(2 * 32 * copy_warps, warps);
                m.made_turns().start(warps, copy_warps);
            }
            __syncthreads();
        }
        if constexpr (Memory::split)
            run_split(first_state, values, take, end);
        else if (warp >= warps)
            run_copies(static_cast<int>(threadIdx.x) - 32 * warps, values, store);
        else
            run_products(first_state, take, end);
    }

    // state∘e^G_last
    __device__ void decay_state(int c) {
        const float* last = m.last_of(c) + (channel ? 2 * (lane % 4) : 0);
        unrolled<K / 8>([&](int n) {
            const float2 factor = channel ? *reinterpret_cast<const float2*>(last + 8 * n) : make_float2(*last, *last);
            unrolled<4>([&](int i) { state[n][i] *= i % 2 == 0 ? factor.x : factor.y; });
        });
    }

    // --- states

    // use(wide): the lane's part of the state in f64; round(x) makes f32 of it.
    template <class Use, class Round>
    __device__ void with_wide_state(const Use& use, const Round& round) {
        WideState<K> wide;
        unrolled<K / 8, 4>([&](int n, int i) { wide[n][i] = static_cast<double>(state[n][i]); });
        use(wide);
        unrolled<K / 8, 4>([&](int n, int i) { state[n][i] = round(wide[n][i]); });
    }
    __device__ int own_column() const { return first_column + 16 * warp + lane / 4; }
    __device__ void load_state(const View& from) {
        const View v = s.state >= 0 ? from : View();
        LaneState<K> loaded;
        load_lane_state<K>(&v, s.state * v.stride[0] + hv * v.stride[1], v.stride[call.state_row],
                           v.stride[call.state_column], call.key_size, call.value_size, own_column(), lane, loaded);
        unrolled<K / 8, 4>([&](int n, int i) { state[n][i] = loaded[n][i]; });
    }
    __device__ void store_state(const View& to) const {
        LaneState<K> stored;
        unrolled<K / 8, 4>([&](int n, int i) { stored[n][i] = state[n][i]; });
        if (!to || s.state < 0) return;
        const View v = to;
        store_lane_state<K>(&v, s.state * v.stride[0] + hv * v.stride[1], v.stride[call.state_row],
                            v.stride[call.state_column], call.key_size, call.value_size, own_column(), lane, stored);
    }

    __device__ Products<T, warpgroups> products() const { return {lane}; }

    // x∘factor, of tokens
    __device__ void scale(float (&x)[C / 8][4], const float* factor) const {
        const int pair = 2 * (lane % 4);
        unrolled<C / 8, 4>([&](int n, int i) { x[n][i] *= factor[8 * n + pair + i % 2]; });
    }
    // The same of left operands.
    __device__ void scale(std::uint32_t (&x)[C / 16][operand_words<T>], const float* factor) const {
        const int pair = 2 * (lane % 4);
        unrolled<C / 16, 4>([&](int n, int m) {
            const int token = 16 * n + 8 * (m / 2) + pair;
            const float2 both = pair_of<T>(x[n], m);
            set_pair<T>(x[n], m, both.x * factor[token], both.y * factor[token + 1]);
        });
    }

    // The state as it is now, to a tile in memory, while products read what was made of it. After a branch or barrier,
    // which keeps it from being done before they begin.
    __device__ void save_state_of(char* to) const {
        std::uint32_t packed[K / 16][operand_words<T>];
        to_left<T>(packed, state);
        if constexpr (!staged) {
            save_state<T, K>(to, own_column(), lane, packed);
        } else {
            const Tile<T, K> own{m.base + Memory::staging_at +
                                 static_cast<std::uint32_t>(warp * Memory::warp_state_bytes)};
            if (lane == 0) wait_for_stored_boxes();  // what was there
            __syncwarp();
            unrolled<K / 16>([&](int depth) { own.store_left(packed[depth], 0, depth, lane); });
            ptx::publish_to_products();
            __syncwarp();
            if (lane == 0) store_bytes(to + (first_column + 16 * warp) * (K * 2), own.base, Memory::warp_state_bytes);
        }
    }

    // --- f32 numbers: all threads copy the tiles of the chunk before as soon as these were read. Of others nothing.

    // The rest of the chunk is there.
    __device__ void wait_for_rows() const {
        if constexpr (Memory::split) {
            ptx::wait_for_copies();
            __syncthreads();
        }
    }
    __device__ void have_squares(int c) const {
        if constexpr (Memory::split) {
            __syncthreads();
            copy_first(c - 1);
        }
    }
    __device__ void have_rows(int c, const View& values) const {
        if constexpr (Memory::split) {
            __syncthreads();
            copy_rest(c - 1, values);
        }
    }
    // The warp's columns of rows that were made, for those who store; give(tile) where there are any.
    template <class Give>
    __device__ void hand_on(int c, bool some, const Give& give) const {
        m.made_turns().acquire(m.turn(c));
        if (threadIdx.x == 0) m.has_made() = some ? 1 : 0;
        if (some) give();
        m.made_turns().commit(m.turn(c), lane);
    }
    __device__ void give_rows(int which, const float (&x)[C / 8][4]) const {
        std::uint32_t packed[C / 16][4];
        to_left<T>(packed, x);
        unrolled<C / 16>([&](int n) { m.made(which).store_transposed_result(packed[n], 16 * n, 16 * warp, lane); });
    }
    // store(row, unit of the tile, eight elements)
    template <class Store>
    __device__ void for_each_made(int which, int thread, const Store& store) const {
#pragma unroll 2
        for (int i = 0; i < C * Values::units / (32 * copy_warps); ++i) {
            const int at = i * 32 * copy_warps + thread, row = at / Values::units, u = at % Values::units;
            store(row, u, *reinterpret_cast<const uint4*>(shared_at(m.made(which).unit(row, u))));
        }
    }
    __device__ void load_values(int c, std::uint32_t (&out)[C / 16][operand_words<T>]) const {
        unrolled<C / 16>([&](int n) { m.values(c).load_transposed_result(out[n], 16 * n, 16 * warp, lane); });
    }

    // Rows of values [64, 16] of the warp, transposed: through its columns of the tile, which nobody else reads.
    template <class To>
    __device__ void store_rows(int c, const float (&x)[C / 8][4], const To& to) const {
        store_transposed<T, warpgroups>(m.values(c), warp, lane, x, to);
    }
    // Where rows of the block's columns go: a tile [64, V] in memory, a tensor of value heads.
    __device__ RowsToTile<T> to_tile(char* to) const {
        return {to, first_column, saved.size};
    }
    __device__ RowsToTensor<T> to_tensor(int c, const View& to) const {
        return {to, s, c, hv, first_column, call.value_size};
    }
    // Of the warp's columns, or the warpgroup's.
    __device__ bool values_are_nonfinite(int c) const {
        constexpr int barrier = 2;
        const bool nonfinite = has_nonfinite_values<T>(m.values(c), warp, lane);
        return warpgroups ? ptx::any(barrier + warp / 4, 128, nonfinite) : __any_sync(0xffffffffu, nonfinite);
    }

    const Memory m;
    const DeltaCall& call;
    const SavedChunks& saved;
    const DeltaSequence s;
    const int hv = static_cast<int>(blockIdx.y), first_column = static_cast<int>(blockIdx.x) * slab,
              warp = static_cast<int>(threadIdx.x) / 32;
    int lane = static_cast<int>(threadIdx.x) % 32;
    const Index first_slot = s.first_slot;  // of the sequence
    float state[K / 8][4];

  private:
    // copy(c) of a thread: from the end q, then k, p of its own or the record's; rows of values; squares and factors.
    __device__ auto copies(const View& of_values, int thread) const {
        constexpr int k_tile = reverse ? 1 : 0;
        constexpr int threads = 32 * copy_warps;
        const RowCopies<T, slab, threads> values(of_values, s, hv, first_column, of_values ? call.value_size : 0,
                                                 thread);
        if constexpr (channel) {
            return [this, thread, values](int c) {
                using Record = FoldedChunk<128, true>;
                const char* record = saved.channel_record(first_slot + c, hv);
                const auto keys = [&](int tile, int from) {
                    Memory::template copy_record<Memory::key_bytes>(m.keys(c, tile).base, record + from, thread);
                };
                if constexpr (reverse) keys(0, Record::read);
                keys(k_tile, Record::write);
                keys(k_tile + 1, Record::erase);
                Memory::template copy_record<squares * Record::square_bytes>(
                    m.square(c, 0).base, record + (2 - squares) * Record::square_bytes, thread);
                values.copy(m.values(c), c, s.rows(c), thread);
                m.copy_channel_factors(c, record, thread);
            };
        } else {
            const auto of = [&](const View& v) {
                return RowCopies<T, K, threads>(v, s, call.key_head(hv), 0, call.key_size, thread);
            };
            return [this, thread, values, q = of(call.q), k = of(call.k),
                    p = of(kind == Keys::own_p ? call.p : call.k)](int c) {
                if constexpr (reverse) q.copy(m.keys(c, 0), c, s.rows(c), thread);
                k.copy(m.keys(c, k_tile), c, s.rows(c), thread);
                if constexpr (kind == Keys::own_p) p.copy(m.keys(c, k_tile + 1), c, s.rows(c), thread);
                values.copy(m.values(c), c, s.rows(c), thread);
                m.copy_squares(c, saved.record(first_slot + c, hv), call.erase != core::Erase::nothing, thread);
            };
        }
    }

    // A chunk's stage is free when its rows are made. They are stored after the copies into that stage, so that no two
    // warps wait for each other.
    template <class Store>
    __device__ void run_copies(int thread, const View& values, const Store& store) const {
        if constexpr (warps == 8) ptx::release_registers<40>();
        const auto copy = copies(values, thread);
        if constexpr (warpgroups) {
            constexpr int later = reverse ? -Memory::stages : Memory::stages;
            const auto store_made = [&](int c) {
                m.made_turns().wait(m.turn(c));
                ptx::forget(thread);  // copying warps have few registers
                if (m.has_made() != 0) store(c, thread);
                m.made_turns().release(m.turn(c), lane);
            };
            for_each_chunk(m.chunks, [&](int c) {
                m.turns().acquire(m.turn(c));
                copy(c);
                m.turns().commit_copies(m.turn(c));
                if (staged && m.turn(c) >= Memory::stages) store_made(c - later);
            });
            if (staged)
                for (int i = max(m.chunks - Memory::stages, 0); i < m.chunks; ++i)
                    store_made(reverse ? m.chunks - 1 - i : i);
            return;
        }
        const int ahead = m.stages_of_card - 1;
        if (ahead > 0) {
            if (m.chunks > 0) copy(reverse ? m.chunks - 1 : 0);
            ptx::wait_for_copies();
            __syncthreads();
        }
        for_each_chunk(m.chunks, [&](int c) {
            if (reverse ? c >= ahead : c + ahead < m.chunks) copy(reverse ? c - ahead : c + ahead);
            ptx::wait_for_copies();
            __syncthreads();
            if (ahead == 0) __syncthreads();
        });
    }
    template <class Take, class End>
    __device__ void run_products(const View& first_state, const Take& take, const End& end) {
        if constexpr (warps == 8) ptx::take_registers<232>();
        load_state(first_state);
        const bool alone = m.stages_of_card == 1;
        if (!warpgroups && !alone) __syncthreads();
        for_each_chunk(m.chunks, [&](int c) {
            if (!warpgroups && alone) __syncthreads();
            if constexpr (warpgroups) m.turns().wait_for_products(m.turn(c));
            if constexpr (warpgroups) ptx::forget(lane);  // registers are too few for places that depend on it
            take(c);
            if constexpr (warpgroups)
                m.turns().release(m.turn(c), lane);
            else
                __syncthreads();
        });
        if (staged && lane == 0) wait_for_stored_boxes();
        end();
    }
    // What a product reads first of chunk c, and last; each is a group of copies.
    __device__ void copy_first(int c) const {
        constexpr int threads = 32 * warps;
        using Record = typename Memory::Record;
        const int thread = static_cast<int>(threadIdx.x);
        if (c >= 0) {
            const char* record = saved.template record<float>(first_slot + c, hv);
            copy_rows<threads>(m.keys(c, 1), call.k, s, c, call.key_head(hv), 0, call.key_size, thread);
            copy_bytes<Record::square_bytes, threads>(m.square(c, 0).base, record, thread);
            if (call.erase != core::Erase::nothing)
                copy_bytes<Record::square_bytes, threads>(m.square(c, 1).base, record + Record::inverse, thread);
            copy_bytes<Memory::factor_bytes, threads>(m.factors_of(c), record + Record::factors, thread);
        }
        ptx::commit_copies();
    }
    __device__ void copy_rest(int c, const View& values) const {
        constexpr int threads = 32 * warps;
        const int thread = static_cast<int>(threadIdx.x), h = call.key_head(hv);
        if (c >= 0) {
            copy_rows<threads>(m.keys(c, 0), call.q, s, c, h, 0, call.key_size, thread);
            if (kind == Keys::own_p) copy_rows<threads>(m.keys(c, 2), call.p, s, c, h, 0, call.key_size, thread);
            copy_rows<threads>(m.values(c), values, s, c, hv, first_column, values ? call.value_size : 0, thread);
        }
        ptx::commit_copies();
    }
    template <class Take, class End>
    __device__ void run_split(const View& first_state, const View& values, const Take& take, const End& end) {
        copy_first(m.chunks - 1);
        copy_rest(m.chunks - 1, values);
        load_state(first_state);
#pragma unroll 1
        for (int c = m.chunks; c-- > 0;) {
            ptx::wait_for_copies_but<1>();
            __syncthreads();
            take(c);
        }
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
