// Far rows: those whose lse is so far from 0 that one number holds no logarithm beside the maximum. A query that sees
// only keys masked by a huge number is one. Their saved lse does not determine probabilities: row_terms.cu marks them,
// far_rows.cu sums them once more, and warpgroup/gradients.h takes their top and logarithm apart.
#pragma once

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/split/split.h"

namespace softdelta::cuda {

__device__ inline bool is_far(float lse) {
    constexpr float near = 1024;
    return fabsf(lse) > near && !isinf(lse);  // NaN is not
}

// What the caller or the call itself has of each row.
struct SavedRows {
    View o, lse, d_o, dlse;
    bool in_units = false;  // rows of o and do are whole units of 16 bytes of d_o's type
    bool summed = false;    // the call has computed sums of rows
    View ends{};            // packed lengths on the device: rows from the last on belong to no sequence
    Index last = 0;
};

// Kernels of warpgroups take lse as one number: tiles with rows where it is far from 0 are summed once more, and what
// the sink needs of them is taken again.
enum class RowPass { only, warpgroups, again };
void launch_row_terms(const AttentionCall& call, const AttentionSequences& packed, const SavedRows& saved,
                      const RowTerms& out, RowPass pass, const Redo& far, int* far_heads, cudaStream_t stream);

// Which kernels compute sums of rows.
struct RowKernels {
    bool warpgroups, warps;
    const SplitOperands* split;  // null: not by these
    int planes;
};
// Sums and terms of all rows; of far ones again. sums.redo, far_heads: where far rows are marked.
void sum_rows(const core::AttentionInputs& in, const AttentionCall& call, const AttentionSequences& packed,
              const RowKernels& kernels, SavedRows saved, ForwardOutputs sums, const RowTerms& terms, int* far_heads,
              cudaStream_t stream);

}  // namespace softdelta::cuda
