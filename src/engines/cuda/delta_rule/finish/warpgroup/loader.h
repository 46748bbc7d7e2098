// The warpgroup that copies: tiles of the next value heads, as soon as their places are free.
#pragma once

#include "engines/cuda/delta_rule/chunk/rows.h"
#include "engines/cuda/delta_rule/finish/warpgroup/role.h"

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
    static constexpr int threads = warpgroup_threads, barrier = 1;

  public:
    using Base::Base;

    __device__ void run() const {
        const ChunkPlaces places{call_, sequences_, saved_};
        if (thread_ == 0) small_.places[0] = places.find(blockIdx.x);
        unsigned n = 0;
        for (unsigned step = 0;; ++step) {
            ptx::barrier(barrier, threads);
            const ChunkPlace& at = small_.places[step % 4];
            m_.keys().wait_until_free(step);
            if (at.left_out == 0) copy_keys(at, step);
            m_.keys().fill_with_copies(step);
            ptx::arrive(m_.keys().filled(step));  // the place, too
            if (at.left_out != 0) return;
            for (int i = 0; i < call_.group; ++i, ++n) {
                copy_head(at, call_.value_head(at.h, i), n);
                if (i == 0 && thread_ == 0) small_.places[(step + 1) % 4] = places.find(at.number + gridDim.x);
            }
        }
    }

  private:
    __device__ void copy_keys(const ChunkPlace& at, unsigned step) const {
        const auto copy = [&](int which, const View& from) {
            copy_rows(m_.key(step, which), from, at.tokens, 0, at.h, 0, call_.key_size, thread_, threads);
        };
        copy(0, call_.q);
        copy(1, call_.k);
    }
    // In the order in which places become free.
    __device__ void copy_head(const ChunkPlace& at, int hv, unsigned n) const {
        const auto take = [&](const Turns& turns, const auto& copy) {
            turns.wait_until_free(n);
            copy();
            turns.fill_with_copies(n);
        };
        if (erases_) {  // the eraser reads it from memory, half a row each
            const int r = thread_ / 2;
            const T* v = static_cast<const T*>(call_.v.data) + at.row(call_.v, hv, r) + D / 2 * (thread_ % 2);
            if (r < at.rows() && D / 2 * (thread_ % 2) < call_.value_size) ptx::prefetch(v);
        }
        take(m_.of_factors(), [&] {
            copy_bytes(ptx::shared_address(small_.factors + n % 2), saved_.record(at.slot, hv) + ChunkRecord::factors,
                       static_cast<int>(sizeof(RowFactors)), thread_, threads);
        });
        take(m_.of_d_o(), [&] {
            copy_rows(m_.d_o_of(n), grad_.d_o, at.tokens, 0, hv, 0, grad_.d_o ? call_.value_size : 0, thread_, threads);
        });
        take(m_.of_u(), [&] { copy_tile(m_.rows(Base::Memory::u), saved_.u(at.slot, hv), C); });
        take(m_.of_dstate(), [&] { copy_tile(m_.states(Base::Memory::dstate), saved_.dstate(at.slot, hv), D); });
        if (erases_) take(m_.of_d_r(), [&] { copy_tile(m_.rows(Base::Memory::d_r), saved_.dr(at.slot, hv), C); });
        take(m_.of_state(), [&] { copy_tile(m_.states(Base::Memory::state), saved_.state(at.slot, hv), D); });
    }
    template <class To>
    __device__ void copy_tile(const To& to, const char* from, int rows) const {
        copy_saved_tile<T, D, threads>(to, from, rows, thread_);
    }
};

}  // namespace softdelta::cuda
