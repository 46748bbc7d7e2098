// The warpgroup that copies: tiles of the next value heads, as soon as their places are free. One thread asks the copy
// engine for them; what it does not take (the last rows of a sequence, strides that TMA does not take) all threads
// copy. The other warps find the next chunk, and make rowsum(S∘dS').
#pragma once

#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/unfold/warpgroup/boxes.h"
#include "engines/cuda/delta_rule/unfold/warpgroup/role.h"

namespace softdelta::cuda {

template <class T>
struct Loader {
    using Memory = WarpgroupMemory<T>;
    using Rows = KeyTile<T, Memory::D>;
    static constexpr int C = chunk_rows, D = Memory::D, threads = warpgroup_threads, barrier = 1, finder = 32;
    static constexpr int tracing_warps = 2;  // the last

    UnfoldWarpgroup<T> my;
    const UnfoldBoxes& boxes;

    __device__ void run() const {
        const ChunkPlaces places{my.pass};
        if (my.thread == finder) my.small.places[0] = places.take();
        unsigned n = 0;
        for (unsigned step = 0;; ++step) {
            ptx::barrier(barrier, threads);
            const ChunkPlace& at = my.small.places[step % 4];
            if (at.left_out != 0) {
                my.m.keys().acquire(step);
                if (my.thread == 0) ptx::arrive(my.m.keys().full(step));  // the place alone
                return;
            }
            copy_keys(at, step);
            // Another thread than that which asks, and waits for free places.
            if (my.thread == finder) my.small.places[(step + 1) % 4] = places.take();
            for (int i = 0; i < my.call.group; ++i, ++n) {
                copy_head(at, my.call.value_head(at.h, i), n);
                if (my.warp >= 4 - tracing_warps) multiply_states_by_element(n);
            }
        }
    }

    // Where the n-th tile's place is free: ask(counter) for so many bytes, or copy().
    template <int places, class Ask, class Copy>
    __device__ void take(const Ring<places>& turns, unsigned n, bool by_engine, int bytes, const Ask& ask,
                         const Copy& copy) const {
        if (by_engine) {
            if (my.thread != 0) return;
            turns.acquire(n);
            arrive_expecting(turns.full(n), bytes);
            ask(turns.full(n));
            return;
        }
        turns.acquire(n);
        copy();
        ptx::wait_for_copies();
        ptx::publish_to_products();
        ptx::barrier(barrier, threads);
        if (my.thread == 0) ptx::arrive(turns.full(n));
    }
    __device__ void copy_keys(const ChunkPlace& at, unsigned step) const {
        const bool by_engine = at.rows() == C && boxes.q.given && boxes.k.given;
        const auto q = my.m.key(step, 0), k = my.m.key(step, 1);
        take(
            my.m.keys(), step, by_engine, 2 * Memory::rows_bytes,
            [&](std::uint32_t counter) {
                ask_for_rows(q, boxes.q, my.call.q, at, at.h, counter);
                ask_for_rows(k, boxes.k, my.call.k, at, at.h, counter);
            },
            [&] {
                copy_rows(q, my.call.q, at, at.h, my.call.key_size);
                copy_rows(k, my.call.k, at, at.h, my.call.key_size);
            });
    }
    // In the order in which places become free.
    __device__ void copy_head(const ChunkPlace& at, int hv, unsigned n) const {
        constexpr int factor_bytes = static_cast<int>(sizeof(RowFactors));
        if (my.erases && my.warp == 1)  // the eraser reads it from memory
            for (int i = my.lane; i < 2 * at.rows(); i += 32)
                if (D / 2 * (i % 2) < my.call.value_size)
                    ptx::prefetch(static_cast<const T*>(my.call.v.data) + at.row(my.call.v, hv, i / 2) +
                                  D / 2 * (i % 2));
        const std::uint32_t factors = ptx::shared_address(my.small.factors + n % 2);
        const char* const record = my.saved.record(at.slot, hv) + ChunkRecord::factors;
        take(
            my.m.of_factors(), n, true, factor_bytes,
            [&](std::uint32_t counter) { copy_side_by_side(factors, record, factor_bytes, counter); }, [] {});
        const auto d_o = my.m.d_o_of(n);
        take(
            my.m.of_d_o(), n, at.rows() == C && boxes.d_o.given, Memory::rows_bytes,
            [&](std::uint32_t counter) { ask_for_rows(d_o, boxes.d_o, my.grad.d_o, at, hv, counter); },
            [&] { copy_rows(d_o, my.grad.d_o, at, hv, my.grad.d_o ? my.call.value_size : 0); });
        take_tile<C>(my.m.of_u(), n, at, hv, boxes.u, my.m.rows(Memory::u), my.saved.u(at.slot, hv));
        take_tile<D>(my.m.of_dstate(), n, at, hv, boxes.dstate, my.m.states(Memory::dstate),
                     my.saved.dstate(at.slot, hv));
        if (my.erases)
            take_tile<C>(my.m.of_d_r(), n, at, hv, boxes.d_r, my.m.rows(Memory::d_r), my.saved.dr(at.slot, hv));
        take_tile<D>(my.m.of_state(), n, at, hv, boxes.state, my.m.states(Memory::state), my.saved.state(at.slot, hv));
    }
    template <int rows, int places, class To>
    __device__ void take_tile(const Ring<places>& turns, unsigned n, const ChunkPlace& at, int hv, const Boxes& of,
                              const To& to, const char* from) const {
        const int first = static_cast<int>(at.slot * my.saved.heads + hv) * rows;
        take(
            turns, n, of.given, rows * D * 2,
            [&](std::uint32_t counter) {
                copy_box(to.base, of, 0, first, 0, 0, counter);
                copy_box(to.base + To::panel_bytes, of, 64, first, 0, 0, counter);
            },
            [&] { copy_saved_tile<T, D, threads>(to, from, rows, my.thread); });
    }
    // Rare, and in few registers.
    __device__ void copy_rows(const Rows& to, const View& from, const ChunkPlace& at, int head, int size) const {
        constexpr int rows_at_once = threads / Rows::units;
        const int u = my.thread % Rows::units, rows = at.rows();
        const bool inside = 8 * u < size;
        const auto* data = static_cast<const T*>(from.data);
        const T* row_data = data + at.row(from, head, 0) + 8 * u + my.thread / Rows::units * from.stride[1];
        for (int row = my.thread / Rows::units; row < C; row += rows_at_once) {
            const bool take = inside && row < rows;
            ptx::copy_async(to.unit(row, u), take ? row_data : data, take);
            row_data += rows_at_once * from.stride[1];
        }
    }
    __device__ static void ask_for_rows(const Rows& to, const Boxes& of, const View& view, const ChunkPlace& at,
                                        int head, std::uint32_t counter) {
        const int row = static_cast<int>(at.tokens.begin), i2 = coordinate(view, 2, head),
                  i3 = coordinate(view, 0, at.tokens.batch);
        copy_box(to.base, of, 0, row, i2, i3, counter);
        copy_box(to.base + Rows::panel_bytes, of, 64, row, i2, i3, counter);
    }

    __device__ void multiply_states_by_element(unsigned n) const {
        constexpr int lanes = 32 * tracing_warps, units = D * D / 8;
        const int first = my.thread - (threads - lanes);
        const auto* left = reinterpret_cast<const uint4*>(ptx::shared_memory() + Memory::state) + first;
        const auto* right = reinterpret_cast<const uint4*>(ptx::shared_memory() + Memory::dstate) + first;
        my.m.of_factors().wait(n);  // then the place of the sum is free
        my.m.of_dstate().wait(n);
        my.m.of_state().wait(n);
        if (my.has_gate_gradients()) {
            float sums[4] = {};
#pragma unroll 2
            for (int i = 0; i < units; i += lanes) add_dot<T>(left[i], right[i], sums);
            const float all = sum_of_warp(diagonal_sum(sums, my.lane));
            if (my.lane == 0) my.small.sums[n % 2].through[my.warp - (4 - tracing_warps)] = all;
        }
        my.m.of_dstate().release(n, my.lane);
        my.m.of_state().release(n, my.lane);
        my.m.of_sums().commit(n, my.lane);
    }
};

}  // namespace softdelta::cuda
