// The scans of the chunked backward passes on products of warps.
#include "engines/cuda/delta_rule/scan/backward/kernel.h"

namespace softdelta::cuda {

void launch_scans(Level level, Scans scans, const DeltaCall& call, const ChunkSequences& sequences,
                  const GradientViews& grad, const SavedChunks& saved, cudaStream_t stream) {
    if (saved.size == 64)
        return launch_scan_kernel<SavedElement, 64, 4, KeyKind::plain, false>(scans, call, sequences, grad, saved,
                                                                              stream);
    if (level == Level::sm_90a && call.erase != core::Erase::nothing)
        return launch_warpgroup_scans(scans, call, sequences, grad, saved, stream);
    with_wide_scan(call, sequences.count, [&]<int warps, KeyKind kind>() {
        launch_scan_kernel<SavedElement, 128, warps, kind, false>(scans, call, sequences, grad, saved, stream);
    });
}

}  // namespace softdelta::cuda
