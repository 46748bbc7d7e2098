// A block of 128 queries of a head, 64 for each of two consumers, and the keys that they see: of o, and of dq.
#pragma once

#include "engines/cuda/attention/warpgroup/boxes.h"

namespace softdelta::cuda::warpgroup {

// What producer and consumers know of it. Out: ForwardOutputs or Gradients.
template <class T, class Out>
struct QueryBlock {
    using Tiles = T;

    Tiles m;
    const AttentionCall& call;
    const OperandBoxes& boxes;
    const Out& out;
    const AttentionSequences& sequences;
    const AttentionSequence& s;
    int head, first;
    Span keys;
};

// Consumer::run() says whether a number is not finite; skips(tile): nothing is to do.
template <class Producer, class Consumer, class Block, class Out, class Skips>
__device__ void run_query_block(const AttentionPass& pass, const OperandBoxes& boxes, const Out& out, const Redo& redo,
                                const Skips& skips) {
    const auto& [call, sequences] = pass;
    using Tiles = typename Block::Tiles;
    const int head = static_cast<int>(blockIdx.x);
    const RowTile at = sequences.tile_of_block(sequences.of_queries, true);
    if (!at) return redo.clear(at, call.heads, head);
    if (skips(at, head)) return;
    take_own_boxes(boxes.given, sequences, at.i);
    const int first = static_cast<int>(at.first);
    const Tiles m{ptx::shared_address(ptx::shared_memory())};
    const AttentionSequence& s = share_sequence(sequences, at.i, Tiles::sequence_at);
    if (threadIdx.x == 0) m.start(boxes.given);
    const Block block{m, call, boxes, out, sequences, s, head, first, keys_of_block<Tiles::N>(call, s, first)};
    __syncthreads();
    const auto produce = [&]<bool by_tma>(int thread) {
        if constexpr (!by_tma || !Tiles::copied_by_threads) Producer{block}.template run<by_tma>(thread);
    };
    const auto consume = [&](int warpgroup, int warp, int lane) {
        Consumer consumer{block, warpgroup, warp, lane};
        const bool nonfinite = any_consumer(consumer.run());
        if (threadIdx.x == warpgroup_threads)
            redo.mark(sequences.tile_of_block(sequences.of_queries, true), call.heads, head, nonfinite);
        if constexpr (requires { consumer.store_dq(); }) consumer.store_dq();
    };
    share_roles([&] { produce_by(boxes.given, produce); }, consume);
}

}  // namespace softdelta::cuda::warpgroup
