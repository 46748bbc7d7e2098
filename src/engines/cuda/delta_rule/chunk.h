// A folded chunk: 64 tokens of one value head, ready for the scan over chunks (docs/math.md, "The chunk form"). The
// fold kernels write one record for each chunk and head into the workspace, tiles as they lie in shared memory:
//
//     score, solve     [64, 64]   solve = (I + L)⁻¹∘β; gates of channels: (I + L)⁻¹
//     factors                     of rows, for gates that all channels share; β of gates of channels
//     last             [K]        gates of channels: e^G_last, and the keys with their decays:
//     read, erase, write [64, K]
//
// The backward pass reads the record of gates of channels, too.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "core/execution.h"
#include "engines/cuda/delta_rule/chunk_list.h"
#include "engines/cuda/device/card.h"
#include "engines/cuda/tile/shared.h"

namespace softdelta::cuda {

constexpr int warpgroup_threads = 128;

template <class T, int K>
using KeyTile = Tile<T, K, chunk_rows>;
template <class T>
using SquareTile = Tile<T, chunk_rows>;

struct ChunkFactors {
    float read[chunk_rows];   // scale·e^G, with the norm of q
    float erase[chunk_rows];  // e^E, with the norm of p; gates of channels: β
    float write[chunk_rows];  // e^(G_last − G), with the norm of k
    float last;               // e^G_last
    int by_token;             // its gates rise, or it holds Inf or NaN: by the recurrence
    int unused[2];            // to 16 bytes

    __device__ float* beta() { return erase; }  // gates of channels
    __device__ const float* beta() const { return erase; }
};

template <int K, bool channel, class T = __nv_bfloat16>
struct FoldedChunk {
    static constexpr int square_bytes = chunk_rows * chunk_rows * static_cast<int>(sizeof(T)),
                         key_bytes = chunk_rows * K * static_cast<int>(sizeof(T));
    static constexpr int solve = square_bytes, factors = 2 * square_bytes,
                         last = factors + static_cast<int>(sizeof(ChunkFactors));
    static constexpr int small_bytes = channel ? last + K * 4 : last;  // all but tiles of keys
    static constexpr int read = small_bytes, erase = read + key_bytes, write = erase + key_bytes;
    static constexpr int bytes = channel ? write + key_bytes : small_bytes;
    static_assert(bytes % 16 == 0);
};

// What lies between the tokens of a chunk, of gates that all channels share, by blocks of 16 rows.
struct KeyDecays {
    float within[4][20];           // sums of a block's gates: up to the row before each row, and all
    float anchors[4][chunk_rows];  // with r the last row before the block, e^(G_r − G_j), with the norm of k
    float k_norm[chunk_rows];
};

// A record for the scan by warpgroups, which makes its scores itself: solve, factors (of q without its norm), decays.
struct SolvedChunk {
    static constexpr int factors = chunk_rows * chunk_rows * 2,
                         decays = factors + static_cast<int>(sizeof(ChunkFactors)),
                         bytes = decays + static_cast<int>(sizeof(KeyDecays));
    static_assert(bytes % 16 == 0);
};

// Records of a call, by slots of sequences and by value heads.
struct FoldedChunks {
    char* data = nullptr;
    int heads = 0;

    __device__ char* record(Index slot, int hv, int bytes) const { return data + (slot * heads + hv) * bytes; }
};

// Where chunks are folded beside the scan: a flag for each record that is there.
struct FoldFlags {
    int* data = nullptr;
    Index count = 0;
    int heads = 0;

    __device__ int* of(Index slot, int hv) const { return data + slot * heads + hv; }
};

// What the backward pass reads of a chunk with gates that all channels share: score and inverse = (I + L)⁻¹, [64, 64]
// each, and factors of rows.
struct RowFactors {
    float read[chunk_rows];   // scale·e^G, with the norm of q
    float erase[chunk_rows];  // e^E, with the norm of p
    float write[chunk_rows];  // e^(G_last − G), with the norm of k
    float beta[chunk_rows];
    float q_norm[chunk_rows], k_norm[chunk_rows], p_norm[chunk_rows];
    float last;    // e^G_last
    int by_token;  // the recurrence computes it
    int unused[2];
    double sums[chunk_rows + 2];  // of the gates before each token, where what leaves nothing of a number is cut off
};

template <class T>
struct RecordOf {
    static constexpr int square_bytes = chunk_rows * chunk_rows * static_cast<int>(sizeof(T));
    static constexpr int inverse = square_bytes, factors = 2 * square_bytes,
                         bytes = factors + static_cast<int>(sizeof(RowFactors));
    static_assert(bytes % 16 == 0);
};
using ChunkRecord = RecordOf<__nv_bfloat16>;

// Of what the backward pass reads of a chunk and value head.
inline Index backward_record_bytes(const DeltaCall& call) {
    if (call.q.dtype == core::DType::f32) return RecordOf<float>::bytes;
    return call.gate == core::Gate::channel ? FoldedChunk<128, true>::bytes : ChunkRecord::bytes;
}

// What the forward pass leaves for the backward pass of each chunk and value head, where it is kept: Sᵀ before the
// chunk and U, filled up to 128 channels, as saved.h has them, and its record. by_token: 1 its record
// says so, 2 what the scan sees of it.
struct KeptChunks {
    static constexpr int size = 128;
    static constexpr Index state_elements = size * size, value_elements = chunk_rows * size;

    char *records = nullptr, *states = nullptr, *U = nullptr;
    int* by_token = nullptr;

    // Of gates that all channels share.
    template <class T = __nv_bfloat16>
    __device__ char* record(Index chunk) const {
        return records + chunk * RecordOf<T>::bytes;
    }
    template <class T = __nv_bfloat16>
    __device__ RowFactors& factors(Index chunk) const {
        return *reinterpret_cast<RowFactors*>(record<T>(chunk) + RecordOf<T>::factors);
    }
    // Why the scan goes token by token, where it does. The fold of gates that all channels share has not seen all of
    // what is not finite to the scan.
    template <class T = __nv_bfloat16>
    __device__ void keep_reason(Index chunk, int record, bool nonfinite, bool channel) const {
        if (record == 0 && !nonfinite) return;
        by_token[chunk] = record | (nonfinite ? 2 : 0);
        if (!channel) factors<T>(chunk).by_token = 1;
    }
};

// Scans that keep chunks are kernels of their own, so that the others pay nothing.
template <class T, int K>
inline constexpr bool can_keep_chunks = K == KeptChunks::size && !std::is_same_v<T, __half>;

// execution.kept as a call has it.
KeptChunks kept_chunks(const DeltaCall& call, const core::DeltaInputs& in, const core::Execution& execution);

struct ChunkOutputs {
    View o, final_state, states;
    KeptChunks kept;
};

// A forward pass over some sequences, as its kernels see it.
struct ChunkForward {
    DeltaCall call;
    ChunkSequences sequences;
    FoldedChunks folded;
    ChunkOutputs out;
    FoldFlags flags;
};

// early: it may begin while the last blocks of the fold run.
void launch_chunk_scan(const Card& card, const ChunkForward& of, bool early, cudaStream_t stream);
// Whether blocks of 128 value columns fill the card.
inline bool has_many_heads(const DeltaCall& call, Index sequences) {
    constexpr Index many = 100;
    return call.heads * sequences * ((call.value_size + 127) / 128) >= many;
}
// How a scan of level sm_80 goes, whose block has so many bytes of a chunk with 128 or with 64 value columns: wide
// where there are blocks enough, but two chunks at a time come before it.
struct ScanTiles {
    bool wide;
    int stages;
};
inline ScanTiles scan_tiles(const Card& card, bool many_heads, int wide_bytes, int narrow_bytes) {
    const bool wide = many_heads && (2 * wide_bytes <= card.shared_bytes || 2 * narrow_bytes > card.shared_bytes);
    return {wide, 2 * (wide ? wide_bytes : narrow_bytes) <= card.shared_bytes ? 2 : 1};
}
// On sm_90a.
void launch_warpgroup_scan(const ChunkForward& of, bool early, cudaStream_t stream);
// Where a scan of few heads leaves half of the card idle, so many blocks fold there meanwhile; 0: none.
int folding_blocks(Level level, const DeltaCall& call, Index sequences, bool keeps, core::Device device);
void launch_fold_and_scan(const ChunkForward& of, int folding, cudaStream_t stream);
constexpr int scored_record_bytes = FoldedChunk<128, false>::bytes;  // theirs, whatever the number of channels
int chunk_record_bytes(Level level, const DeltaCall& call);
// Of f32 operands: products of split numbers by tf32 matrix units, on every level.
void launch_split_scan(const ChunkForward& of, cudaStream_t stream);
int split_scan_shared_bytes(const DeltaCall& call);
int split_record_bytes(const DeltaCall& call);

// Keys that a scan reads.
enum class Keys {
    plain,
    scored,       // plain, and the record has scores
    own_p,        // p is not k
    with_gates,   // with the decays of channels, as the record has them
    only_written  // nothing is erased
};

// use.template operator()<K, keys>()
template <class Use>
void with_keys(const DeltaCall& call, const Use& use) {
    const bool more = call.key_size > 128;  // plain keys alone, and not by warpgroups
    if (call.erase == core::Erase::nothing)
        more ? use.template operator()<256, Keys::only_written>() : use.template operator()<128, Keys::only_written>();
    else if (call.gate == core::Gate::channel)
        use.template operator()<128, Keys::with_gates>();
    else if (call.own_p)
        use.template operator()<128, Keys::own_p>();
    else if (call.key_size <= 64 && !call.wide)
        use.template operator()<64, Keys::plain>();
    else
        more ? use.template operator()<256, Keys::plain>() : use.template operator()<128, Keys::plain>();
}

// use.template operator()<T>() for the type of a call's operands, of 16 bits.
template <class Use>
void with_half(const DeltaCall& call, const Use& use) {
    if (call.q.dtype == core::DType::bf16)
        use.template operator()<__nv_bfloat16>();
    else
        use.template operator()<__half>();
}

}  // namespace softdelta::cuda
