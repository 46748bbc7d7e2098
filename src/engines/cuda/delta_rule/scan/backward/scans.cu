// The kernel of the scans of the chunked backward passes. Few heads leave multiprocessors idle in each of them, so they
// run side by side where both are wanted.
#include <algorithm>

#include "engines/cuda/delta_rule/scan/backward/from_end.h"
#include "engines/cuda/delta_rule/scan/backward/from_start.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

// The longer ones first: from the end, those of all sequences.
template <class T, int K, int warps, Keys kind, bool warpgroups>
__global__ void __launch_bounds__(32 * (warps + copy_warps), 1)
    scan_kernel(const __grid_constant__ Scans scans, const __grid_constant__ ChunkGradients of) {
    if constexpr (!warpgroups || ptx::has_warpgroups) {
        if constexpr (warpgroups) ptx::follow_launch_before();
        const int n = static_cast<int>(blockIdx.z), count = scans.from_end ? of.sequences.count : 0;
        if (n < count)
            ScanFromEnd<T, K, warps, kind, warpgroups>{{of, n, scans.stages}, of.grad}.run();
        else
            ScanFromStart<T, K, warps, kind, warpgroups>{{of, n - count, scans.stages}}.run();
    }
}

// Of one chunk.
template <class T, int K, int warps, Keys kind>
constexpr int stage_bytes = std::max(ScanFromEnd<T, K, warps, kind, false>::Memory::stage_bytes,
                                     ScanFromStart<T, K, warps, kind, false>::Memory::stage_bytes);

template <class T, int K, int warps, Keys kind, bool warpgroups>
void launch_scan_kernel(Scans scans, const ChunkGradients& of, cudaStream_t stream) {
    const int each = of.sequences.count * ((scans.from_start ? 1 : 0) + (scans.from_end ? 1 : 0));
    const Blocks blocks(of.saved.size / (16 * warps), of.call.heads, each);
    int bytes = scans.stages * stage_bytes<T, K, warps, kind>;
    if constexpr (warpgroups)
        bytes = std::max(ScanFromEnd<T, K, warps, kind, true>::Memory::bytes,
                         ScanFromStart<T, K, warps, kind, true>::Memory::bytes);
    launch(scan_kernel<T, K, warps, kind, warpgroups>, {blocks, 32 * (warps + copy_warps), bytes, warpgroups}, stream,
           "the delta rules' scans for gradients", scans, of);
}

// use.template operator()<kind>(), K and V filled up to 128.
template <class Use>
void with_kind(const DeltaCall& call, const Use& use) {
    if (call.gate == core::Gate::channel)
        use.template operator()<Keys::with_gates>();
    else if (call.own_p)
        use.template operator()<Keys::own_p>();
    else
        use.template operator()<Keys::plain>();
}

}  // namespace

// Warpgroups: on sm_90a, of rules that erase, K and V filled up to 128. Few heads take less columns for each block, so
// that more blocks share the work.
void launch_scans(const Card& card, Scans scans, const ChunkGradients& of, cudaStream_t stream) {
    if (of.call.q.dtype == core::DType::f32) return launch_split_scan_from_end(of, stream);
    using T = SavedElement;
    if (of.saved.size == 64) {
        scans.stages = scan_tiles(card, false, 0, stage_bytes<T, 64, 4, Keys::plain>).stages;
        return launch_scan_kernel<T, 64, 4, Keys::plain, false>(scans, of, stream);
    }
    constexpr Index enough = 100;
    const bool many = Index(of.call.heads) * of.sequences.count >= enough;
    const bool warpgroups = card.level == Level::sm_90a && of.call.erase != core::Erase::nothing;
    with_kind(of.call, [&]<Keys kind>() {
        if (warpgroups)
            return (many ? launch_scan_kernel<T, 128, 8, kind, true>
                         : launch_scan_kernel<T, 128, 4, kind, true>)(scans, of, stream);
        const auto [wide, stages] = scan_tiles(card, many, stage_bytes<T, 128, 8, kind>, stage_bytes<T, 128, 4, kind>);
        scans.stages = stages;
        (wide ? launch_scan_kernel<T, 128, 8, kind, false> : launch_scan_kernel<T, 128, 4, kind, false>)(scans, of,
                                                                                                         stream);
    });
}

}  // namespace softdelta::cuda
