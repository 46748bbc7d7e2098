// A call of attention as kernels see it: views, options, where each sequence lies, and which keys a query may see.
#pragma once

#include <algorithm>

#include "core/attention.h"
#include "engines/cuda/attention/passes.h"
#include "engines/cuda/device/launch.h"
#include "engines/cuda/device/view.h"

namespace softdelta::cuda {

// The keys of a row that a call with top_w keeps: those whose addends are above `value`, and equal ones up to key
// `last`.
struct KeptKeys {
    float value;
    int last;

    __device__ bool keeps(float rank, Index j) const { return rank > value || (rank == value && j <= last); }
};

// As core::AttentionSequence.
struct AttentionSequence {
    Index batch, key_batch, mask_batch;
    Index q_begin, q_count, k_begin, k_count;
};

// Where row i of a sequence's head lies, of a tensor [B, L, H, D] of queries or of keys that are in no blocks.
__device__ inline Index query_row(const View& v, const AttentionSequence& s, Index i, int head) {
    return s.batch * v.stride[0] + (s.q_begin + i) * v.stride[1] + head * v.stride[2];
}
__device__ inline Index key_row(const View& v, const AttentionSequence& s, Index j, int head) {
    return s.key_batch * v.stride[0] + (s.k_begin + j) * v.stride[1] + head * v.stride[2];
}

struct AttentionCall {
    View q, k, v, mask, bias, sink, alibi_slopes, bias_slopes, block_table;
    Index queries = 0, keys = 0;           // rows of q in a batch; keys, in use or not, of a sequence or of all
    Index total_queries = 0;               // B·Lq
    Index block_rows = 0, blocks = 0;      // paged: rows of a block, and how many there are
    int heads = 0, group = 1;              // query heads; those of a key head
    int channels = 0, value_channels = 0;  // D, Dv
    int mask_group = 1, bias_group = 1;    // query heads that share a head of mask, of bias
    core::Causal causal{};
    Index window_left = -1, window_right = -1;
    Index shift = 0;  // position of query 0 minus that of key 0
    core::EmptyRow empty_row{};
    float scale = 1, softcap = 0;
    Index top_w = -1;
    const KeptKeys* kept = nullptr;  // [head, B·Lq]; top_w

    // Where query 0 of a sequence's head lies among numbers [head, B·Lq].
    __device__ Index row_of(const AttentionSequence& s, int head) const {
        return head * total_queries + s.batch * queries + s.q_begin;
    }
};

inline AttentionCall attention_call(const core::AttentionInputs& in, const core::AttentionOptions& options) {
    AttentionCall c;
    c.q = view_of(in.q), c.k = view_of(in.k), c.v = view_of(in.v);
    c.mask = view_of(in.mask), c.bias = view_of(in.bias), c.sink = view_of(in.sink);
    c.alibi_slopes = view_of(in.alibi_slopes), c.bias_slopes = view_of(in.bias_slopes);
    c.block_table = view_of(in.block_table);
    c.queries = in.q.shape[1];
    c.total_queries = in.q.shape[0] * in.q.shape[1];
    c.keys = !in.block_table ? in.k.shape[1] : in.k.shape[0] > 0 ? in.block_table.shape[1] * in.k.shape[1] : 0;
    c.block_rows = in.block_table ? in.k.shape[1] : 0;
    c.blocks = in.k.shape[0];
    c.heads = static_cast<int>(in.q.shape[2]);
    c.group = static_cast<int>(in.q.shape[2] / in.k.shape[2]);
    c.channels = static_cast<int>(in.q.shape[3]);
    c.value_channels = static_cast<int>(in.v.shape[3]);
    c.mask_group = in.mask && in.mask.shape[1] != in.q.shape[2] ? c.group : 1;
    c.bias_group = in.bias && in.bias.shape[1] != in.q.shape[2] ? c.group : 1;
    c.causal = options.causal;
    c.window_left = options.window_left;
    c.window_right = options.window_right;
    c.shift = options.shift;
    c.empty_row = options.empty_row;
    c.scale = static_cast<float>(options.scale);
    c.softcap = static_cast<float>(options.softcap);
    c.top_w = options.top_w;
    return c;
}

// Entries [first, first + count] of lengths on the host travel with the launch; those on the device are read there.
struct Lengths {
    static constexpr int most = most_sequences;

    bool given = false, on_host = true;
    View view;
    Index host[most + 1];

    void take(const core::Tensor& t, Index first, Index count) {
        given = static_cast<bool>(t);
        on_host = t.device.is_cpu();
        view = view_of(t);
        for (Index i = 0; given && on_host && i <= count && first + i < t.shape[0]; ++i)
            host[i] = core::load_index(t, (first + i) * t.stride[0]);
    }
    // Entry first + i, cut off at what the tensors have.
    __device__ Index at(int i, Index n, Index most_here) const {
        const Index x = on_host ? host[i] : load_index(view, n * view.stride[0]);
        return min(max(x, Index(0)), most_here);
    }
};

// Rows of queries or keys that a block of warpgroups has, and a flag of Redo.
inline constexpr int tile_rows = 128;

// Where rows of a block lie: in sequence i of a launch, from row `first` on, in tile `tile` of the flags of `group`
// (redo.h).
struct RowTile {
    int i, group, tile;
    Index first;

    __device__ explicit operator bool() const { return i >= 0; }
};

// A tile of rows of packed sequences. A grid has a block for each entry of a list, so that its size follows the rows
// there are, not their product with the sequences.
struct TilePlace {
    int sequence = -1, first = 0;  // the tile's first row in its sequence; −1: no tile is here
};

// Tiles of all packed sequences, on the device; most: entries, some of them without a tile.
struct TileList {
    const TilePlace* places = nullptr;
    int most = 0;

    __host__ __device__ explicit operator bool() const { return places != nullptr; }
};

// Some consecutive sequences of a call: a launch takes so many. Packed ones go as tables on the device (places.cu), and
// one launch takes all.
struct AttentionSequences {
    static constexpr Index most = 65535;  // blocks of a grid along z

    int first = 0, count = 0;
    Index queries = 0, keys = 0;
    Lengths in_use;
    const AttentionSequence* table = nullptr;
    TileList of_queries, of_keys;
    void* boxes = nullptr;  // Places::boxes, where queries and keys are packed

    __device__ AttentionSequence operator[](int i) const {
        const Index n = first + i;
        if (table != nullptr) {  // by name: a copy as a whole goes through memory of the thread
            const AttentionSequence& s = table[n];
            return {s.batch, s.key_batch, s.mask_batch, s.q_begin, s.q_count, s.k_begin, s.k_count};
        }
        AttentionSequence s{n, n, n, 0, queries, 0, keys};
        if (in_use.given) s.k_count = in_use.at(i, n, keys);
        return s;
    }

    // Tile `tile` of queries or of keys, as `list` has them: of the block's sequence, which is its place along z, or of
    // the list.
    __device__ RowTile tile(const TileList& list, int tile) const {
        if (!list)
            return {static_cast<int>(blockIdx.z), first + static_cast<int>(blockIdx.z), tile, Index(tile) * tile_rows};
        if (tile < 0 || tile >= list.most) return {-1, 0, -1, 0};
        const TilePlace at = list.places[tile];
        return {at.sequence, 0, tile, at.first};
    }
    // Tile `tile` of sequence i; the list is in the order of sequences.
    __device__ RowTile tile_of(const TileList& list, int i, int tile) const {
        if (!list) return {i, first + i, tile, Index(tile) * tile_rows};
        int begin = 0, end = list.most;
        while (begin < end) {
            const int middle = (begin + end) / 2, n = list.places[middle].sequence;
            if (n >= 0 && n < i)
                begin = middle + 1;
            else
                end = middle;
        }
        const int at = begin + tile;
        if (at >= list.most || list.places[at].sequence != i) return {-1, 0, -1, 0};
        return {i, 0, at, Index(tile) * tile_rows};
    }
    // The tile of a packed row of queries.
    __device__ RowTile tile_of_query(Index row) const {
        int begin = 0, end = of_queries.most;  // of the first that lies behind it
        while (begin < end) {
            const int middle = (begin + end) / 2;
            const TilePlace at = of_queries.places[middle];
            if (at.sequence >= 0 && table[at.sequence].q_begin + at.first <= row)
                begin = middle + 1;
            else
                end = middle;
        }
        return tile(of_queries, max(begin - 1, 0));
    }
    // Of a block of tile_blocks(): from the first tile on, or the longest of a causal call first.
    __device__ RowTile tile_of_block(const TileList& list, bool from_last) const {
        const int all = static_cast<int>(list ? list.most : gridDim.y);
        const int at = static_cast<int>(blockIdx.y + (list ? blockIdx.z * gridDim.y : 0));
        return tile(list, from_last ? all - 1 - at : at);
    }
};

// A pass over some sequences, as its kernels see it.
struct AttentionPass {
    AttentionCall call;
    AttentionSequences sequences;

    // x blocks for each tile of queries, or of keys.
    Blocks query_tiles(Index x) const { return tile_blocks(x, sequences.of_queries, call.queries); }
    Blocks key_tiles(Index x) const { return tile_blocks(x, sequences.of_keys, call.keys); }

  private:
    Blocks tile_blocks(Index x, const TileList& list, Index rows) const {
        if (!list) return {x, blocks_of(rows, tile_rows), sequences.count};
        const Index y = std::clamp(list.most, 1, 65535);
        return {x, y, blocks_of(list.most, y)};
    }
};

// with.template operator()<planes, columns>() for the smallest kernel that holds the call's channels.
template <class With>
void with_kernel(const AttentionCall& call, int planes, const With& with) {
    const int channels = std::max(call.channels, call.value_channels);
    if (planes == 1 && channels <= 64) return with.template operator()<1, 64>();
    if (planes == 1 && channels <= 128) return with.template operator()<1, 128>();
    if (planes == 1) return with.template operator()<1, 256>();
    if (channels <= 128) return with.template operator()<3, 128>();
    return with.template operator()<3, 256>();
}

// The factors of a query head's bias, and of distances.
__device__ inline float bias_slope(const AttentionCall& call, int head) {
    return call.bias_slopes ? load(call.bias_slopes, head * call.bias_slopes.stride[0]) : 1.0F;
}
__device__ inline float alibi_slope(const AttentionCall& call, int head) {
    return call.alibi_slopes ? load(call.alibi_slopes, head * call.alibi_slopes.stride[0]) : 0.0F;
}

// Of keys, or of queries.
struct Range {
    Index begin, end;
};

// Query i sees keys [i + left, i + right], those outside of the sequence left out.
struct Diagonals {
    Index left, right;
};
__device__ inline Diagonals diagonals(const AttentionCall& call, const AttentionSequence& s) {
    const Index far = s.q_count + s.k_count + (call.shift < 0 ? -call.shift : call.shift);
    const auto reach = [far](Index window) { return window < 0 ? far : min(window, far); };
    const Index diagonal = call.shift + (call.causal == core::Causal::top_left ? Index(0) : s.k_count - s.q_count);
    const Index right =
        call.causal == core::Causal::none ? reach(call.window_right) : min(reach(call.window_right), Index(0));
    return {diagonal - reach(call.window_left), diagonal + right};
}

// The keys that causal and window leave to query i: neither end falls as i grows.
__device__ inline Range visible_keys(const AttentionCall& call, const AttentionSequence& s, Index i) {
    const Diagonals d = diagonals(call, s);
    const auto clamp = [&s](Index j) { return min(max(j, Index(0)), s.k_count); };
    return {clamp(i + d.left), clamp(i + d.right + 1)};
}
// The queries that key j is left to.
__device__ inline Range seeing_queries(const AttentionCall& call, const AttentionSequence& s, Index j) {
    const Diagonals d = diagonals(call, s);
    const auto clamp = [&s](Index i) { return min(max(i, Index(0)), s.q_count); };
    return {clamp(j - d.right), clamp(j - d.left + 1)};
}

}  // namespace softdelta::cuda
