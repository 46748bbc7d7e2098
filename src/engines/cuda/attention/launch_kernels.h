// What the passes launch, and what their kernels hand to each other.
#pragma once

#include "engines/cuda/attention/call.h"

namespace softdelta::cuda {

// What a pass over scores leaves for the gradients, of query i of the batch row and head at [head, B·Lq]: a
// probability is e^((score − top) − log_sum). Beside a huge top, top + log_sum has lost the second.
struct RowSums {
    float *top = nullptr, *log_sum = nullptr;
};

struct ForwardOutputs {
    View o, lse;
    RowSums sums;
};

// Planes that hold the operands: 1 where all of them are bf16, otherwise 3.
int planes_of(const core::AttentionInputs& in);

void launch_attention_forward(const AttentionCall& call, const AttentionSequences& sequences, int planes,
                              const ForwardOutputs& out, cudaStream_t stream);

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
