// A checked call of attention.
#pragma once

#include "api/check.h"
#include "core/attention.h"

namespace softdelta::api {

struct AttentionCall {
    core::AttentionInputs in;
    core::AttentionOptions options{};
    CheckedExecution how{};
    Sizes sizes{};  // of q, k, v and the results
};

AttentionCall check_attention_call(const softdelta_attention_inputs* inputs, const softdelta_attention_options* options,
                                   const softdelta_execution* execution);

core::AttentionOutputs check_attention_outputs(const AttentionCall& call, const softdelta_attention_outputs* outputs);

}  // namespace softdelta::api
