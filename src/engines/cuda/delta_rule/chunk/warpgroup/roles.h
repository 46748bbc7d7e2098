// What a block of the scan does: its warpgroups go apart.
//
//     states    Sᵀ in registers, as in chunk/scan.h: what a chunk waits for of the one before
//     outputs   of the same states, from Uᵀ that the first hands on
//     scores    of gates that all channels share, where q and k are: others are in the record
//     copies    chunks to come
#pragma once

#include "engines/cuda/delta_rule/chunk/warpgroup/copies.h"
#include "engines/cuda/delta_rule/chunk/warpgroup/outputs.h"
#include "engines/cuda/delta_rule/chunk/warpgroup/scores.h"
#include "engines/cuda/delta_rule/chunk/warpgroup/states.h"

namespace softdelta::cuda::chunk_scan {

// Others take the state that a sequence begins with through shared memory: from one who first waits for registers, so
// after these have been released.
template <class Layout>
__device__ void wait_for_state(const Layout& shared, const DeltaCall& call, const DeltaSequence& s) {
    if (!shared.begins_with_state(call, s)) return;
    __syncthreads();
    __syncthreads();
}

// beside: other blocks fold the chunks meanwhile.
template <class T, int K, Keys keys, bool keeps, bool beside>
__device__ void scan_in_roles(const DeltaCall& call, const DeltaSequences& sequences, const FoldedChunks& folded,
                              const FoldFlags& flags, const ChunkOutputs& out, const ScanPlace& place) {
    const Shared<T, K, keys> shared{ptx::shared_address(ptx::shared_memory())};
    const DeltaSequence s = sequences[place.sequence];
    const int hv = place.hv, first_column = place.first_column;
    const int chunks = static_cast<int>((s.count + C - 1) / C), thread = static_cast<int>(threadIdx.x) % group;
    if (threadIdx.x == 0) shared.start();
    __syncthreads();
    switch (static_cast<int>(threadIdx.x) / group) {
        case 0:
            ptx::take_registers<184>();
            States<T, K, keys, keeps>(call, sequences, s, out, hv, first_column, thread / 32)
                .run(shared, chunks, folded.slot(s, sequences.first + place.sequence, 0, sequences.packed));
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
            Copies<T, K, keys, beside>(call, sequences, s, folded, flags, shared, place, thread).run(chunks);
    }
}

}  // namespace softdelta::cuda::chunk_scan
