// What the passes launch, and what their kernels hand to each other.
#pragma once

#include <algorithm>

#include "engines/cuda/attention/call.h"
#include "engines/cuda/device/launch.h"
#include "engines/cuda/device/workspace.h"
#include "engines/cuda/tile/tma.h"

namespace softdelta::cuda {

// What a pass over scores leaves for the gradients, of query i of the batch row and head at [head, B·Lq]: a
// probability is e^((score − top) − log_sum). Beside a huge top, top + log_sum has lost the second.
struct RowSums {
    float *top = nullptr, *log_sum = nullptr;
};

// Blocks of rows of a head that kernels of warpgroups leave to the others, because a number in them is not finite:
// those multiply no Inf or NaN by a weight of 0. Without flags the others take all.
inline constexpr int warpgroup_rows = tile_rows;
inline constexpr Index most_warpgroup_rows = Index(65535) * warpgroup_rows;  // a grid has so many blocks along y
struct Redo {
    int *blocks = nullptr, *any = nullptr;  // [units, heads, tiles]: units are sequences, or all packed ones together
    Index count = 0, size = 0;              // tiles of a head; all flags. any: whether a row of queries is far in the
                                            // call, and for keys in each [sequence, key head]
    bool early = false;  // on Hopper: kernels that repeat blocks begin while the one before ends, and wait for it

    int* of_unit(int unit, int heads) const { return blocks + Index(unit) * heads * count; }
    __device__ int* at(const RowTile& tile, int heads, int head) const {
        return blocks + (Index(tile.unit) * heads + head) * count + tile.tile;
    }
    __device__ bool takes(const RowTile& tile, int heads, int head) const {
        return blocks == nullptr || *at(tile, heads, head) != 0;
    }
    // Whether it takes any rows of a head; for all threads of a block.
    __device__ bool takes_any(int unit, int heads, int head) const {
        if (blocks == nullptr) return true;
        bool any = false;
        const int* flags = blocks + (Index(unit) * heads + head) * count;
        for (Index i = threadIdx.x; i < count; i += blockDim.x) any = any || flags[i] != 0;
        return ptx::any(1, static_cast<int>(blockDim.x), any);
    }
    // An entry of a list without a tile.
    __device__ void clear(const RowTile& tile, int heads, int head) const {
        if (tile.tile >= 0 && threadIdx.x == 0) *at(tile, heads, head) = 0;
    }
    __host__ __device__ bool may_take_none() const { return blocks != nullptr; }
};

// Kernels that may have nothing to do have few blocks of threads: each asks for its head, and takes several blocks of
// rows if it has to. Of these there are so many for each of `heads` heads.
inline unsigned few_blocks(Index blocks_of_rows, Index heads) {
    const Index few = 2 * multiprocessors();
    return static_cast<unsigned>(std::min(blocks_of_rows, std::max(few / heads, Index(1))));
}
// use.template operator()<few>(): a loop takes more registers than kernels have that compute all.
template <class Use>
void with_few(const Redo& redo, const Use& use) {
    if (redo.may_take_none()) return use.template operator()<true>();
    use.template operator()<false>();
}
// Blocks of `step` rows, which tiles have whole: of so many rows of a sequence, or of the list.
__host__ __device__ inline Index row_blocks(const TileList& list, Index rows, int step) {
    return list ? Index(list.most) * (tile_rows / step) : (rows + step - 1) / step;
}
// A grid of these blocks, or of few; heads; and sequences.
template <bool few>
dim3 row_block_grid(Index blocks, Index heads, const TileList& list, const AttentionSequences& sequences) {
    const int z = list ? 1 : sequences.count;
    return dim3(few ? few_blocks(blocks, heads * z) : static_cast<unsigned>(blocks), static_cast<unsigned>(heads),
                static_cast<unsigned>(z));
}
// take(rows) for each of these blocks that a block of threads has; none where few blocks find no flag. Few blocks may
// be launched early: who calls this waits for the launch before.
template <bool few, class Take>
__device__ void for_each_block(const Redo& redo, const AttentionSequences& sequences, const TileList& list, int heads,
                               int head, Index rows, int step, const Take& take) {
    const auto take_block = [&](Index block) {
        RowTile at = sequences.tile(list, static_cast<int>(block * step / tile_rows));
        at.first += block * step % tile_rows;
        if (at) take(at);
    };
    if constexpr (few) {
        if (!redo.takes_any(list ? 0 : sequences.first + static_cast<int>(blockIdx.z), heads, head)) return;
        for (Index block = blockIdx.x; block < row_blocks(list, rows, step); block += gridDim.x) {
            take_block(block);
            __syncthreads();  // its tiles are read
        }
    } else {
        take_block(blockIdx.x);
    }
}

// Tables of packed sequences, in the call's memory; none where nothing is packed.
struct Places {
    AttentionSequence* sequences = nullptr;
    TilePlace *queries = nullptr, *keys = nullptr;
    Boxes* boxes = nullptr;    // [N, sequence_boxes]: of a launch at a time
    Index* lengths = nullptr;  // [3, N + 1]: those of the host, where they are too many for a launch
};
inline constexpr int sequence_boxes = 4;
Places take_places(const core::AttentionInputs& in, MemoryParts& parts);
// All sequences of a packed call, whose tables a kernel makes.
AttentionSequences place_packed(const core::AttentionInputs& in, const AttentionCall& call, const Places& places,
                                cudaStream_t stream);

// Boxes of queries or of keys, of which each packed sequence gets its own.
struct CutBoxes {
    Boxes boxes[sequence_boxes];
    View views[sequence_boxes];
    bool of_keys[sequence_boxes] = {};
    int count = 0;

    void add(const Boxes& all, const View& view, bool keys) {
        boxes[count] = all, views[count] = view, of_keys[count++] = keys;
    }
};
void launch_cut_boxes(const AttentionSequences& sequences, const CutBoxes& all, cudaStream_t stream);

// use(sequences) for all of a call, so many at a time. packed: what place_packed() has returned.
template <class Use>
void for_each_sequences(const core::AttentionInputs& in, const AttentionCall& call, const AttentionSequences& packed,
                        const Use& use, Index most = AttentionSequences::most) {
    if (packed.table != nullptr) return use(packed);
    const Index sequences = core::sequence_count(in), step = std::min(most, sequences_at_once(in));
    for (Index first = 0; first < sequences; first += step) {
        AttentionSequences s;
        const Index count = std::min(step, sequences - first);
        s.first = static_cast<int>(first);
        s.count = static_cast<int>(count);
        s.queries = call.queries;
        s.keys = call.keys;
        s.in_use.take(in.cache_seqlens, first, count);
        use(s);
    }
}

// Flags of tiles of a call's queries, or of its keys.
Redo redo_of_queries(const core::AttentionInputs& in, MemoryParts& parts);
Redo redo_of_keys(const core::AttentionInputs& in, MemoryParts& parts);

// Rows whose lse is so far from 0 that one number holds no logarithm beside the maximum: those of a query that sees
// only keys masked by a huge number, say.
__device__ inline bool is_far(float lse) {
    constexpr float near = 1024;
    return fabsf(lse) > near && !isinf(lse);  // NaN is not
}

// far_lse: sums of rows alone whose saved lse is far; a kernel of warpgroups takes only tiles that redo names.
struct ForwardOutputs {
    View o, lse;
    RowSums sums;
    Redo redo{};
    View far_lse{};
};

// Neither packed nor in blocks: batch rows are sequences, and all keys are in use.
inline bool is_whole(const core::AttentionInputs& in) {
    return !in.cu_seqlens_q && !in.cu_seqlens_k && !in.cache_seqlens && !in.block_table;
}

// Planes that hold the operands: 1 where all of them are bf16, otherwise 3.
int planes_of(const core::AttentionInputs& in);

// top_w: which keys each row keeps, into call.kept.
void launch_selection(const AttentionCall& call, const AttentionSequences& sequences, KeptKeys* kept,
                      cudaStream_t stream);

void launch_attention_forward(const AttentionCall& call, const AttentionSequences& sequences, int planes,
                              const ForwardOutputs& out, cudaStream_t stream);

// Few queries (decode): sums of ranges of keys, of query i of a sequence's head at [sequence, head, query, range].
struct DecodeParts {
    int splits = 1;
    float* o = nullptr;      // [.., Dv]
    float2* ends = nullptr;  // a row's top and sum

    __device__ Index at(const AttentionCall& call, int sequence, int head, int query) const {
        return ((Index(sequence) * call.heads + head) * call.queries + query) * splits;
    }
};
bool takes_decode(const AttentionCall& call, bool packed);
DecodeParts take_decode_parts(const AttentionCall& call, Index sequences, MemoryParts& parts);
void launch_decode(const AttentionCall& call, const AttentionSequences& sequences, const DecodeParts& parts,
                   const ForwardOutputs& out, cudaStream_t stream);

// Any call, slowly.
inline constexpr int most_tile_channels = 256;
void launch_wide_forward(const AttentionCall& call, const AttentionSequences& sequences, const ForwardOutputs& out,
                         cudaStream_t stream);

// Of query i of the batch row and head at [head, B·Lq]: D = rowsum(do∘o) − dlse, and what the sink's gradient adds up.
struct RowTerms {
    RowSums sums;
    float *D = nullptr, *sink = nullptr;
};

// ds [sequences, heads, queries, keys] of some sequences and query heads of a call, as dbias or in the workspace.
struct StoredScores {
    View view;
    int first_sequence = 0, first_head = 0;
    Index sequences = 0, heads = 0, queries = 0, keys = 0;
    bool is_dbias = false;  // where no query sees a key it is 0, and not left out

    __host__ __device__ explicit operator bool() const { return static_cast<bool>(view); }
};

struct Gradients {
    View d_o, dq, dk, dv, dbias;
    RowTerms rows{};
    Index bias_batches = 0, bias_heads = 0, bias_queries = 0, bias_keys = 0;  // the shape of dbias
    StoredScores ds{};                                                        // that the kernel of keys stores
    int first_head = 0, heads = 0;  // query heads that a launch of warpgroups takes, those of whole key heads
    Redo redo_queries{}, redo_keys{};
};

// Whether the kernels of warpgroups compute a call, and which gradients of a bias: plan.cu.
inline constexpr int warpgroup_forward_channels = 256, warpgroup_backward_channels = 256;
inline constexpr float most_warpgroup_cap = 512;  // no row of a capped backward call is far
bool takes_warpgroups(const AttentionCall& call, core::Device device, int most_channels);
bool takes_bias_gradient(const AttentionCall& call, const Gradients& grad, Index sequences);
void launch_warpgroup_forward(const AttentionCall& call, const AttentionSequences& sequences, const ForwardOutputs& out,
                              cudaStream_t stream);

// The same on cards without them, of less: bf16 and f16, D to 128, nothing added to scores but a mask and a bias of
// that type.
bool takes_warps(const AttentionCall& call, core::Device device);
void launch_warp_forward(const AttentionCall& call, const AttentionSequences& sequences, const ForwardOutputs& out,
                         cudaStream_t stream);
void launch_warp_gradients(const AttentionCall& call, const AttentionSequences& sequences, const Gradients& grad,
                           cudaStream_t stream);

// On warpgroups: dk and dv, dbias where queries alone share it or nothing does, and ds; dq from that ds, or computed
// anew.
void launch_warpgroup_by_key(const AttentionCall& call, const AttentionSequences& sequences, const Gradients& grad,
                             cudaStream_t stream);
void launch_warpgroup_by_query(const AttentionCall& call, const AttentionSequences& sequences, const Gradients& grad,
                               cudaStream_t stream);
void launch_warpgroup_by_stored(const AttentionCall& call, const AttentionSequences& sequences, const Gradients& grad,
                                cudaStream_t stream);
// Sequences and key heads whose ds the kernel of keys keeps in the workspace at a time; none: dq is made without it. Of
// shapes and options, not of where tensors lie.
struct ScorePlan {
    Index sequences = 0, key_heads = 0, row = 0;  // elements from a query to the next
    Index elements = 0;
};
ScorePlan plan_scores(const core::AttentionInputs& in, const core::AttentionOptions& options,
                      const core::AttentionGradients& grad);
// The same where dbias is a sum of ds of heads or sequences, or has slopes. kept: f32 sums of several turns; of_keys:
// those over queries, of each sequence and head.
struct BiasPlan : ScorePlan {
    Index kept = 0, of_keys = 0;
    bool heads_first = false;  // turns through all sequences for some heads, as one sum has them

    explicit operator bool() const { return elements > 0 || of_keys > 0; }
};
BiasPlan plan_bias(const core::AttentionInputs& in, const core::AttentionOptions& options,
                   const core::AttentionGradients& grad);
// Adds ds of some sequences and heads to dbias; the first and the last turn of these sums.
void launch_bias_sums(const AttentionCall& call, const StoredScores& ds, const Gradients& grad, float* kept, bool first,
                      bool last, cudaStream_t stream);

// dq, dk and dv: blocks for 64 queries of a head, and for 64 keys of a key head. dbias: a block for a tile of it.
void launch_gradients(const AttentionCall& call, const AttentionSequences& sequences, int planes, const Gradients& grad,
                      cudaStream_t stream);
void launch_bias_gradient(const AttentionCall& call, const AttentionSequences& sequences, int planes,
                          const Gradients& grad, cudaStream_t stream);

}  // namespace softdelta::cuda
