// The backward pass of a few heads on many threads, window by window of chunks, step by step. Where the forward pass
// kept nothing, a sweep makes states and U from the first window to the last. A scan makes gradients of states from the
// last to the first. Chunks are folded side by side, value columns are swept and scanned side by side, and what is left
// of a chunk needs no other one:
//
//     sweep               window 0    window 1    window 2
//     fold    window 0    window 1    window 2    window 2    window 1    window 0
//     scan                                                    window 2    window 1    window 0
//     finish                                                              window 2    window 1    window 0
//
// With threads for both, the sweep and the scan run at once. A scan's results wait for the sweep.
//
//     sweep               window 0    window 1    window 2
//     scan                window 2    window 1    window 0
//     finish                                      window 1    windows 0, 2
//
// Where states were kept, those of a window's chunks are replayed beside its scan. Every sum is taken as by one thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "core/parallel.h"
#include "engines/cpu/delta_rule/call.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::cpu {

class DeltaSplitBackward {
  public:
    // Whether so many threads, a key head for each, would wait for each other.
    static bool pays(const DeltaCall& call, int threads);

    // sums_size: gate sums of a value head.
    DeltaSplitBackward(const DeltaCall& call, const kernels::DeltaBackwardSplit& kernel,
                       const core::DeltaGradients& grad, Index sums_size, int threads);

    std::size_t bytes() const;
    // sums: [sequences, value heads, sums_size]. left: [sequences, key heads] 1 where a key head is left to do, for its
    // tokens must follow each other, else 0.
    void run(std::byte* memory, double* sums, Index* left);

  private:
    // A segment of a key head, or a chunk.
    struct Place {
        Index unit, sequence, key_head;
        Index begin, count;  // tokens
        Index chunk;         // of the window
    };
    // What chunks of value heads have in memory: a place, and bytes to the next chunk and to the next value head.
    struct Memory {
        std::byte* first;
        std::size_t chunk, head;

        kernels::DeltaChunkMemory chunks(Index value_head) const {
            return {first + static_cast<std::size_t>(value_head) * head, chunk};
        }
        kernels::DeltaChunkMemory heads() const { return {first, head}; }
    };
    // Units of a window, side by side with others.
    struct Work {
        Index window, units;
        void (DeltaSplitBackward::*run)(Index window, Index unit, std::byte* scratch) const;
    };

    // Those of a step: at most two windows are finished in it, the rest has one.
    struct Works {
        std::array<Work, 6> of;
        std::size_t count = 0;

        const Work* begin() const { return of.data(); }
        const Work* end() const { return of.data() + count; }
    };

    void take(kernels::Scratch& memory);
    Works works(Index step) const;
    void run_side_by_side(const Works& all) const;
    void fold_written(Index window, Index unit, std::byte* scratch) const;
    void fold_all(Index window, Index unit, std::byte* scratch) const;
    void fold(const Place& at, bool reads, std::byte* scratch, const Memory& to) const;
    void sweep(Index window, Index unit, std::byte* scratch) const;
    void scan(Index window, Index unit, std::byte* scratch) const;
    void replay(Index window, Index unit, std::byte* scratch) const;
    void finish(Index window, Index unit, std::byte* scratch) const;
    void add_gate_sums(Index window, double* sums) const;

    // The steps that sweep, scan and finish a window. It is folded in the step before.
    Index sweep_step(Index window) const { return window + 1; }
    Index scan_step(Index window) const { return (is_kept_ || meets_ ? 0 : windows()) + windows() - window; }
    Index finish_step(Index window) const {
        return 1 + (is_kept_ ? scan_step(window) : std::max(sweep_step(window), scan_step(window)));
    }
    // The window that a step sweeps or scans; outside of [0, windows()) there is none. It finishes one of these two of
    // the step before, or both.
    Index swept_in(Index step) const { return step - 1; }
    Index scanned_in(Index step) const { return scan_step(0) - step; }
    // Windows whose scan waits for the sweep: from here on.
    Index first_waiting() const { return meets_ ? (windows() + 1) / 2 : windows(); }

    Index key_units() const { return call_.sequences() * call_.key_heads(); }
    Index ranges() const { return heads_ * parts_; }
    Index windows() const { return (largest_.tokens + window_ * segment_ - 1) / (window_ * segment_); }
    Index window_chunks() const { return window_ * segment_chunks_; }
    Index chunks_of(Index sequence) const;
    Index chunks_before(Index sequence) const;  // in all heads of earlier sequences, of each
    kernels::DeltaHeads heads(const Place& at) const { return call_.heads(at.sequence, at.key_head, 1); }
    kernels::DeltaGradients gradients(const Place& at) const {
        return call_.gradients(grad_, at.sequence, at.key_head);
    }
    Place segment(Index window, Index unit, Index segment) const;
    Place chunk(Index window, Index unit, Index chunk) const;
    kernels::DeltaColumns columns(const Place& at, Index value_head, Index part) const;
    // Of the windows in work, `place` of them or where a window is.
    Index windows_at_once() const { return 3 + windows() - first_waiting(); }
    Index place_of(Index window) const { return window < first_waiting() ? window % 3 : 3 + window - first_waiting(); }
    Memory in_place(std::byte* memory, std::size_t bytes, Index place, const Place& at) const;
    Memory folded_to_sweep(Index window, const Place& at) const {
        return in_place(folded_, sizes_.folded, windows_at_once() + window % 2, at);
    }
    Memory folded(Index window, const Place& at) const {
        return in_place(folded_, sizes_.folded, place_of(window), at);
    }
    Memory scanned(Index window, const Place& at) const {
        return in_place(scanned_, sizes_.scanned, place_of(window), at);
    }
    std::byte* state(Index range) const { return states_ + static_cast<std::size_t>(range) * state_; }
    Memory saved(Index window, const Place& at) const;
    Index sums_at_once() const { return meets_ ? windows() : 3; }
    double* gate_sums(Index window, const Place& at) const;
    bool is_left(Index unit) const;
    void leave(Index unit) const;

    const DeltaCall& call_;
    const kernels::DeltaBackwardSplit& kernel_;
    const core::DeltaGradients& grad_;
    bool is_kept_, meets_ = false;
    Index heads_, sums_size_;  // value heads of all sequences
    kernels::DeltaHeads largest_;
    kernels::DeltaBackwardSplitSizes sizes_;
    Index segment_, segment_chunks_, window_;  // tokens, chunks of a segment; segments
    Index columns_, parts_;                    // of a range; ranges of value columns of a head
    std::size_t state_ = 0;                    // bytes of the state of a range
    core::Team team_;
    std::byte *scratch_ = nullptr, *states_ = nullptr, *folded_ = nullptr, *scanned_ = nullptr, *saved_ = nullptr;
    double* gate_sums_ = nullptr;  // of windows, [key heads of all sequences, chunks, group, sums_size]
    Index* left_ = nullptr;
};

}  // namespace softdelta::cpu
