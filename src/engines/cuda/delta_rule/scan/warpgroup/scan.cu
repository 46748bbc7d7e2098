// The scan over folded chunks on sm_90a: a block has a value head of a sequence and 64 or 128 value columns
// (roles.h).
#include "engines/cuda/delta_rule/scan/warpgroup/roles.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace chunk_scan;

template <class T, int K, Keys keys, int slabs, bool keeps>
__global__ void __launch_bounds__(Roles<slabs, false>::threads, 1)
    warpgroup_scan_kernel(const __grid_constant__ ChunkForward of, const __grid_constant__ KeptBoxes boxes) {
    if constexpr (ptx::has_warpgroups)
        scan_in_roles<T, K, keys, slabs, keeps, false>(
            of, boxes,
            {static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x) * slabs * slab});
}

template <class T, int K, Keys keys, int slabs>
void launch_with(const ChunkForward& of, bool early, cudaStream_t stream) {
    auto* kernel = warpgroup_scan_kernel<T, K, keys, slabs, false>;
    if constexpr (can_keep_chunks<T, K>)
        if (of.out.kept.states != nullptr) kernel = warpgroup_scan_kernel<T, K, keys, slabs, true>;
    launch(kernel,
           {scan_blocks(of, slabs * slab), Roles<slabs, false>::threads, Shared<T, K, keys, slabs>::bytes, early},
           stream, "the delta rules' scan over chunks", of, kept_boxes(of, slabs * slab));
}

template <int slabs>
void launch_for(const ChunkForward& of, bool early, cudaStream_t stream) {
    with_half(of.call, [&]<class T>() {
        with_keys(of.call, [&]<int K, Keys keys>() {
            if constexpr (K <= 128) launch_with<T, K, keys, K == 64 ? 1 : slabs>(of, early, stream);
        });
    });
}

}  // namespace

void launch_warpgroup_scan(const ChunkForward& of, bool early, cudaStream_t stream) {
    // Both halves of a head in one block, where such blocks fill the card. With three tiles of keys there are two
    // stages then, too few where a chunk is kept until what it leaves is stored.
    const bool keeps = of.out.kept.states != nullptr, wide = has_many_heads(of.call, of.sequences.count) &&
                                                             (of.call.value_size > slab || keeps) &&
                                                             !(keeps && of.call.own_p);
    (wide ? launch_for<2> : launch_for<1>)(of, early, stream);
}

}  // namespace softdelta::cuda
