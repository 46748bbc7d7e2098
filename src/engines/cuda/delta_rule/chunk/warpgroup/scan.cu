// The scan over folded chunks on sm_90a. A block has a value head of a sequence and 64 value columns; its warpgroups:
//
//     states    Sᵀ in registers, as in chunk/scan.h: what a chunk waits for of the one before
//     outputs   of the same states, from Uᵀ that the first hands on
//     scores    of gates that all channels share, where q and k are: others are in the record
//     copies    chunks to come
#include "engines/cuda/delta_rule/chunk/warpgroup/scan.h"

#include "engines/cuda/delta_rule/chunk/warpgroup/copies.h"
#include "engines/cuda/delta_rule/chunk/warpgroup/outputs.h"
#include "engines/cuda/delta_rule/chunk/warpgroup/scores.h"
#include "engines/cuda/delta_rule/chunk/warpgroup/states.h"
#include "engines/cuda/grid.h"

namespace softdelta::cuda {

namespace {

using namespace chunk_scan;

// Others take the state that a sequence begins with through shared memory: from one who first waits for registers, so
// after these have been released.
template <class Layout>
__device__ void wait_for_state(const Layout& shared, const DeltaCall& call, const DeltaSequence& s) {
    if (!shared.begins_with_state(call, s)) return;
    __syncthreads();
    __syncthreads();
}

template <class T, int K, Keys keys, bool keeps>
__global__ void __launch_bounds__(4 * group, 1)
    group_scan_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                      const __grid_constant__ FoldedChunks folded, const __grid_constant__ ChunkOutputs out) {
    if constexpr (ptx::has_warpgroups) {
        const Shared<T, K, keys> shared{ptx::shared_address(ptx::shared_memory())};
        const DeltaSequence s = sequences[static_cast<int>(blockIdx.z)];
        const int hv = static_cast<int>(blockIdx.y), first_column = static_cast<int>(blockIdx.x) * slab;
        const int chunks = static_cast<int>((s.count + C - 1) / C), thread = static_cast<int>(threadIdx.x) % group;
        if (threadIdx.x == 0) shared.start();
        __syncthreads();
        switch (static_cast<int>(threadIdx.x) / group) {
            case 0:
                ptx::take_registers<184>();
                States<T, K, keys, keeps>(call, sequences, s, out, hv, first_column, thread / 32)
                    .run(shared, chunks,
                         folded.slot(s, sequences.first + static_cast<int>(blockIdx.z), 0, sequences.packed));
                break;
            case 1:
                ptx::take_registers<160>();
                Outputs<T, K, keys>(call, sequences, s, out, hv, first_column, thread / 32).run(shared, chunks);
                break;
            case 2:
                ptx::release_registers<112>();
                wait_for_state(shared, call, s);
                Scores<T, K, keys>{call, shared, static_cast<bool>(out.o), thread / 32, thread % 32}.run(chunks);
                break;
            default:
                ptx::release_registers<56>();
                wait_for_state(shared, call, s);
                Copies<T, K, keys>(call, sequences, s, folded, shared, hv, first_column, thread).run(chunks);
        }
    }
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
