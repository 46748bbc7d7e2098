// Few heads on sm_90a: what the scan leaves of the card folds the chunks meanwhile, in the order of time. The blocks
// that fold wait for nobody, and those that scan begin when all of these have begun: they wait for chunks that are
// folded by blocks that run. Each kind of block has a multiprocessor for itself.
#include <algorithm>

#include "engines/cuda/delta_rule/scan/warpgroup/folds.h"
#include "engines/cuda/delta_rule/scan/warpgroup/roles.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace chunk_scan;

template <class T, int K, bool keeps>
__global__ void __launch_bounds__(Folds<T, K, keeps>::warpgroups* warpgroup_threads, 1)
    fold_beside_kernel(const __grid_constant__ ChunkForward of) {
    if constexpr (ptx::has_warpgroups) {
        ptx::let_next_begin();
        Folds<T, K, keeps>(of).run(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    }
}

template <class T, int K, bool keeps>
__global__ void __launch_bounds__(Roles<1, true>::threads, 1)
    scan_beside_kernel(const __grid_constant__ ChunkForward of, const __grid_constant__ KeptBoxes boxes) {
    if constexpr (ptx::has_warpgroups) {
        scan_in_roles<T, K, Keys::scored, 1, keeps, true>(
            of, boxes,
            {static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x) * slab});
        ptx::wait_for_launch_before();  // who comes after this launch comes after the fold
    }
}

template <class T, int K>
void launch_with(const ChunkForward& of, int folding, cudaStream_t stream) {
    using Fold = Folds<T, K, false>;
    constexpr int scan_bytes = Shared<T, K, Keys::scored, 1>::bytes;
    // More than half of what a multiprocessor has.
    constexpr int fold_bytes = std::max(Fold::bytes, 128 * 1024);
    static_assert(scan_bytes > 114 * 1024);
    auto* fold = fold_beside_kernel<T, K, false>;
    auto* scan = scan_beside_kernel<T, K, false>;
    if constexpr (can_keep_chunks<T, K>)
        if (of.out.kept.states != nullptr) fold = fold_beside_kernel<T, K, true>, scan = scan_beside_kernel<T, K, true>;
    launch(fold, {folding, Fold::warpgroups * warpgroup_threads, fold_bytes}, stream,
           "the delta rules' fold beside the scan", of);
    launch(scan, {scan_blocks(of, slab), Roles<1, true>::threads, scan_bytes, true}, stream,
           "the delta rules' scan beside the fold", of, kept_boxes(of, slab));
}

}  // namespace

int folding_blocks(Level level, const DeltaCall& call, Index sequences, bool keeps, core::Device device) {
    if (level != Level::sm_90a || call.q.dtype == core::DType::f32 || call.gate == core::Gate::channel || call.own_p ||
        call.erase == core::Erase::nothing)
        return 0;
    const Index columns = keeps ? KeptChunks::size : call.value_size;
    const Index scans = blocks_of(columns, slab) * call.heads * sequences, others = multiprocessors(device) - scans;
    // As fast as the others scan, a fold with scores takes three blocks for four of these.
    return static_cast<int>(scans > 0 && 4 * others >= 3 * scans ? others : 0);
}

void launch_fold_and_scan(const ChunkForward& of, int folding, cudaStream_t stream) {
    check(cudaMemsetAsync(of.flags.data, 0, static_cast<std::size_t>(of.flags.count) * sizeof(int), stream),
          "clearing memory");
    with_half(of.call, [&]<class T>() {
        (of.call.key_size <= 64 ? launch_with<T, 64> : launch_with<T, 128>)(of, folding, stream);
    });
}

}  // namespace softdelta::cuda
