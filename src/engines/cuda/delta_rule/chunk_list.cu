#include "engines/cuda/delta_rule/chunk_list.h"

#include "engines/cuda/device/grid.h"
#include "engines/cuda/device/host_lengths.h"
#include "engines/cuda/tile/lanes.h"
#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

namespace {

constexpr int threads = 256, warps = threads / 32;

struct Lengths {
    View cu_seqlens;
    int count;  // of sequences
    TokenRange taken;
    bool has_saved;  // states on the way: lengths lie on the host
};

// Chunks and states on the way of the sequences before one.
struct Before {
    Index chunks = 0, saved = 0;
};

struct ListMemory {
    Index of_warps[warps];
    DeltaSequence s[threads];
    int of_size[2][64];  // taken sequences by the bits of their number of chunks; where they go
};

// The first block lists sequences, each other one `threads` chunks. All go through the sequences, `threads` at a time.
class ListBlock {
  public:
    __device__ ListBlock(const Lengths& lengths, const ChunkSequences& out) : lengths_(lengths), out_(out) {}

    __device__ void list_sequences() {
        if (thread_ < 64) m_.of_size[0][thread_] = 0;
        __syncthreads();
        for_each_piece([&](int, const DeltaSequence& s) {
            if (s.state != not_taken) atomicAdd(&m_.of_size[0][size_of(s)], 1);
        });
        if (thread_ == 0) *out_.chunk_count = static_cast<int>(min(before_.chunks, out_.chunks));
        __syncthreads();
        if (thread_ == 0)
            for (int bits = 64, place = 0; bits-- > 0; place += m_.of_size[0][bits]) m_.of_size[1][bits] = place;
        before_ = {};
        __syncthreads();
        for_each_piece([&](int, const DeltaSequence& s) {
            if (s.state == not_taken) return;
            const int place = atomicAdd(&m_.of_size[1][size_of(s)], 1);
            if (place < out_.count) out_.listed[place] = s;
        });
        __syncthreads();
        for (int place = m_.of_size[1][0] + thread_; place < out_.count; place += threads) out_.listed[place] = none();
    }
    __device__ void list_chunks(Index first) {
        const Index slot = first + thread_;
        ChunkPosition mine{none(), 0};
        for_each_piece([&](int count, const DeltaSequence& s) {
            m_.s[thread_] = s;
            __syncthreads();
            // The last that begins at this slot or before it.
            int low = 0, high = count;
            while (high - low > 1) {
                const int middle = (low + high) / 2;
                (m_.s[middle].first_slot <= slot ? low : high) = middle;
            }
            const DeltaSequence& at = m_.s[low];
            if (slot >= at.first_slot && slot - at.first_slot < at.chunks()) mine = {at, slot - at.first_slot};
            __syncthreads();
        });
        if (slot < out_.chunks) out_.listed_chunks[slot] = mine;
    }

  private:
    static constexpr Index not_taken = -2;

    __device__ static DeltaSequence none() { return {{0, 0, 0, -1}, 0, 0}; }
    __device__ static int size_of(const DeltaSequence& s) {
        int bits = 0;
        for (Index chunks = s.chunks(); chunks > 0; chunks /= 2) ++bits;
        return bits;
    }
    // What lengths say beyond the tensors is cut off.
    __device__ Index end_of(int n) const {
        const Index at =
            out_.begins ? out_.begins[n] : load_index(lengths_.cu_seqlens, n * lengths_.cu_seqlens.stride[0]);
        return min(max(at, Index(0)), out_.tokens);
    }

    // use(how many, the thread's own)
    template <class Use>
    __device__ void for_each_piece(const Use& use) {
        for (int first = 0; first < lengths_.count; first += threads) {
            const int n = first + thread_;
            DeltaSequence s = none();
            s.state = not_taken;
            Before own;
            if (n < lengths_.count) {
                s.begin = end_of(n);
                s.count = max(end_of(n + 1), s.begin) - s.begin;
                if (lengths_.has_saved) own.saved = (s.count + out_.interval - 1) / out_.interval;
                if (lengths_.taken.shortest <= s.count && s.count <= lengths_.taken.longest) {
                    s.state = n < out_.pool ? n : -1;
                    own.chunks = s.chunks();
                }
            }
            const Index chunks = running_sum_of_block<warps>(own.chunks, before_.chunks, m_.of_warps);
            s.first_slot = chunks - own.chunks;
            s.first_saved = running_sum_of_block<warps>(own.saved, before_.saved, m_.of_warps) - own.saved;
            if (s.state == not_taken || chunks > out_.chunks) s.count = 0;  // the second: sequences overlap
            use(min(threads, lengths_.count - first), s);
        }
    }
    const Lengths& lengths_;
    const ChunkSequences& out_;
    ListMemory& m_ = *reinterpret_cast<ListMemory*>(ptx::shared_memory());
    const int thread_ = static_cast<int>(threadIdx.x);
    Before before_;
};

__global__ void __launch_bounds__(threads)
    list_kernel(const __grid_constant__ Lengths lengths, const __grid_constant__ ChunkSequences out) {
    ListBlock block(lengths, out);
    if (blockIdx.x == 0)
        block.list_sequences();
    else
        block.list_chunks(Index(blockIdx.x - 1) * threads);
}

}  // namespace

ChunkSequences chunk_sequences(const core::DeltaInputs& in, const core::DeltaOptions& options,
                               const core::Tensor& states, const TokenRange& taken, MemoryParts& parts) {
    const Index sequences = core::sequence_count(in), tokens = in.q.shape[1];
    ChunkSequences s;
    s.count = static_cast<int>(sequences);
    s.packed = static_cast<bool>(in.cu_seqlens);
    s.tokens = tokens;
    s.pool = pool_size(in.initial_state, states, sequences);
    s.interval = options.state_interval;
    s.chunks = (tokens + chunk_rows - 1) / chunk_rows;
    s.row_slots = tokens / chunk_rows + 1;
    if (!s.packed) return s;
    s.listed = parts.take<DeltaSequence>(sequences);
    s.listed_chunks = parts.take<ChunkPosition>(chunk_slots(in));
    s.chunk_count = parts.take<int>(1);
    if (in.cu_seqlens.device.is_cpu()) s.begins = parts.take<Index>(sequences + 1);
    // So many can have that many tokens.
    if (taken.shortest > 0) s.count = static_cast<int>(std::min(sequences, tokens / taken.shortest));
    s.chunks = tokens / chunk_rows + s.count;
    return s;
}

void list_chunks(const core::DeltaInputs& in, const TokenRange& taken, const ChunkSequences& sequences,
                 cudaStream_t stream) {
    if (!sequences.packed) return;
    const Index count = core::sequence_count(in);
    if (sequences.begins != nullptr) store_lengths(in.cu_seqlens, sequences.begins, stream);
    const Lengths lengths{view_of(in.cu_seqlens), static_cast<int>(count), taken, sequences.begins != nullptr};
    launch(list_kernel, {1 + blocks_of(sequences.chunks, threads), threads, static_cast<int>(sizeof(ListMemory))},
           stream, "lists of chunks", lengths, sequences);
}

}  // namespace softdelta::cuda
