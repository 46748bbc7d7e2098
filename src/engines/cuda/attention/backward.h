// Attention's gradients, each element by one thread in one order.
#pragma once

#include <cstddef>

#include "core/attention.h"
#include "core/execution.h"
#include "engines/cuda/attention/forward.h"

namespace softdelta::cuda {

std::size_t attention_backward_workspace(const core::AttentionInputs& in, const core::AttentionGradients& grad);
void attention_backward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                        const core::Execution& execution, const core::AttentionGradients& grad);

// Of query i of the batch row and head at [head, B·Lq]: D = rowsum(do∘o) − dlse, and what the sink's gradient adds up.
struct RowTerms {
    RowSums sums;
    float *D = nullptr, *sink = nullptr;
};

struct Gradients {
    View d_o, dq, dk, dv, dbias;
    Index bias_batches = 0, bias_heads = 0, bias_queries = 0, bias_keys = 0;  // the shape of dbias
};

// dq, a block for 64 queries of a head; dbias, a block for a tile of it, through all that shares it.
void launch_gradients_by_query(const AttentionCall& call, const AttentionSequences& sequences, int planes,
                               const RowTerms& rows, const Gradients& grad, cudaStream_t stream);
void launch_bias_gradient(const AttentionCall& call, const AttentionSequences& sequences, int planes,
                          const RowTerms& rows, const Gradients& grad, cudaStream_t stream);
// dk and dv, a block for 64 keys of a key head, through the query heads that share it.
void launch_gradients_by_key(const AttentionCall& call, const AttentionSequences& sequences, int planes,
                             const RowTerms& rows, const Gradients& grad, cudaStream_t stream);

}  // namespace softdelta::cuda
