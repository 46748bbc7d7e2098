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
            ScanFromEnd<T, K, warps, kind, warpgroups>{{of, n}, of.grad}.run();
        else
            ScanFromStart<T, K, warps, kind, warpgroups>{{of, n - count}}.run();
    }
}

template <class T, int K, int warps, Keys kind, bool warpgroups>
void launch_scan_kernel(Scans scans, const ChunkGradients& of, cudaStream_t stream) {
    const int each = of.sequences.count * ((scans.from_start ? 1 : 0) + (scans.from_end ? 1 : 0));
    const Blocks blocks(of.saved.size / (16 * warps), of.call.heads, each);
    constexpr int bytes = std::max(ScanFromEnd<T, K, warps, kind, warpgroups>::Memory::bytes,
                                   ScanFromStart<T, K, warps, kind, warpgroups>::Memory::bytes);
    launch(scan_kernel<T, K, warps, kind, warpgroups>, {blocks, 32 * (warps + copy_warps), bytes, warpgroups}, stream,
           "the delta rules' scans for gradients", scans, of);
}

// use.template operator()<warps, kind>(), K and V filled up to 128: few heads take less columns for each block, so that
// more blocks share the work.
template <class Use>
void with_wide_scan(const DeltaCall& call, int sequences, const Use& use) {
    constexpr Index many = 100;
    const auto with = [&]<Keys kind>() {
        if (Index(call.heads) * sequences >= many)
            use.template operator()<8, kind>();
        else
            use.template operator()<4, kind>();
    };
    if (call.gate == core::Gate::channel)
        with.template operator()<Keys::with_gates>();
    else if (call.own_p)
        with.template operator()<Keys::own_p>();
    else
        with.template operator()<Keys::plain>();
}

}  // namespace

// Warpgroups: on sm_90a, of rules that erase, K and V filled up to 128.
void launch_scans(Level level, Scans scans, const ChunkGradients& of, cudaStream_t stream) {
    if (of.saved.size == 64) return launch_scan_kernel<SavedElement, 64, 4, Keys::plain, false>(scans, of, stream);
    const bool warpgroups = level == Level::sm_90a && of.call.erase != core::Erase::nothing;
    with_wide_scan(of.call, of.sequences.count, [&]<int warps, Keys kind>() {
        (warpgroups ? launch_scan_kernel<SavedElement, 128, warps, kind, true>
                    : launch_scan_kernel<SavedElement, 128, warps, kind, false>)(scans, of, stream);
    });
}

}  // namespace softdelta::cuda
