// The scan over folded chunks that lie in memory: one block for a value head of a sequence and a slab of value columns.
// While a chunk is consumed, four warps have the next one copied, on cards whose memory has both. sm_80; on sm_90a
// calls go to scan/warpgroup/scan.cu.
#include "engines/cuda/delta_rule/scan/scan.h"

#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

constexpr int C = chunk_rows;
constexpr int copy_warps = 4;

template <class T, int K, int slab, Keys keys>
struct Shared {
    using Record = FoldedChunk<K, keys == Keys::with_gates>;
    static constexpr int key_tiles = keys == Keys::plain || keys == Keys::only_written ? 2 : 3;
    static constexpr int values = key_tiles * Record::key_bytes, record = values + Tile<T, slab>::bytes(C);
    static constexpr int stage_bytes = (record + Record::small_bytes + 1023) / 1024 * 1024;
    static_assert(stage_bytes <= least_shared_bytes);

    // Tiles of keys lie as in a record: read, erase, write; those of plain keys read, write.
    __device__ static ChunkTiles<T, K, slab> tiles(std::uint32_t base, int c, int stages) {  // one or two
        const std::uint32_t stage = base + static_cast<std::uint32_t>((c & (stages - 1)) * stage_bytes);
        constexpr int write = (key_tiles - 1) * Record::key_bytes, erase = key_tiles == 2 ? write : Record::key_bytes;
        return {{stage},
                {stage + erase},
                {stage + write},
                {stage + values},
                {stage + record},
                {stage + record + Record::solve},
                reinterpret_cast<const ChunkFactors*>(shared_at(stage + record + Record::factors)),
                reinterpret_cast<const float*>(shared_at(stage + record + Record::last))};
    }
};

// Copies of one warpgroup.
template <class T, int K, int slab, Keys keys>
struct ChunkCopy {
    using Layout = Shared<T, K, slab, keys>;
    using Record = typename Layout::Record;

    const DeltaCall& call;
    const DeltaSequence& s;
    const FoldedChunks& folded;
    int hv, first_column, thread, stages;
    std::uint32_t base;

    __device__ void run(int c) const {
        constexpr int threads = 32 * copy_warps;
        const ChunkTiles<T, K, slab> tiles = Layout::tiles(base, c, stages);
        const int h = call.key_head(hv);
        const char* record = folded.record(s.first_slot + c, hv, Record::bytes);
        if constexpr (keys == Keys::with_gates) {
            copy_bytes<3 * Record::key_bytes, threads>(tiles.read.base, record + Record::read, thread);
        } else {
            copy_rows<threads>(tiles.read, call.q, s, c, h, 0, call.key_size, thread);
            copy_rows<threads>(tiles.write, call.k, s, c, h, 0, call.key_size, thread);
            if constexpr (keys == Keys::own_p)
                copy_rows<threads>(tiles.erase, call.p, s, c, h, 0, call.key_size, thread);
        }
        copy_rows<threads>(tiles.values, call.v, s, c, hv, first_column, call.value_size, thread);
        constexpr int solve_end = keys == Keys::only_written ? Record::solve : Record::factors;
        copy_bytes<solve_end, threads>(tiles.score.base, record, thread);
        copy_bytes<Record::small_bytes - Record::factors, threads>(tiles.score.base + Record::factors,
                                                                   record + Record::factors, thread);
    }
};

template <class T, int K, int warps, Keys keys, bool keeps>
__global__ void __launch_bounds__(32 * (warps + copy_warps), 1)
    chunk_scan_kernel(const __grid_constant__ ChunkForward of, int stages) {
    constexpr int slab = 16 * warps;
    const DeltaSequence s = of.sequences[static_cast<int>(blockIdx.z)];
    const int hv = static_cast<int>(blockIdx.y), first_column = static_cast<int>(blockIdx.x) * slab;
    const int chunks = s.chunks(), warp = static_cast<int>(threadIdx.x) / 32;
    const std::uint32_t base = ptx::shared_address(ptx::shared_memory());
    if (warp >= warps) {
        const int thread = static_cast<int>(threadIdx.x) - 32 * warps;
        const ChunkCopy<T, K, slab, keys> copy{of.call, s, of.folded, hv, first_column, thread, stages, base};
        for (int c = 1 - stages; c < chunks; ++c) {
            if (c + stages - 1 < chunks) copy.run(c + stages - 1);
            ptx::wait_for_copies();
            __syncthreads();
            if (stages == 1) __syncthreads();
        }
    } else {
        ChunkScan<T, K, slab, keys == Keys::with_gates, keys != Keys::only_written, keeps> scan{
            {of, s, hv, first_column, warp}};
        scan.my.load_state();
        if (stages > 1) __syncthreads();
        for (int c = 0; c < chunks; ++c) {
            if (stages == 1) __syncthreads();
            Index kept = 0;
            if constexpr (keeps) kept = (s.first_slot + c) * of.folded.heads + hv;
            scan.take(c, Shared<T, K, slab, keys>::tiles(base, c, stages), {}, kept);
            __syncthreads();
        }
        scan.my.store_final_state();
    }
}

template <class T, int K, int warps, Keys keys>
void launch_with(const ChunkForward& of, int stages, cudaStream_t stream) {
    constexpr int slab = 16 * warps;
    auto* kernel = chunk_scan_kernel<T, K, warps, keys, false>;
    if constexpr (can_keep_chunks<T, K>)
        if (of.out.kept.states != nullptr) kernel = chunk_scan_kernel<T, K, warps, keys, true>;
    launch(kernel, {scan_blocks(of, slab), 32 * (warps + copy_warps), stages * Shared<T, K, slab, keys>::stage_bytes},
           stream, "the delta rules' scan over chunks", of, stages);
}

}  // namespace

int chunk_record_bytes(Level level, const DeltaCall& call) {
    if (call.q.dtype == core::DType::f32) return split_record_bytes(call);
    if (level == Level::sm_90a && call.gate != core::Gate::channel) return SolvedChunk::bytes;
    int bytes = 0;
    with_keys(call, [&]<int K, Keys keys>() { bytes = FoldedChunk<K, keys == Keys::with_gates>::bytes; });
    return bytes;
}

void launch_chunk_scan(const Card& card, const ChunkForward& of, bool early, cudaStream_t stream) {
    if (of.call.q.dtype == core::DType::f32) return launch_split_scan(of, stream);
    if (card.level == Level::sm_90a) return launch_warpgroup_scan(of, early, stream);
    const bool many = has_many_heads(of.call, of.sequences.count);
    with_half(of.call, [&]<class T>() {
        with_keys(of.call, [&]<int K, Keys keys>() {
            const auto [wide, stages] =
                scan_tiles(card, many && K <= 128, Shared<T, K, most_slab<K>, keys>::stage_bytes,
                           Shared<T, K, 64, keys>::stage_bytes);
            (wide ? launch_with<T, K, most_slab<K> / 16, keys> : launch_with<T, K, 4, keys>)(of, stages, stream);
        });
    });
}

}  // namespace softdelta::cuda
