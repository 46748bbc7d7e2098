// Where packed sequences and their tiles lie, from lengths of the host or of the device: one small kernel writes it
// down.
#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/device/host_lengths.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

namespace {

constexpr int places_threads = 1024,
              places_bytes = places_threads / 32 * static_cast<int>(sizeof(Index)) + places_threads * static_cast<int>(sizeof(int));

struct PackedLengths {
    Lengths of_queries, of_keys, in_use;
    Index queries = 0, keys = 0, count = 0;

    void take(const core::AttentionInputs& in, Index first, Index sequences) {
        of_queries.take(in.cu_seqlens_q, first, sequences);
        of_keys.take(in.cu_seqlens_k, first, sequences);
        in_use.take(in.cache_seqlens, first, sequences);
    }
    __device__ AttentionSequence operator[](int n) const {
        AttentionSequence s{n, n, n, 0, queries, 0, keys};
        s.batch = 0;
        s.q_begin = of_queries.at(n, n, queries);
        s.q_count = max(of_queries.at(n + 1, n + 1, queries) - s.q_begin, Index(0));
        if (of_keys.given) {
            s.key_batch = 0;
            s.k_begin = of_keys.at(n, n, keys);
            s.k_count = max(of_keys.at(n + 1, n + 1, keys) - s.k_begin, Index(0));
        }
        if (in_use.given) s.k_count = in_use.at(n, n, keys);
        return s;
    }
};

// Tiles in the order of sequences and rows, then entries without a tile, [most]. By all threads of the block. rows(n):
// those of sequence n. What device memory says of lengths may be wrong: no more than `most` entries are written.
template <class Rows>
__device__ void list_tiles(const Rows& rows, int sequences, TilePlace* places, int most) {
    constexpr int warps = places_threads / 32;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    auto* const of_warps = reinterpret_cast<Index*>(ptx::shared_memory());
    auto* const ends = reinterpret_cast<int*>(of_warps + warps);  // running sums of tiles
    Index before = 0;                                             // tiles of the sequences before these
    for (int first = 0; first < sequences; first += places_threads) {
        const int n = first + thread;
        const Index own = n < sequences ? (rows(n) + tile_rows - 1) / tile_rows : 0;
        Index all = before;
        ends[thread] =
            static_cast<int>(min(running_sum_of_block<warps>(min(own, Index(most)), all, of_warps), Index(most)));
        __syncthreads();
        for (int i = warp; i < places_threads; i += warps) {  // a warp lists a sequence
            const int begin = i == 0 ? static_cast<int>(min(before, Index(most))) : ends[i - 1];
            for (int at = begin + lane; at < ends[i]; at += 32) places[at] = {first + i, (at - begin) * tile_rows};
        }
        before = all;
        __syncthreads();
    }
    for (Index at = before + thread; at < most; at += places_threads) places[at] = {};
}

// A block lists the tiles of queries, another those of keys.
__global__ void __launch_bounds__(places_threads)
    places_kernel(const __grid_constant__ PackedLengths lengths, AttentionSequence* table, TilePlace* queries,
                  int most_queries, TilePlace* keys, int most_keys) {
    const int sequences = static_cast<int>(lengths.count);
    if (blockIdx.x == 1) return list_tiles([&](int n) { return lengths[n].k_count; }, sequences, keys, most_keys);
    for (int n = static_cast<int>(threadIdx.x); n < sequences; n += places_threads) table[n] = lengths[n];
    list_tiles([&](int n) { return lengths[n].q_count; }, sequences, queries, most_queries);
}

__global__ void __launch_bounds__(places_threads)
    cut_boxes_kernel(const __grid_constant__ AttentionSequences sequences, const __grid_constant__ CutBoxes all) {
    const int i = static_cast<int>(blockIdx.x) * places_threads + static_cast<int>(threadIdx.x);
    const int n = i / sequence_boxes, which = i % sequence_boxes;
    if (n >= sequences.count) return;
    const AttentionSequence s = sequences.table[n];
    const int of = min(which, all.count - 1);  // none is left out: each is prefetched
    const bool keys = all.of_keys[of];
    const Index begin = keys ? s.k_begin : s.q_begin, count = keys ? s.k_count : s.q_count;
    const View& v = all.views[of];
    cut_boxes(static_cast<Boxes*>(sequences.boxes)[i], all.boxes[of],
              static_cast<const std::uint16_t*>(v.data) + (count > 0 ? begin * v.stride[1] : 0),
              static_cast<int>(max(count, Index(1))));
}

void move_to_device(Lengths& lengths, const core::Tensor& t, Index* to, cudaStream_t stream) {
    if (!lengths.given || !lengths.on_host) return;
    store_lengths(t, to, stream);
    lengths.on_host = false;
    lengths.view = View{to, DType::i64, {1}};
}

// How many entries a list needs: sequences of so many rows together end in so many tiles that are not full.
int tiles_of(Index rows, Index sequences) {
    return static_cast<int>(rows / tile_rows + sequences);
}
Redo take_redo(Index groups, Index heads, Index tiles, MemoryParts& parts) {
    Redo redo;
    redo.count = tiles;
    redo.size = groups * heads * tiles;
    redo.blocks = parts.take<int>(redo.size + 1);
    redo.any = redo.blocks == nullptr ? nullptr : redo.blocks + redo.size;
    return redo;
}
Redo redo_of(const core::AttentionInputs& in, bool packed, Index heads, Index rows, MemoryParts& parts) {
    const Index sequences = core::sequence_count(in);
    if (packed) return take_redo(1, heads, tiles_of(rows, sequences), parts);
    return take_redo(sequences, heads, blocks_of(rows, tile_rows), parts);
}

}  // namespace

Places take_places(const core::AttentionInputs& in, MemoryParts& parts) {
    Places p;
    if (!in.cu_seqlens_q) return p;
    const Index sequences = core::sequence_count(in);
    p.sequences = parts.take<AttentionSequence>(sequences);
    p.queries = parts.take<TilePlace>(tiles_of(in.q.shape[1], sequences));
    if (in.cu_seqlens_k) p.keys = parts.take<TilePlace>(tiles_of(in.k.shape[1], sequences));
    if (in.cu_seqlens_k && !in.cache_seqlens) p.boxes = parts.take<Boxes>(sequence_boxes * sequences);
    if (sequences > Lengths::most) p.lengths = parts.take<Index>(3 * (sequences + 1));
    return p;
}

AttentionSequences place_packed(const core::AttentionInputs& in, const AttentionCall& call, const Places& places,
                                cudaStream_t stream) {
    AttentionSequences s;
    if (!in.cu_seqlens_q) return s;
    PackedLengths lengths;
    lengths.queries = s.queries = call.queries;
    lengths.keys = s.keys = call.keys;
    lengths.count = core::sequence_count(in);
    s.count = static_cast<int>(lengths.count);
    if (s.count == 0) return s;
    lengths.take(in, 0, std::min(lengths.count, Index(Lengths::most)));
    if (places.lengths != nullptr) {
        Index* const to = places.lengths;
        move_to_device(lengths.of_queries, in.cu_seqlens_q, to, stream);
        move_to_device(lengths.of_keys, in.cu_seqlens_k, to + lengths.count + 1, stream);
        move_to_device(lengths.in_use, in.cache_seqlens, to + 2 * (lengths.count + 1), stream);
    }
    s.table = places.sequences;
    s.boxes = places.boxes;
    s.of_queries = {places.queries, tiles_of(call.queries, lengths.count)};
    if (places.keys != nullptr) s.of_keys = {places.keys, tiles_of(call.keys, lengths.count)};
    launch(places_kernel, {places.keys != nullptr ? 2 : 1, places_threads, places_bytes}, stream, "places of packed sequences",
           lengths, places.sequences, places.queries, s.of_queries.most, places.keys, s.of_keys.most);
    return s;
}

void launch_cut_boxes(const AttentionSequences& sequences, const CutBoxes& all, cudaStream_t stream) {
    launch(cut_boxes_kernel, {blocks_of(sequences.count * sequence_boxes, places_threads), places_threads}, stream,
           "boxes of packed sequences", sequences, all);
}

Index sequences_at_once(const core::AttentionInputs& in) {
    const bool from_host = in.cache_seqlens && in.cache_seqlens.device.is_cpu();
    return from_host ? Index(Lengths::most) : AttentionSequences::most;
}

Redo redo_of_queries(const core::AttentionInputs& in, MemoryParts& parts) {
    return redo_of(in, static_cast<bool>(in.cu_seqlens_q), in.q.shape[2], in.q.shape[1], parts);
}
Redo redo_of_keys(const core::AttentionInputs& in, MemoryParts& parts) {
    return redo_of(in, static_cast<bool>(in.cu_seqlens_k), in.k.shape[2], in.block_table ? 0 : in.k.shape[1], parts);
}

}  // namespace softdelta::cuda
