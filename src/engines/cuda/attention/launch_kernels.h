// What the passes launch, and what their kernels hand to each other.
#pragma once

#include <algorithm>

#include "engines/cuda/attention/redo.h"
#include "engines/cuda/device/workspace.h"
#include "engines/cuda/tile/tma.h"

namespace softdelta::cuda {

// What a pass over scores leaves for the gradients, of query i of the batch row and head at [head, B·Lq]: a
// probability is e^((score − top) − log_sum). Beside a huge top, top + log_sum has lost the second.
struct RowSums {
    float *top = nullptr, *log_sum = nullptr;
};

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

// use(pass) for all sequences of a call, so many at a time. packed: what place_packed() has returned.
template <class Use>
void for_each_sequences(const core::AttentionInputs& in, const AttentionCall& call, const AttentionSequences& packed,
                        const Use& use, Index most = AttentionSequences::most) {
    if (packed.table != nullptr) return use(AttentionPass{call, packed});
    const Index sequences = core::sequence_count(in), step = std::min(most, sequences_at_once(in));
    for (Index first = 0; first < sequences; first += step) {
        AttentionPass pass{call, {}};
        AttentionSequences& s = pass.sequences;
        const Index count = std::min(step, sequences - first);
        s.first = static_cast<int>(first);
        s.count = static_cast<int>(count);
        s.queries = call.queries;
        s.keys = call.keys;
        s.in_use.take(in.cache_seqlens, first, count);
        use(pass);
    }
}

// far_lse: sums of far rows alone (far_rows.h); a kernel of warpgroups takes only tiles that redo names.
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
void launch_selection(const AttentionPass& pass, KeptKeys* kept, cudaStream_t stream);

void launch_attention_forward(const AttentionPass& pass, int planes, const ForwardOutputs& out, cudaStream_t stream);

// Few queries (decode), or a turn of many: sums of ranges of keys, of a sequence's head at [sequence, head, query,
// range].
struct DecodeParts {
    int splits = 1, first = 0, queries = 0;
    float* o = nullptr;      // [.., Dv]
    float2* ends = nullptr;  // a row's top and sum

    __device__ Index at(const AttentionCall& call, int sequence, int head, int query) const {
        return ((Index(sequence) * call.heads + head) * queries + query - first) * splits;
    }
};
bool takes_decode(const AttentionCall& call, bool packed);
DecodeParts take_decode_parts(const AttentionCall& call, Index sequences, MemoryParts& parts);
void launch_decode(const AttentionPass& pass, DecodeParts parts, const ForwardOutputs& out, cudaStream_t stream);

// Any call, slowly.
inline constexpr int most_tile_channels = 256;
void launch_wide_forward(const AttentionPass& pass, const ForwardOutputs& out, cudaStream_t stream);

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
    int first_head = 0, heads = 0;  // query heads that a launch takes, those of whole key heads
    Redo redo_queries{}, redo_keys{};
};

// Whether the kernels of warpgroups compute a call, and which gradients of a bias: plan.cu.
inline constexpr int warpgroup_forward_channels = 256, warpgroup_backward_channels = 256;
inline constexpr float most_warpgroup_cap = 512;  // no row of a capped backward call is far
bool takes_warpgroups(const AttentionCall& call, core::Device device, int most_channels);
bool takes_bias_gradient(const AttentionCall& call, const Gradients& grad, Index sequences);
void launch_warpgroup_forward(const AttentionPass& pass, const ForwardOutputs& out, cudaStream_t stream);

// The same on cards without them, of less: bf16 and f16, D to 128, nothing added to scores but a mask and a bias of
// that type.
bool takes_warps(const AttentionCall& call, core::Device device);
void launch_warp_forward(const AttentionPass& pass, const ForwardOutputs& out, cudaStream_t stream);
// dk and dv, or dq and ds.
void launch_warp_gradients(bool by_key, const AttentionPass& pass, const Gradients& grad, cudaStream_t stream);

// On warpgroups: dk and dv, dbias where queries alone share it or nothing does, and ds; dq from that ds, or computed
// anew.
void launch_warpgroup_by_key(const AttentionPass& pass, const Gradients& grad, cudaStream_t stream);
void launch_warpgroup_by_query(const AttentionPass& pass, const Gradients& grad, cudaStream_t stream);
void launch_warpgroup_by_stored(const AttentionPass& pass, const Gradients& grad, cudaStream_t stream);
// Sequences and key heads whose ds the kernel of keys keeps in the workspace at a time; none: dq is made without it. Of
// shapes and options, not of where tensors lie.
struct ScorePlan {
    Index sequences = 0, key_heads = 0, row = 0;  // elements from a query to the next
    Index elements = 0;
};
ScorePlan plan_scores(const engines::AttentionBackward& of);
// The same where dbias is a sum of ds of heads or sequences, or has slopes. kept: f32 sums of several turns; of_keys:
// those over queries, of each sequence and head.
struct BiasPlan : ScorePlan {
    Index kept = 0, of_keys = 0;
    bool heads_first = false;  // turns through all sequences for some heads, as one sum has them

    explicit operator bool() const { return elements > 0 || of_keys > 0; }
};
BiasPlan plan_bias(const engines::AttentionBackward& of);
// Adds ds of some sequences and heads to dbias; the first and the last turn of these sums.
void launch_bias_sums(const AttentionCall& call, const StoredScores& ds, const Gradients& grad, float* kept, bool first,
                      bool last, cudaStream_t stream);
// Clears dbias of packed sequences where no tile of keys is.
void launch_clear_bias(const AttentionPass& packed, const Gradients& grad, cudaStream_t stream);

// dq, dk and dv: blocks for 64 queries of a head, and for 64 keys of a key head. dbias: a block for a tile of it.
void launch_gradients(const AttentionPass& pass, int planes, const Gradients& grad, cudaStream_t stream);
void launch_bias_gradient(const AttentionPass& pass, int planes, const Gradients& grad, cudaStream_t stream);

}  // namespace softdelta::cuda
