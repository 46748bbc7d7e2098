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

template <class Tiles>
struct UnfoldCopies {
    using T = typename Tiles::Element;
    static constexpr int C = chunk_rows, D = Tiles::size, threads = unfold_threads;
    static constexpr bool keys_twice = Tiles::Layout::key_sets > 1;

    const Tiles& my;

    __device__ void keys(const ChunkPlace& at, unsigned step) const {
        const auto copy = [&](unsigned which, const View& from) {
            copy_rows<threads>(my.key(step, which), from, at.tokens, 0, at.h, 0, my.call.key_size, my.thread);
        };
        copy(0, my.call.q);
        copy(1, my.call.k);
        if (Tiles::has_p && !Tiles::p_in_part) copy(2, my.call.p);
    }
    __device__ void first(const ChunkPlace& at, int i, int turn) const {
        const int hv = my.call.value_head(at.h, i);
        copy_rows<threads>(my.d_o(), my.grad.d_o, at.tokens, 0, hv, 0, my.grad.d_o ? my.call.value_size : 0, my.thread);
        if (my.erases) tile(my.d_r(), my.saved.dr(at.slot, hv), C);
        copy_bytes<static_cast<int>(sizeof(RowFactors)), threads>(
            ptx::shared_address(my.small.factors + turn),
            my.saved.template record<T>(at.slot, hv) + RecordOf<T>::factors, my.thread);
    }
    __device__ void rest(const ChunkPlace& at, int i) const {
        const int hv = my.call.value_head(at.h, i);
        tile(my.u(), my.saved.u(at.slot, hv), C);
        ptx::commit_copies();
        tile(my.state(), my.saved.state(at.slot, hv), D);
        ptx::commit_copies();
        tile(my.dstate(), my.saved.dstate(at.slot, hv), D);
        ptx::commit_copies();
    }
    __device__ void first_of_next(int i) const {
        if (i + 1 < my.call.group) return first(my.here(), i + 1, my.turn ^ 1);
        if (my.next().left_out != 0) return;
        if (keys_twice) keys(my.next(), my.step + 1);
        first(my.next(), 0, my.turn ^ 1);
    }
    __device__ void rest_of_next(int i) const {
        if (i + 1 < my.call.group)
            rest(my.here(), i + 1);
        else if (keys_twice && my.next().left_out == 0)
            rest(my.next(), 0);
    }
    // In parts: step n of a chunk, of `steps` for each value head. A third of these are for the pairs, for what is
    // read, for what is written; each has the parts, and then a p of its own.
    __device__ void step(int n, int steps, int buffers) const {
        constexpr int parts = D / 64;
        const int i = n / steps, hv = my.call.value_head(my.here().h, i), each = steps / 3, phase = n % steps / each,
                  at = n % each, to = n % buffers;
        const Index slot = my.here().slot;
        const auto rows = [&](int which, const char* from) {
            tile(my.part_rows(to, which), from + 64 * static_cast<int>(sizeof(T)) * at, C);
        };
        if (at == parts) {
            const typename Tiles::Rows p{my.part_rows(to, 0).base};
            copy_rows<threads>(p, my.call.p, my.here().tokens, 0, my.here().h, 0, my.call.key_size, my.thread);
            return ptx::commit_copies();
        }
        if (phase < 2) {
            copy_rows<threads>(my.part_rows(to, 0), my.grad.d_o, my.here().tokens, 0, hv, 64 * at,
                               my.grad.d_o ? my.call.value_size : 0, my.thread);
            if (my.erases) rows(1, my.saved.dr(slot, hv));
        }
        if (phase != 1) rows(phase == 0 ? 2 : 0, my.saved.u(slot, hv));
        if (phase > 0)
            tile(my.part_state(to),
                 (phase == 1 ? my.saved.state(slot, hv) : my.saved.dstate(slot, hv)) + at * Tile<T, D>::bytes(64), 64);
        if (phase == 0 && at == 0)
            copy_bytes<static_cast<int>(sizeof(RowFactors)), threads>(
                ptx::shared_address(my.small.factors + i % 2),
                my.saved.template record<T>(slot, hv) + RecordOf<T>::factors, my.thread);
        ptx::commit_copies();
    }
    template <class To>
    __device__ void tile(const To& to, const char* from, int rows) const {
        copy_saved_tile<T, D, threads>(to, from, rows, my.thread);
    }
};

}  // namespace softdelta::cuda
