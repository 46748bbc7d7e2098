// What a block of the scan does: its warpgroups go apart.
//
//     states    one or two, Sᵀ in registers, as in chunk/scan.h: what a chunk waits for of the one before
//     outputs   of S and U that these hand on; of gates that all channels share, the scores, unless they are in the
//     record copies    chunks to come
#pragma once

#include "engines/cuda/delta_rule/chunk/warpgroup/copies.h"
#include "engines/cuda/delta_rule/chunk/warpgroup/outputs.h"
#include "engines/cuda/delta_rule/chunk/warpgroup/states.h"

namespace softdelta::cuda::chunk_scan {

template <int slabs>
inline constexpr int scan_threads = (slabs + 2) * group;

// Registers of a thread in each role: what a block begins with, shared out.
template <int slabs>
inline constexpr int state_registers = slabs == 1 ? 216 : 168;
template <int slabs>
inline constexpr int output_registers = slabs == 1 ? 216 : 136;
template <int slabs>
inline constexpr int copy_registers = slabs == 1 ? 72 : 40;

// beside: other blocks fold the chunks meanwhile.
template <class T, int K, Keys keys, int slabs, bool keeps, bool beside>
__device__ void scan_in_roles(const DeltaCall& call, const DeltaSequences& sequences, const FoldedChunks& folded,
                              const FoldFlags& flags, const ChunkOutputs& out, const ScanPlace& place) {
    const Shared<T, K, keys, slabs> shared{ptx::shared_address(ptx::shared_memory())};
    const DeltaSequence s = sequences[place.sequence];
    const int chunks = static_cast<int>((s.count + C - 1) / C), thread = static_cast<int>(threadIdx.x) % group,
              role = static_cast<int>(threadIdx.x) / group;
    if (threadIdx.x == 0) shared.start();
    __syncthreads();
    if (role < slabs) {
        ptx::take_registers<state_registers<slabs>>();
        States<T, K, keys, slabs>(call, sequences, s, out, place, role).run(shared, chunks);
    } else if (role == slabs) {
        ptx::take_registers<output_registers<slabs>>();
        Outputs<T, K, keys, slabs, keeps>{call, s, out, shared, place, thread / 32, thread % 32}.run(
            chunks, folded.slot(s, sequences.first + place.sequence, 0, sequences.packed));
    } else {
        ptx::release_registers<copy_registers<slabs>>();
        if (thread < copying)
            Copies<T, K, keys, slabs, beside>(call, sequences, s, folded, flags, shared, place, thread).run(chunks);
        else
            Looks<T, K, keys, slabs>{shared, thread - copying}.run(chunks);
    }
}

}  // namespace softdelta::cuda::chunk_scan
