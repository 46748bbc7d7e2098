// Operands of attention as they come into tiles: boxes for TMA where sequences are whole rows of the tensors, zeros
// beyond their ends; otherwise rows, which a warpgroup copies.
#pragma once

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/warpgroup/block.h"
#include "engines/cuda/tile/copy.h"

namespace softdelta::cuda::warpgroup {

// Whether boxes end where a sequence does: those of a batch, and those that are cut for packed ones.
inline bool are_whole(const AttentionPass& pass) {
    const auto& [call, s] = pass;
    return (s.table == nullptr || s.boxes != nullptr) && !s.in_use.given && call.block_rows == 0;
}
// Boxes number `which` of CutBoxes for the block's sequence, or of all where nothing is packed.
template <bool by_tma>
__device__ inline const Boxes& own_boxes(const Boxes& all, const AttentionSequences& sequences,
                                         const AttentionSequence& s, int which) {
    if (!by_tma || sequences.boxes == nullptr) return all;
    return static_cast<const Boxes*>(sequences.boxes)[s.mask_batch * sequence_boxes + which];
}
// Before, by threads of the second warp, one for each of the sequence's boxes; the block waits afterwards.
__device__ inline void take_own_boxes(bool given, const AttentionSequences& sequences, int i) {
    const int which = static_cast<int>(threadIdx.x) - 32;
    if (given && sequences.boxes != nullptr && which >= 0 && which < sequence_boxes)
        take_cut_boxes(static_cast<const Boxes*>(sequences.boxes)[Index(i) * sequence_boxes + which]);
}

// Of q, k, v or do [B, L, H, D].
inline Boxes row_boxes(const View& v, const AttentionCall& call, Index length, Index heads, int channels, int rows) {
    const Index batches = call.total_queries / std::max(call.queries, Index(1));
    return boxes_of(v, {3, 1, 2, 0}, {channels, length, heads, batches}, rows);
}
// Of a bias or its gradient [B, H, Lq, Lk].
inline Boxes bias_boxes(const View& v, const AttentionCall& call, int rows, int columns) {
    const Index batches = call.total_queries / std::max(call.queries, Index(1));
    return boxes_of(v, {3, 2, 1, 0}, {call.keys, call.queries, call.heads / call.bias_group, batches}, rows, columns);
}
// Of ds, for tiles of so many queries.
inline Boxes score_boxes(const StoredScores& ds, int rows) {
    return boxes_of(ds.view, {3, 2, 1, 0}, {ds.keys, ds.queries, ds.heads, ds.sequences}, rows);
}

// What a kernel's tiles come from, given where TMA copies; ds goes there.
struct OperandBoxes {
    Boxes q, k, v, d_o, bias, ds;
    bool given = false;

    // Of blocks of so many rows of queries and keys; d_o may be absent.
    static OperandBoxes of(const AttentionPass& pass, const View& d_o, int queries, int keys) {
        const AttentionCall& call = pass.call;
        OperandBoxes b;
        if (!are_whole(pass)) return b;
        b.q = row_boxes(call.q, call, call.queries, call.heads, call.channels, queries);
        b.k = row_boxes(call.k, call, call.keys, call.heads / call.group, call.channels, keys);
        b.v = row_boxes(call.v, call, call.keys, call.heads / call.group, call.value_channels, keys);
        b.d_o = row_boxes(d_o, call, call.queries, call.heads, call.value_channels, queries);
        b.given = b.q.given && b.k.given && b.v.given && (!d_o || b.d_o.given);
        return b;
    }
    // A bias comes with the tiles; none is cut for packed sequences.
    void add_bias(const AttentionPass& pass, int rows, int columns) {
        if (given) bias = bias_boxes(pass.call.bias, pass.call, rows, columns);
        given = bias.given && pass.sequences.table == nullptr;
    }
    // For each packed sequence its own, in this order: own_boxes().
    void cut(const AttentionPass& pass, const View& of_d_o, cudaStream_t stream) const {
        const auto& [call, s] = pass;
        if (!given || s.boxes == nullptr) return;
        CutBoxes all;
        all.add(q, call.q, false), all.add(k, call.k, true), all.add(v, call.v, true);
        if (of_d_o) all.add(d_o, of_d_o, false);
        launch_cut_boxes(s, all, stream);
    }
};

// Rows of a head. bring() copies them into a tile, in the background: by TMA for one thread, whose bytes arrive at
// `full`, or by all threads of a warpgroup.
template <bool by_tma>
struct HeadRows {
    const Boxes& boxes;
    const View& view;
    int head;
    Index batch;

    template <class Tile>
    __device__ void bring(const Tile& tile, Index first, int, std::uint32_t full) const {
        copy_panels(tile, boxes, 0, static_cast<int>(first), coordinate(view, 2, head), coordinate(view, 0, batch),
                    full);
    }
};
template <>
struct HeadRows<false> {
    Rows rows;

    template <class Tile>
    __device__ void bring(const Tile& tile, Index first, int thread, std::uint32_t) const {
        copy_rows(tile, rows, first, thread);
    }
};
template <bool by_tma>
__device__ inline HeadRows<by_tma> rows_of_queries(const View& view, const Boxes& boxes, const AttentionSequence& s,
                                                   int head, int channels) {
    if constexpr (by_tma)
        return {boxes, view, head, s.batch};
    else
        return {Rows::of_queries(view, s, head, channels)};
}
template <bool by_tma>
__device__ inline HeadRows<by_tma> rows_of_keys(const View& view, const Boxes& boxes, const AttentionCall& call,
                                                const AttentionSequence& s, int head, int channels) {
    if constexpr (by_tma)
        return {boxes, view, head, s.key_batch};
    else
        return {Rows::of_keys(view, call, s, head, channels)};
}

// A block's rows of operands; boxes for packed sequences are in the order of OperandBoxes::cut().
// The kernel of keys takes q and do of many heads, and keeps their boxes instead: that spills less.
template <bool by_tma>
struct BlockRows {
    const AttentionCall& call;
    const OperandBoxes& boxes;
    const AttentionSequences& sequences;
    const AttentionSequence& s;

    __device__ auto q(int head) const {
        return rows_of_queries<by_tma>(call.q, own(boxes.q, 0), s, head, call.channels);
    }
    __device__ auto k(int head) const {
        return rows_of_keys<by_tma>(call.k, own(boxes.k, 1), call, s, head, call.channels);
    }
    __device__ auto v(int head) const {
        return rows_of_keys<by_tma>(call.v, own(boxes.v, 2), call, s, head, call.value_channels);
    }
    __device__ auto d_o(const View& view, int head) const {
        return rows_of_queries<by_tma>(view, own(boxes.d_o, 3), s, head, call.value_channels);
    }

  private:
    __device__ const Boxes& own(const Boxes& all, int which) const {
        return own_boxes<by_tma>(all, sequences, s, which);
    }
};

// A producer's begin and end of a stage: TMA's `bytes` arrive at its mbarrier, or the threads with their copies.
template <bool by_tma, int stages>
__device__ inline void begin_stage(const Ring<stages>& ring, int n, int bytes) {
    ring.acquire(n);
    if constexpr (by_tma) arrive_expecting(ring.full(n), bytes);
}
template <bool by_tma, int stages>
__device__ inline void end_stage(const Ring<stages>& ring, int n) {
    if constexpr (!by_tma) ring.commit_copies(n);
}
// produce.template operator()<by_tma>(thread), by one thread or by the whole warpgroup.
template <class Produce>
__device__ inline void produce_by(bool tma, const Produce& produce) {
    const int thread = static_cast<int>(threadIdx.x);
    if (!tma)
        produce.template operator()<false>(thread);
    else if (thread == 0)
        produce.template operator()<true>(0);
}

}  // namespace softdelta::cuda::warpgroup
