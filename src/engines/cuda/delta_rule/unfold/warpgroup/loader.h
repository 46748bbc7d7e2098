// The warpgroup that copies: tiles of the next value heads, as soon as their places are free. One thread asks the copy
// engine for them; what it does not take (the last rows of a sequence, rows of odd strides) all threads copy. The other
// warps find the next chunk, and make rowsum(S∘dS').
#pragma once

#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/unfold/warpgroup/boxes.h"
#include "engines/cuda/delta_rule/unfold/warpgroup/role.h"

namespace softdelta::cuda {

template <class T>
class Loader : WarpgroupRole<T> {
    using Base = WarpgroupRole<T>;
    using Base::C;
    using Base::call_;
    using Base::D;
    using Base::erases_;
    using Base::grad_;
    using Base::m_;
    using Base::saved_;
    using Base::sequences_;
    using Base::small_;
    using Base::thread_;
    using Memory = typename Base::Memory;
    using Rows = typename Base::Rows;
    using Base::lane_;
    using Base::warp_;
    static constexpr int threads = warpgroup_threads, barrier = 1, finder = 32;

  public:
    static constexpr int tracing_warps = 2;  // the last

    __device__ Loader(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                      const SavedChunks& saved, const UnfoldBoxes& boxes)
        : Base(call, sequences, grad, saved), boxes_(boxes) {}

    __device__ void run() const {
        const ChunkPlaces places{call_, sequences_, saved_};
        if (thread_ == finder) small_.places[0] = places.take();
        unsigned n = 0;
        for (unsigned step = 0;; ++step) {
            ptx::barrier(barrier, threads);
            const ChunkPlace& at = small_.places[step % 4];
            if (at.left_out != 0) {
                m_.keys().wait_until_free(step);
                if (thread_ == 0) ptx::arrive(m_.keys().filled(step));  // the place alone
                return;
            }
            copy_keys(at, step);
            // Another thread than that which asks, and waits for free places.
            if (thread_ == finder) small_.places[(step + 1) % 4] = places.take();
            for (int i = 0; i < call_.group; ++i, ++n) {
                copy_head(at, call_.value_head(at.h, i), n);
                if (warp_ >= 4 - tracing_warps) multiply_states_by_element(n);
            }
        }
    }

  private:
    // Where the n-th tile's place is free: ask(counter) for so many bytes, or copy().
    template <class Ask, class Copy>
    __device__ void take(const Turns& turns, unsigned n, bool by_engine, int bytes, const Ask& ask,
                         const Copy& copy) const {
        if (by_engine) {
            if (thread_ != 0) return;
            turns.wait_until_free(n);
            arrive_expecting(turns.filled(n), bytes);
            ask(turns.filled(n));
            return;
        }
        turns.wait_until_free(n);
        copy();
        ptx::wait_for_copies();
        ptx::publish_to_products();
        ptx::barrier(barrier, threads);
        if (thread_ == 0) ptx::arrive(turns.filled(n));
    }
    __device__ void copy_keys(const ChunkPlace& at, unsigned step) const {
        const bool by_engine = at.rows() == C && boxes_.q.given && boxes_.k.given;
        const auto q = m_.key(step, 0), k = m_.key(step, 1);
        take(
            m_.keys(), step, by_engine, 2 * Memory::rows_bytes,
            [&](std::uint32_t counter) {
                ask_for_rows(q, boxes_.q, call_.q, at, at.h, counter);
                ask_for_rows(k, boxes_.k, call_.k, at, at.h, counter);
            },
            [&] {
                copy_rows(q, call_.q, at.tokens, 0, at.h, 0, call_.key_size, thread_, threads);
                copy_rows(k, call_.k, at.tokens, 0, at.h, 0, call_.key_size, thread_, threads);
            });
    }
    // In the order in which places become free.
    __device__ void copy_head(const ChunkPlace& at, int hv, unsigned n) const {
        constexpr int factor_bytes = static_cast<int>(sizeof(RowFactors));
        if (erases_ && warp_ == 1)  // the eraser reads it from memory
            for (int i = lane_; i < 2 * at.rows(); i += 32)
                if (D / 2 * (i % 2) < call_.value_size)
                    ptx::prefetch(static_cast<const T*>(call_.v.data) + at.row(call_.v, hv, i / 2) + D / 2 * (i % 2));
        const std::uint32_t factors = ptx::shared_address(small_.factors + n % 2);
        const char* const record = saved_.record(at.slot, hv) + ChunkRecord::factors;
        take(
            m_.of_factors(), n, true, factor_bytes,
            [&](std::uint32_t counter) { copy_side_by_side(factors, record, factor_bytes, counter); }, [] {});
        const auto d_o = m_.d_o_of(n);
        take(
            m_.of_d_o(), n, at.rows() == C && boxes_.d_o.given, Memory::rows_bytes,
            [&](std::uint32_t counter) { ask_for_rows(d_o, boxes_.d_o, grad_.d_o, at, hv, counter); },
            [&] {
                copy_rows(d_o, grad_.d_o, at.tokens, 0, hv, 0, grad_.d_o ? call_.value_size : 0, thread_, threads);
            });
        take_tile<C>(m_.of_u(), n, at, hv, boxes_.u, m_.rows(Memory::u), saved_.u(at.slot, hv));
        take_tile<D>(m_.of_dstate(), n, at, hv, boxes_.dstate, m_.states(Memory::dstate), saved_.dstate(at.slot, hv));
        if (erases_) take_tile<C>(m_.of_d_r(), n, at, hv, boxes_.d_r, m_.rows(Memory::d_r), saved_.dr(at.slot, hv));
        take_tile<D>(m_.of_state(), n, at, hv, boxes_.state, m_.states(Memory::state), saved_.state(at.slot, hv));
    }
    template <int rows, class To>
    __device__ void take_tile(const Turns& turns, unsigned n, const ChunkPlace& at, int hv, const Boxes& boxes,
                              const To& to, const char* from) const {
        const int first = static_cast<int>(at.slot * saved_.heads + hv) * rows;
        take(
            turns, n, boxes.given, rows * D * 2,
            [&](std::uint32_t counter) {
                copy_box(to.base, boxes, 0, first, 0, 0, counter);
                copy_box(to.base + To::panel_bytes, boxes, 64, first, 0, 0, counter);
            },
            [&] { copy_saved_tile<T, D, threads>(to, from, rows, thread_); });
    }
    __device__ static void ask_for_rows(const Rows& to, const Boxes& boxes, const View& view, const ChunkPlace& at,
                                        int head, std::uint32_t counter) {
        const int row = static_cast<int>(at.tokens.begin), i2 = coordinate(view, 2, head),
                  i3 = coordinate(view, 0, at.tokens.batch);
        copy_box(to.base, boxes, 0, row, i2, i3, counter);
        copy_box(to.base + Rows::panel_bytes, boxes, 64, row, i2, i3, counter);
    }

    __device__ void multiply_states_by_element(unsigned n) const {
        constexpr int lanes = 32 * tracing_warps, units = D * D / 8;
        const int first = thread_ - (threads - lanes);
        const auto* left = reinterpret_cast<const uint4*>(ptx::shared_memory() + Memory::state) + first;
        const auto* right = reinterpret_cast<const uint4*>(ptx::shared_memory() + Memory::dstate) + first;
        m_.of_factors().wait_until_there(n);  // then the place of the sum is free
        m_.of_dstate().wait_until_there(n);
        m_.of_state().wait_until_there(n);
        if (this->has_gate_gradients()) {
            float sums[4] = {};
#pragma unroll 2
            for (int i = 0; i < units; i += lanes) add_dot<T>(left[i], right[i], sums);
            const float all = sum_of_warp(diagonal_sum(sums, lane_));
            if (lane_ == 0) small_.sums[n % 2].through[warp_ - (4 - tracing_warps)] = all;
        }
        m_.of_dstate().release(n, lane_);
        m_.of_state().release(n, lane_);
        m_.of_sums().come(n, lane_);
    }

    const UnfoldBoxes& boxes_;
};

}  // namespace softdelta::cuda
