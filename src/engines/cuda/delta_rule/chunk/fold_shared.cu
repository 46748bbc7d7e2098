// The fold of gates that all channels share, a block for each chunk.
#include "engines/cuda/delta_rule/chunk/launch_fold.h"
#include "engines/cuda/delta_rule/chunk/rows.h"
#include "engines/cuda/delta_rule/chunk/shared_fold.h"
#include "engines/cuda/grid.h"

namespace softdelta::cuda {

namespace {

template <class T, int K, bool own_p>
struct Shared {
    using Record = FoldedChunk<K, false>;
    static constexpr int key_bytes = KeyTile<T, K>::bytes(chunk_rows);
    static constexpr int record = (own_p ? 3 : 2) * key_bytes, memory = record + (Record::bytes + 127) / 128 * 128,
                         bytes = memory + static_cast<int>(sizeof(SharedFoldMemory));
};

template <class T, int K, bool own_p, bool erases, bool grouped>
__global__ void __launch_bounds__(SharedFold<T, K, erases, grouped>::threads, 3)
    fold_shared_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                       const __grid_constant__ FoldedChunks folded) {
    if constexpr (!grouped || ptx::has_warpgroups) {
        using Layout = Shared<T, K, own_p>;
        using Record = typename Layout::Record;
        constexpr int threads = SharedFold<T, K, erases, grouped>::threads;
        const DeltaSequence s = sequences[static_cast<int>(blockIdx.z)];
        const Index c = static_cast<Index>(blockIdx.x);
        if (c * chunk_rows >= s.count) return;
        const int hv = static_cast<int>(blockIdx.y), h = call.key_head(hv), thread = static_cast<int>(threadIdx.x);
        const std::uint32_t base = ptx::shared_address(ptx::shared_memory());
        const auto key = [&](int which) {
            return KeyTile<T, K>{base + static_cast<std::uint32_t>(which * Layout::key_bytes)};
        };
        copy_rows(key(0), call.q, s, c, h, 0, call.key_size, thread, threads);
        copy_rows(key(1), call.k, s, c, h, 0, call.key_size, thread, threads);
        if (own_p) copy_rows(key(2), call.p, s, c, h, 0, call.key_size, thread, threads);
        const SharedFold<T, K, erases, grouped> fold(call, s, hv, thread);
        const auto given = fold.load_given(c);
        ptx::wait_for_copies();
        ptx::publish_to_products();
        __syncthreads();
        char* made = ptx::shared_memory() + Layout::record;
        const SharedFoldTiles<T, K> tiles{key(0),
                                          key(1),
                                          key(own_p ? 2 : 1),
                                          {base + Layout::record},
                                          {base + Layout::record + Record::solve},
                                          reinterpret_cast<ChunkFactors*>(made + Record::factors),
                                          reinterpret_cast<SharedFoldMemory*>(ptx::shared_memory() + Layout::memory)};
        fold.run(c, given, tiles, [] {});
        KeyProducts<T, K, grouped>{call, thread / 32, thread % 32}.make_scores(tiles);
        __syncthreads();
        char* to = folded.record(folded.slot(s, sequences.first + static_cast<int>(blockIdx.z), c, sequences.packed),
                                 hv, Record::bytes);
        for (int i = 16 * thread; i < Record::bytes; i += 16 * threads)
            if (erases || i < Record::solve || i >= Record::factors)
                *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(made + i);
    }
}

template <class T, bool grouped>
void launch_for(const DeltaCall& call, const DeltaSequences& sequences, const FoldedChunks& folded,
                cudaStream_t stream) {
    with_shared_fold(call, [&]<int K, bool own_p, bool erases>() {
        launch(fold_shared_kernel<T, K, own_p, erases, grouped>,
               {fold_blocks(call, sequences), SharedFold<T, K, erases, grouped>::threads, Shared<T, K, own_p>::bytes},
               stream, "the delta rules' fold", call, sequences, folded);
    });
}

}  // namespace

void launch_fold_shared(Level level, const DeltaCall& call, core::DType type, const DeltaSequences& sequences,
                        const FoldedChunks& folded, cudaStream_t stream) {
    const bool grouped = level == Level::sm_90a;
    const auto run = type == core::DType::bf16
                         ? (grouped ? launch_for<__nv_bfloat16, true> : launch_for<__nv_bfloat16, false>)
                         : (grouped ? launch_for<__half, true> : launch_for<__half, false>);
    run(call, sequences, folded, stream);
}

}  // namespace softdelta::cuda
