// Attention forward: blocked online softmax.
#pragma once

#include <cstddef>
#include <string>

#include "core/attention.h"
#include "core/execution.h"
#include "engines/cuda/attention/call.h"

namespace softdelta::cuda {

void attention_forward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                       const core::Execution& execution, const core::AttentionOutputs& out);

// Why the kernels do not compute these inputs; "": they do.
std::string refuse_attention(const core::AttentionInputs& in, const core::AttentionOptions& options);

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

}  // namespace softdelta::cuda
