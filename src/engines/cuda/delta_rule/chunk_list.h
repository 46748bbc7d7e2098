// Where the sequences of a call in chunks lie, and their chunks. The number of a batch row says where it lies. For
// packed sequences two lists do: the sequences that a pass takes, and their chunks. So grids, memory and flags follow
// ΣL/64 + N, and no block looks for its chunk.
#pragma once

#include <algorithm>

#include "engines/cuda/delta_rule/call.h"
#include "engines/cuda/device/workspace.h"

namespace softdelta::cuda {

struct ChunkPosition {
    DeltaSequence s;
    Index c;  // its tokens are those from c·64 on

    __device__ int rows() const { return s.rows(c); }
};

struct ChunkSequences {
    int first = 0, count = 0;  // batch rows; listed sequences: at most so many
    bool packed = false;
    Index tokens = 0, pool = 0;  // T; entries of the pool of states
    Index interval = 1;          // of states on the way
    Index chunks = 0;            // of a batch row; of all that are listed: at most so many
    Index row_slots = 0;         // of a batch row, in memory
    Index first_slot = 0;        // of the first batch row
    DeltaSequence* listed = nullptr;
    ChunkPosition* listed_chunks = nullptr;
    int* chunk_count = nullptr;  // how many are listed
    Index* begins = nullptr;     // [N + 1], of lengths on the host

    // Of `first` and the sequences after it, the longest first where they are listed.
    __device__ DeltaSequence operator[](int i) const {
        if (packed) return listed[first + i];
        const Index n = first + i;
        return {{n, 0, tokens, n < pool ? n : -1}, 0, first_slot + i * row_slots};
    }
    // Chunk c of a batch row, or the c-th that is listed.
    __device__ ChunkPosition chunk(Index c, int row) const {
        if (!packed) return {(*this)[row], c};
        return c < chunks ? listed_chunks[c] : ChunkPosition{{{0, 0, 0, -1}, 0, 0}, 0};
    }
    // All of them one after the other: those of batch rows in the order of time.
    __device__ Index all_chunks() const { return packed ? Index(*chunk_count) : chunks * count; }
    __device__ ChunkPosition number(unsigned n) const {
        if (packed) return listed_chunks[n];
        const auto rows = static_cast<unsigned>(count);
        return {(*this)[static_cast<int>(n % rows)], n / rows};
    }

    Index end_slot() const { return packed ? chunks : first_slot + count * row_slots; }
    Index most_chunks() const { return packed ? chunks : chunks * count; }
    // What is listed lies in one.
    int rows_of_grid() const { return packed ? 1 : count; }
    // Of these, sequences [begin, begin + some).
    ChunkSequences part(int begin, int some) const {
        ChunkSequences s = *this;
        s.first += begin;
        s.count = some;
        s.first_slot += begin * row_slots;
        return s;
    }
};

// Chunks of a call; of packed ones a bound, for lengths may lie on the device.
inline Index chunk_slots(const core::DeltaInputs& in) {
    const Index of_row = in.q.shape[1] / chunk_rows + 1;
    return in.cu_seqlens ? of_row + core::sequence_count(in) : in.q.shape[0] * of_row;
}

// Those of a call that are of so many tokens; lists are parts of the workspace. states: the final ones, if there are.
ChunkSequences chunk_sequences(const core::DeltaInputs& in, const core::DeltaOptions& options,
                               const core::Tensor& states, const TokenRange& taken, MemoryParts& parts);
// Writes the lists.
void list_chunks(const core::DeltaInputs& in, const TokenRange& taken, const ChunkSequences& sequences,
                 cudaStream_t stream);

constexpr int sequences_of_grid = 65535 / 2;  // a grid has room for so many sequences in its third dimension, twice

// use(some) for so many sequences at a time.
template <class Use>
void for_each_part(const ChunkSequences& all, const Use& use) {
    for (int first = 0; first < all.count; first += sequences_of_grid)
        use(all.part(first, std::min(sequences_of_grid, all.count - first)));
}

}  // namespace softdelta::cuda
