// The chunks of key heads that the kernels of gradients share out.
#pragma once

#include "engines/cuda/delta_rule/saved.h"

namespace softdelta::cuda {

// A chunk of a key head; they are numbered head by head, whose rows lie side by side in memory, then as
// ChunkSequences::number() has them: the first of a batch are those that the scan from the end has left in caches.
// Four of them are a multiple of 128 bytes: what follows in shared memory is aligned for the copy engine.
struct alignas(64) ChunkPlace {
    unsigned number;
    Sequence tokens;  // of the chunk alone
    Index slot;
    int h;
    int left_out;  // it has no tokens, or goes token by token

    __device__ int rows() const { return static_cast<int>(tokens.count); }
    // Of row i of a value head.
    __device__ Index row(const View& v, int hv, int i) const { return tokens.row(v, i, hv); }
};

struct ChunkPlaces {
    const ChunkGradients& of;

    __device__ unsigned count() const {
        return static_cast<unsigned>(of.sequences.all_chunks()) * static_cast<unsigned>(of.call.key_heads());
    }
    __device__ ChunkPlace operator[](unsigned number) const {
        const unsigned heads = static_cast<unsigned>(of.call.key_heads());
        const int h = static_cast<int>(number % heads);
        const ChunkPosition at = of.sequences.number(number / heads);
        const Index slot = at.s.first_slot + at.c;
        const Sequence tokens{at.s.batch, at.s.begin + at.c * chunk_rows, at.rows(), -1};
        int left_out = tokens.count <= 0;
        for (int i = 0; i < of.call.group && tokens.count > 0; ++i)
            left_out |= of.saved.goes_by_token(slot, of.call.value_head(h, i));
        return {number, tokens, slot, h, left_out};
    }
    // The block's first chunk from this one on that is not left out; otherwise one that is.
    __device__ ChunkPlace find(unsigned number) const {
        ChunkPlace at{number, {}, 0, 0, 1};
        for (; at.left_out != 0 && number < count(); number += gridDim.x) at = (*this)[number];
        return at;
    }
    // The first that no block has taken: multiprocessors differ in how fast their memory is.
    __device__ ChunkPlace take() const {
        ChunkPlace at{0, {}, 0, 0, 1};
        while (at.left_out != 0) {
            const auto number = static_cast<unsigned>(atomicAdd(of.saved.taken, 1));
            if (number >= count()) break;
            at = (*this)[number];
        }
        return at;
    }
};

}  // namespace softdelta::cuda
