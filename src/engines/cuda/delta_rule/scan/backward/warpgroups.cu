// The scans of the chunked backward passes on products of warpgroups, sm_90a.
#include "engines/cuda/delta_rule/scan/backward/kernel.h"

namespace softdelta::cuda {

void launch_warpgroup_scans(Scans scans, const DeltaCall& call, const ChunkSequences& sequences,
                            const GradientViews& grad, const SavedChunks& saved, cudaStream_t stream) {
    with_wide_scan(call, sequences.count, [&]<int warps, KeyKind kind>() {
        launch_scan_kernel<SavedElement, 128, warps, kind, true>(scans, call, sequences, grad, saved, stream);
    });
}

}  // namespace softdelta::cuda
