// The fold of gates that all channels share, a block for each chunk.
#include <algorithm>

#include "engines/cuda/delta_rule/fold/launch.h"
#include "engines/cuda/delta_rule/fold/shared_gate.h"
#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

// scores: q has a tile and the record scores; else it is a SolvedChunk, and the inverse lies where keys were, so that
// more blocks have room; of f32 operands, where scores come afterwards.
template <class T, int K, bool own_p, bool scores>
struct Shared {
    using Record = FoldedChunk<K, false, T>;
    static constexpr int key_bytes = KeyTile<T, K>::bytes(chunk_rows);
    static constexpr int inverse_bytes = static_cast<int>(sizeof(InverseMemory));
    static constexpr int k = scores ? key_bytes : 0, p = own_p ? k + key_bytes : k,
                         inverse = scores ? p + key_bytes : 0,
                         record = !scores          ? 0
                                  : sizeof(T) == 4 ? inverse
                                                   : inverse + inverse_bytes,
                         solve = record + (scores ? Record::solve : 0),
                         factors = scores ? solve + Record::square_bytes : std::max(p + key_bytes, inverse_bytes),
                         memory = (factors + static_cast<int>(sizeof(ChunkFactors)) + 127) / 128 * 128,
                         bytes = memory + static_cast<int>(sizeof(SharedFoldMemory));
    static_assert(inverse % 128 == 0 && record % 1024 == 0 &&
                  (sizeof(T) == 4 || inverse_bytes >= Record::square_bytes));

    __device__ static SharedFoldTiles<T, K> tiles() {
        char* const at = ptx::shared_memory();
        const std::uint32_t base = ptx::shared_address(at);
        return {{base},
                {base + k},
                {base + p},
                {base + record},
                {base + solve},
                reinterpret_cast<ChunkFactors*>(at + factors),
                reinterpret_cast<SharedFoldMemory*>(at + memory),
                reinterpret_cast<InverseMemory*>(at + inverse)};
    }
};

// What overwrites memory waits until nobody reads the old contents. kept: the inverse goes to a tile, for the backward
// pass; of f32 operands, to its record.
template <class T, bool in_place>
struct Steps {
    static constexpr bool makes_scores = false;

    bool kept;
    SquareTile<T> whole;
    int thread;
    char* record = nullptr;

    __device__ void have_factors() const {}
    __device__ void have_products() const {
        if (in_place) __syncthreads();
    }
    __device__ void have_inverse(const float (&inverse)[chunk_rows / 8][4]) const {
        if (in_place || kept) __syncthreads();
        if constexpr (sizeof(T) == 4) {
            if (!kept) return;
            unrolled<chunk_rows / 8, 2>([&](int n, int half) {
                const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * half, column = 8 * n + 2 * (thread % 4);
                *reinterpret_cast<float2*>(record + SquareTile<T>{0}.unit(row, column / 4) + column % 4 * 4) = {
                    inverse[n][2 * half], inverse[n][2 * half + 1]};
            });
        } else if (kept) {
            store_products(whole, thread / 32 * 16, thread % 32, inverse);
        }
    }
};

template <class T, int K, bool own_p, bool erases, bool warpgroups>
__global__ void __launch_bounds__(SharedFold<T, K, erases, warpgroups>::threads, warpgroups ? (own_p ? 5 : 6)
                                                                                 : sizeof(T) == 4 || K > 128 ? 2
                                                                                                             : 3)
    fold_shared_kernel(const __grid_constant__ ChunkForward of) {
    if constexpr (!warpgroups || ptx::has_warpgroups) {
        constexpr bool scores = !warpgroups;
        using Layout = Shared<T, K, own_p, scores>;
        using Fold = SharedFold<T, K, erases, warpgroups, scores>;
        constexpr int threads = Fold::threads,
                      whole = scores ? Layout::inverse : ChunkRecord::square_bytes;  // (I + L)⁻¹, where it is kept
        ptx::let_next_begin();
        const DeltaCall& call = of.call;
        const KeptChunks& kept = of.out.kept;
        const auto [s, c] = of.sequences.chunk(blockIdx.x, static_cast<int>(blockIdx.z));
        if (c * chunk_rows >= s.count) return;
        const int hv = static_cast<int>(blockIdx.y), h = call.key_head(hv), thread = static_cast<int>(threadIdx.x);
        const SharedFoldTiles<T, K> tiles = Layout::tiles();
        if (scores) copy_rows<threads>(tiles.q, call.q, s, c, h, 0, call.key_size, thread);
        if (scores || erases || call.l2norm) copy_rows<threads>(tiles.k, call.k, s, c, h, 0, call.key_size, thread);
        if (own_p) copy_rows<threads>(tiles.p, call.p, s, c, h, 0, call.key_size, thread);
        const Fold fold(call, s, hv, thread);
        const auto given = fold.load_given(c);
        ptx::wait_for_copies();
        ptx::publish_to_products();
        __syncthreads();
        const bool keeps = can_keep_chunks<T, K> && kept.records != nullptr;
        const Index chunk = (s.first_slot + c) * of.folded.heads + hv;
        fold.run(c, given, tiles, Steps < T,
                 !scores || sizeof(T) == 4 > {keeps,
                                              {tiles.q.base + whole},
                                              thread,
                                              keeps ? kept.record<T>(chunk) + RecordOf<T>::inverse : nullptr});
        if constexpr (scores) KeyProducts<T, K, warpgroups>{call, thread / 32, thread % 32}.make_scores(tiles);
        __syncthreads();
        const Index slot = s.first_slot + c;
        const char* const made = ptx::shared_memory();
        if constexpr (scores) {
            using Record = typename Layout::Record;
            char* const to = of.folded.record(slot, hv, Record::bytes);
            copy_out(made + Layout::record, to, erases ? Record::factors : Record::solve, thread, threads);
            copy_out(tiles.factors, to + Record::factors, static_cast<int>(sizeof(ChunkFactors)), thread, threads);
        } else {
            using Record = SolvedChunk;
            char* const to = of.folded.record(slot, hv, Record::bytes);
            if (erases) copy_out(made + Layout::solve, to, Record::factors, thread, threads);
            copy_out(tiles.factors, to + Record::factors, static_cast<int>(sizeof(ChunkFactors)), thread, threads);
            copy_out(&tiles.memory->decays, to + Record::decays, static_cast<int>(sizeof(KeyDecays)), thread, threads);
        }
        if constexpr (can_keep_chunks<T, K>) {
            if (!keeps) return;
            using Kept = RecordOf<T>;
            char* const record = kept.record<T>(chunk);
            if (scores) copy_out(made + Layout::record, record, Kept::square_bytes, thread, threads);
            if (erases && sizeof(T) == 2)
                copy_out(made + whole, record + Kept::inverse, Kept::square_bytes, thread, threads);
            keep_factors<T>(kept, chunk, *tiles.factors, *tiles.memory, thread);
        }
    }
}

template <class T, bool warpgroups>
void launch_for(const ChunkForward& of, cudaStream_t stream) {
    with_shared_fold(of.call, [&]<int K, bool own_p, bool erases>() {
        if constexpr (!warpgroups || K <= 128)
            launch(fold_shared_kernel<T, K, own_p, erases, warpgroups>,
                   {fold_blocks(of), SharedFold<T, K, erases, warpgroups>::threads,
                    Shared<T, K, own_p, !warpgroups>::bytes},
                   stream, "the delta rules' fold", of);
    });
}

}  // namespace

void launch_fold_shared(Level level, const ChunkForward& of, cudaStream_t stream) {
    if (of.call.q.dtype == core::DType::f32) return launch_for<float, false>(of, stream);
    with_half(of.call,
              [&]<class T>() { (level == Level::sm_90a ? launch_for<T, true> : launch_for<T, false>)(of, stream); });
}

}  // namespace softdelta::cuda
