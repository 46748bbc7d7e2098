// The scan from the end for f32 operands, on every level: products of split numbers by tf32 matrix units.
#include "engines/cuda/delta_rule/scan/backward/from_end.h"
#include "engines/cuda/delta_rule/unfold/shared_tiles.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

template <int warps, Keys kind>
using Scan = ScanFromEnd<float, 128, warps, kind, false>;

template <int warps, Keys kind>
__global__ void __launch_bounds__(32 * warps, 1) split_scan_kernel(const __grid_constant__ ChunkGradients of) {
    Scan<warps, kind>{{of, static_cast<int>(blockIdx.z), 1}, of.grad}.run();
}

template <int warps, Keys kind>
void launch_for(const ChunkGradients& of, cudaStream_t stream) {
    launch(split_scan_kernel<warps, kind>,
           {{of.saved.size / (16 * warps), of.call.heads, of.sequences.count},
            32 * warps,
            Scan<warps, kind>::Memory::bytes},
           stream, "the delta rules' scan for gradients", of);
}

}  // namespace

void launch_split_scan_from_end(const ChunkGradients& of, cudaStream_t stream) {
    const bool many = has_many_heads(of.call, of.sequences.count);
    if (of.call.own_p)
        (many ? launch_for<8, Keys::own_p> : launch_for<4, Keys::own_p>)(of, stream);
    else
        (many ? launch_for<8, Keys::plain> : launch_for<4, Keys::plain>)(of, stream);
}

int split_gradients_shared_bytes(const DeltaCall& call) {
    const int scan = call.own_p ? Scan<8, Keys::own_p>::Memory::bytes : Scan<8, Keys::plain>::Memory::bytes;
    return std::max(scan, UnfoldMemory<float, 128, false, true>::bytes(1));
}

}  // namespace softdelta::cuda
