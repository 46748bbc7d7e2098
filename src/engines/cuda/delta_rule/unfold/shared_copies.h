// What a block of shared_gate.cu copies, while it multiplies: tiles of the value head after this one, or of the next
// chunk, as soon as nobody reads what was in them.
//
//     dO, dR, factors, and keys into their other set    when dO S, dR S and the pairs are done
//     U, S, dS'                                         after all products
//
// Keys of a rule with a p of its own have one set, and are copied after the results.
#pragma once

#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/unfold/shared_tiles.h"

namespace softdelta::cuda {

template <class T, int D, bool own_p, bool warpgroups>
class UnfoldCopies : protected UnfoldTiles<T, D, own_p, warpgroups> {
  public:
    using Base = UnfoldTiles<T, D, own_p, warpgroups>;
    using Base::C;
    using Base::call_;
    using Base::d_o;
    using Base::d_r;
    using Base::dstate;
    using Base::erases_;
    using Base::grad_;
    using Base::here;
    using Base::key;
    using Base::next;
    using Base::saved_;
    using Base::small_;
    using Base::state;
    using Base::step_;
    using Base::thread_;
    using Base::threads;
    using Base::turn_;
    using Base::u;
    using typename Base::Layout;

    using Base::Base;

    __device__ void copy_keys(const ChunkPlace& at, unsigned step) const {
        const auto copy = [&](unsigned which, const View& from) {
            copy_rows(key(step, which), from, at.tokens, 0, at.h, 0, call_.key_size, thread_, threads);
        };
        copy(0, call_.q);
        copy(1, call_.k);
        if (own_p) copy(2, call_.p);
    }
    __device__ void copy_first(const ChunkPlace& at, int i, int turn) const {
        const int hv = call_.value_head(at.h, i);
        copy_rows(d_o(), grad_.d_o, at.tokens, 0, hv, 0, grad_.d_o ? call_.value_size : 0, thread_, threads);
        if (erases_) copy_tile(d_r(), saved_.dr(at.slot, hv), C);
        copy_bytes(ptx::shared_address(small_.factors + turn), saved_.record(at.slot, hv) + ChunkRecord::factors,
                   static_cast<int>(sizeof(RowFactors)), thread_, threads);
    }
    __device__ void copy_rest(const ChunkPlace& at, int i) const {
        const int hv = call_.value_head(at.h, i);
        copy_tile(u(), saved_.u(at.slot, hv), C);
        ptx::commit_copies();
        copy_tile(state(), saved_.state(at.slot, hv), D);
        ptx::commit_copies();
        copy_tile(dstate(), saved_.dstate(at.slot, hv), D);
        ptx::commit_copies();
    }
    __device__ void copy_first_of_next(int i) const {
        if (i + 1 < call_.group) return copy_first(here(), i + 1, turn_ ^ 1);
        if (next().left_out != 0) return;
        if (Layout::key_sets > 1) copy_keys(next(), step_ + 1);
        copy_first(next(), 0, turn_ ^ 1);
    }
    __device__ void copy_rest_of_next(int i) const {
        if (i + 1 < call_.group)
            copy_rest(here(), i + 1);
        else if (Layout::key_sets > 1 && next().left_out == 0)
            copy_rest(next(), 0);
    }
    template <class To>
    __device__ void copy_tile(const To& to, const char* from, int rows) const {
        copy_saved_tile<T, D, threads>(to, from, rows, thread_);
    }
};

}  // namespace softdelta::cuda
