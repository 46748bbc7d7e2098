// Sums of rows for the backward pass: as they are saved where that is enough, and of far rows computed again.
#include "engines/cuda/attention/far_rows.h"

namespace softdelta::cuda {

void sum_rows(const core::AttentionInputs& in, const AttentionCall& call, const AttentionSequences& packed,
              const RowKernels& kernels, SavedRows saved, ForwardOutputs sums, const RowTerms& terms, int* far_heads,
              cudaStream_t stream) {
    const Redo far = sums.redo;
    const bool fast = kernels.warpgroups || kernels.warps || kernels.split != nullptr;
    if (!fast) sums.redo = {};
    const auto add_up = [&] {
        // Far rows where nothing is added to scores are seldom: kernels of planes take them without another launch.
        const bool by_planes = !fast || (sums.far_lse && !call.mask && !call.bias && !call.alibi_slopes);
        for_each_sequences(in, call, packed, [&](const AttentionPass& pass) {
            if (!by_planes && kernels.split) launch_split_forward(pass, *kernels.split, sums, stream);
            if (!by_planes && kernels.warpgroups) launch_warpgroup_forward(pass, sums, stream);
            if (!by_planes && kernels.warps) launch_warp_forward(pass, sums, stream);
            launch_attention_forward(pass, kernels.planes, sums, stream);
        });
    };
    const auto take_terms = [&](RowPass pass) {
        launch_row_terms(call, packed, saved, terms, pass, far, far_heads, stream);
    };
    if (!fast) {
        add_up();
        return take_terms(RowPass::only);
    }
    saved.summed = sums.o || !saved.lse;
    if (saved.summed) add_up();
    const int* const end = far_heads + core::sequence_count(in) * (call.heads / call.group);  // behind the flags
    check(cudaMemsetAsync(far.blocks, 0, static_cast<std::size_t>(end - far.blocks) * sizeof(int), stream),
          "memory for the call");
    take_terms(RowPass::warpgroups);
    if (saved.summed) return;
    sums.far_lse = saved.lse;
    add_up();
    if (terms.sink != nullptr) take_terms(RowPass::again);
}

}  // namespace softdelta::cuda
