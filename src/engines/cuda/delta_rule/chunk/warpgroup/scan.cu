// The scan over folded chunks on sm_90a: a block has a value head of a sequence and 64 value columns (roles.h).
#include "engines/cuda/delta_rule/chunk/warpgroup/scan.h"

#include "engines/cuda/delta_rule/chunk/warpgroup/roles.h"
#include "engines/cuda/grid.h"

namespace softdelta::cuda {

namespace {

using namespace chunk_scan;

template <class T, int K, Keys keys, bool keeps>
__global__ void __launch_bounds__(4 * group, 1)
    group_scan_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                      const __grid_constant__ FoldedChunks folded, const __grid_constant__ ChunkOutputs out) {
    if constexpr (ptx::has_warpgroups)
        scan_in_roles<T, K, keys, keeps, false>(
            call, sequences, folded, {}, out,
            {static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x) * slab});
}

template <class T, int K, Keys keys>
void launch_with(const DeltaCall& call, const DeltaSequences& sequences, const FoldedChunks& folded,
                 const ChunkOutputs& out, cudaStream_t stream) {
    auto* kernel = group_scan_kernel<T, K, keys, false>;
    if constexpr (can_keep_chunks<T, K>)
        if (out.kept.states != nullptr) kernel = group_scan_kernel<T, K, keys, true>;
    launch(kernel, {scan_blocks(call, sequences, out, slab), 4 * group, Shared<T, K, keys>::bytes}, stream,
           "the delta rules' scan over chunks", call, sequences, folded, out);
}

template <class T>
void launch_for(const DeltaCall& call, const DeltaSequences& sequences, const FoldedChunks& folded,
                const ChunkOutputs& out, cudaStream_t stream) {
    const auto run = call.erase == core::Erase::nothing ? launch_with<T, 128, Keys::only_written>
                     : call.gate == core::Gate::channel ? launch_with<T, 128, Keys::with_gates>
                     : call.own_p                       ? launch_with<T, 128, Keys::own_p>
                     : call.key_size <= 64              ? launch_with<T, 64, Keys::plain>
                                                        : launch_with<T, 128, Keys::plain>;
    run(call, sequences, folded, out, stream);
}

}  // namespace

void launch_group_scan(const DeltaCall& call, core::DType type, const DeltaSequences& sequences,
                       const FoldedChunks& folded, const ChunkOutputs& out, cudaStream_t stream) {
    (type == core::DType::bf16 ? launch_for<__nv_bfloat16> : launch_for<__half>)(call, sequences, folded, out, stream);
}

}  // namespace softdelta::cuda
