// What a block of the scan does: its warpgroups go apart.
//
//     states    one or two, Sᵀ in registers, as in scan/scan.h: what a chunk waits for of the one before
//     outputs   of S and U that these hand on; of gates that all channels share, the scores, unless they are in the
//     record copies    chunks to come
#pragma once

#include "engines/cuda/delta_rule/scan/warpgroup/copies.h"
#include "engines/cuda/delta_rule/scan/warpgroup/outputs.h"
#include "engines/cuda/delta_rule/scan/warpgroup/states.h"

namespace softdelta::cuda::chunk_scan {
// Who copies and who looks has half a warpgroup, or a whole one: where chunks are waited for one by one, copies are to
// be on their way soon.
template <int slabs, bool beside>
struct Roles {
    static constexpr int copying = beside ? warpgroup_threads : warpgroup_threads / 2, looking = copying;
    static constexpr int threads = (slabs + 1) * warpgroup_threads + copying + looking;
    // Registers of a thread in each role: what a block begins with, shared out.
    static constexpr int of_states = slabs == 2 ? 168
                                     : beside   ? 208
                                                : 216,
                         of_outputs = slabs == 2 ? 136
                                      : beside   ? 160
                                                 : 216,
                         of_copies = slabs == 2 ? 40 : 72;
};

// beside: other blocks fold the chunks meanwhile.
template <class T, int K, Keys keys, int slabs, bool keeps, bool beside>
__device__ void scan_in_roles(const ChunkForward& of, const KeptBoxes& boxes, const ScanPlace& place) {
    const Shared<T, K, keys, slabs> shared{ptx::shared_address(ptx::shared_memory())};
    const DeltaSequence s = of.sequences[place.sequence];
    const int chunks = s.chunks(), thread = static_cast<int>(threadIdx.x) % warpgroup_threads,
              role = static_cast<int>(threadIdx.x) / warpgroup_threads;
    using Role = Roles<slabs, beside>;
    if (threadIdx.x == 0) shared.start(Role::copying, Role::looking);
    __syncthreads();
    if (role < slabs) {
        ptx::take_registers<Role::of_states>();
        States<T, K, keys, slabs>(of, s, place, role).run(shared, chunks);
    } else if (role == slabs) {
        ptx::take_registers<Role::of_outputs>();
        Outputs<T, K, keys, slabs, keeps>{of.call, s, of.out, boxes, shared, place, thread / 32, thread % 32}.run(
            chunks, s.first_slot);
    } else {
        ptx::release_registers<Role::of_copies>();
        const int other = static_cast<int>(threadIdx.x) - (slabs + 1) * warpgroup_threads;
        if (other < Role::copying)
            Copies<T, K, keys, slabs, Role::copying, keeps, beside>(of, s, shared, place, other).run(chunks);
        else
            Looks<T, K, keys, slabs, Role::looking>{shared, other - Role::copying, of.call.l2norm}.run(chunks);
    }
}

}  // namespace softdelta::cuda::chunk_scan
