// What the chunked backward passes keep of each chunk of 64 tokens and value head, tiles as they lie in shared
// memory:
//
//     record        score [64, 64], inverse [64, 64] = (I + L)⁻¹, factors of rows
//     state         [V, K]   Sᵀ before the chunk
//     dstate        [V, K]   dS'ᵀ after it
//     U, dR         [64, V]
//
// Gates of channels have the forward pass's record (chunk.h), with the inverse for `solve`.
//
// K and V are filled up to one size, 64 or 128.
//
// by_token: the chunk's gates rise, or it holds Inf or NaN; it is no chunk then, but the recurrence. Those who find out
// have flags of their own, for they run side by side.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "engines/cuda/delta_rule/call.h"
#include "engines/cuda/delta_rule/chunk.h"
#include "engines/cuda/delta_rule/tokens/gradients.h"
#include "engines/cuda/tile/shared.h"

namespace softdelta::cuda {

using SavedElement = __nv_bfloat16;  // of states, too: f16 ends at 65504; or f32, of f32 operands

// Why a chunk goes token by token: its record, or what the forward pass kept; v; d_o.
struct alignas(8) ChunkFlags {
    std::uint16_t record, values, gradients, unused;
};

struct SavedChunks {
    char* records = nullptr;
    char *states = nullptr, *dstates = nullptr;
    char *U = nullptr, *dR = nullptr;
    ChunkFlags* flags = nullptr;
    int* taken = nullptr;      // how many chunks of key heads blocks of gradients have taken
    double* shares = nullptr;  // [2, all slots, HV, channels]: a chunk's part of d_raw.bias or dg_gamma, of d_raw.A_log
    char* folded = nullptr;    // f32: records of the forward pass
    int* by_token = nullptr;   // f32: as KeptChunks has it
    double* scratch = nullptr;  // of blocks that go token by token

    Index slots = 0;                      // of chunks
    int heads = 0, size = 0;              // size: of K and V
    int element = 2;                      // bytes of a number
    Index first_slot = 0, all_slots = 0;  // of the call: the first of these, how many there are

    __host__ __device__ Index state_bytes() const { return Index(size) * size * element; }
    __host__ __device__ Index value_bytes() const { return Index(chunk_rows) * size * element; }
    template <class T = SavedElement>
    __device__ char* record(Index slot, int hv) const {
        return records + (slot * heads + hv) * RecordOf<T>::bytes;
    }
    __device__ char* channel_record(Index slot, int hv) const {
        return records + (slot * heads + hv) * FoldedChunk<128, true>::bytes;
    }
    __device__ char* state(Index slot, int hv) const { return states + (slot * heads + hv) * state_bytes(); }
    __device__ char* dstate(Index slot, int hv) const { return dstates + (slot * heads + hv) * state_bytes(); }
    __device__ char* u(Index slot, int hv) const { return U + (slot * heads + hv) * value_bytes(); }
    __device__ char* dr(Index slot, int hv) const { return dR + (slot * heads + hv) * value_bytes(); }
    __device__ ChunkFlags& flags_of(Index slot, int hv) const { return flags[slot * heads + hv]; }
    __device__ bool goes_by_token(Index slot, int hv) const {
        return *reinterpret_cast<const unsigned long long*>(flags + slot * heads + hv) != 0;
    }
};

// A backward pass over some sequences, as its kernels see it.
struct ChunkGradients {
    DeltaCall call;
    ChunkSequences sequences;
    SavedChunks saved;
    GradientViews grad;
};

// Blocks of a value head and chunk: heads, whose rows lie side by side in memory, run side by side.
constexpr Index most_chunks = 65535;  // that a grid has in its second dimension
inline Blocks blocks_by_head(const ChunkGradients& of) {
    const ChunkSequences& s = of.sequences;
    return {of.call.heads, std::min(s.chunks, most_chunks), s.packed ? blocks_of(s.chunks, most_chunks) : s.count};
}
__device__ inline ChunkPosition chunk_of_block(const ChunkSequences& sequences) {
    const int row = static_cast<int>(blockIdx.z);
    return sequences.chunk((sequences.packed ? row * most_chunks : 0) + blockIdx.y, row);
}

// Each pass for the sequences of one launch, in this order. Records; what the forward pass has kept needs flags alone.
void launch_backward_fold(Level level, const ChunkGradients& of, cudaStream_t stream);
void launch_kept_flags(const ChunkGradients& of, const int* kept_by_token, cudaStream_t stream);
// The scans from the start and from the end, which do not need each other: those wanted, side by side.
struct Scans {
    bool from_start, from_end;
    int stages = 2;  // chunks in a block's memory, on level sm_80
};
void launch_scans(const Card& card, Scans scans, const ChunkGradients& of, cudaStream_t stream);
// Of f32 operands, the scan from the end: the other one is the forward pass, which keeps its chunks.
void launch_split_scan_from_end(const ChunkGradients& of, cudaStream_t stream);
int split_gradients_shared_bytes(const DeltaCall& call);  // the most that a block needs
void launch_unfold(const Card& card, const ChunkGradients& of, cudaStream_t stream);
// On sm_90a, without a p of its own, K and V filled up to 128.
void launch_unfold_warpgroups(const ChunkGradients& of, cudaStream_t stream);
void launch_unfold_channel(const Card& card, const ChunkGradients& of, cudaStream_t stream);
// The chunks that go token by token.
void launch_unfold_by_token(const ChunkGradients& of, cudaStream_t stream);
constexpr int token_blocks = 64;     // that share these chunks
constexpr int most_token_slabs = 2;  // of value columns, one after the other
int token_slabs(const Card& card);
__host__ __device__ constexpr Index token_scratch(int slabs) {  // doubles of a block
    return (4 + 4 * slabs) * chunk_rows * 128;
}

}  // namespace softdelta::cuda
