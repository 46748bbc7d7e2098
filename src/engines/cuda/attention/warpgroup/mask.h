// What causal and window leave of a tile, whose rows are queries and columns keys, or the other way round.
#pragma once

#include "engines/cuda/attention/warpgroup/tiles.h"

namespace softdelta::cuda::warpgroup {

struct Mask {
    Span seen[2];  // columns that the lane's two rows see
    Span all;      // columns that all rows of the warpgroup see

    // Of a warpgroup's queries from `first` on, of which the lane has first + row and first + row + 8.
    __device__ static Mask of_queries(const AttentionCall& call, const AttentionSequence& s, int first, int row) {
        return {{Span(visible_keys(call, s, first + row)), Span(visible_keys(call, s, first + row + 8))},
                Span(visible_keys(call, s, first + 63).begin, visible_keys(call, s, first).end)};
    }
    // The same of keys, where those beyond the last see nothing.
    __device__ static Mask of_keys(const AttentionCall& call, const AttentionSequence& s, int first, int row) {
        const auto queries = [&](Index key) { return key < s.k_count ? Span(seeing_queries(call, s, key)) : Span(); };
        Mask mask{{queries(first + row), queries(first + row + 8)}, {}};
        if (first + 64 <= s.k_count)
            mask.all = Span(seeing_queries(call, s, first + 63).begin, seeing_queries(call, s, first).end);
        return mask;
    }

    // Of N columns that begin at `at`.
    template <int N>
    __device__ bool hides(int at) const {
        return at < all.begin || at + N > all.end;
    }
    template <int N>
    __device__ void hide(Acc<64, N>& x, int at, int lane, float hidden = -INFINITY) const {
        x.hide({seen[0].begin - at, seen[1].begin - at}, {seen[0].end - at, seen[1].end - at}, lane, hidden);
    }
};

}  // namespace softdelta::cuda::warpgroup
