// A case as one forward and one backward call of the library.
#include <algorithm>
#include <stdexcept>

#include "io/call/results.h"

namespace softdelta::io {
namespace {

using Results = std::map<std::string, Tensor>;

// The functions of the library that a call goes through.
struct Run {
    static constexpr auto attention_forward = softdelta::attention_forward;
    static constexpr auto attention_backward = softdelta::attention_backward;
    static constexpr auto delta_forward = softdelta::delta_forward;
    static constexpr auto delta_backward = softdelta::delta_backward;
};
// The same checks, and nothing computed.
struct Check {
    static constexpr auto attention_forward = attention_forward_workspace;
    static constexpr auto attention_backward = attention_backward_workspace;
    static constexpr auto delta_forward = delta_forward_workspace;
    static constexpr auto delta_backward = delta_backward_workspace;
};

// A case without results is checked as if its o were wanted; nobody writes to it.
Tensor unwritten(const Call& call, const Tensor& q) {
    return {q.data(), q.dtype(), output_shape(call, "o")};
}

template <class Functions>
std::size_t pass_attention(const Call& call, const Results& results, const Execution& execution, bool always) {
    std::size_t bytes = 0;
    AttentionOutputs outputs;
    const bool wanted = assign(results, outputs);
    if (!wanted && always) outputs.o = unwritten(call, call.attention.q);
    if (wanted || always)
        bytes = bytes_of(Functions::attention_forward, call.attention, outputs, call.attention_options, execution);
    AttentionGradients gradients;
    gradients.d_o = call.d_o;
    gradients.dlse = call.dlse;
    if (assign(results, gradients))
        bytes = std::max(bytes, bytes_of(Functions::attention_backward, call.attention, gradients,
                                         call.attention_options, execution));
    return bytes;
}

template <class Functions>
std::size_t pass_delta(const Call& call, const Results& results, const Execution& execution, bool always) {
    std::size_t bytes = 0;
    DeltaOutputs outputs;
    const bool wanted = assign(results, outputs);
    if (!wanted && always) outputs.o = unwritten(call, call.delta.q);
    if (wanted || always)
        bytes = bytes_of(Functions::delta_forward, call.delta, outputs, call.delta_options, execution);
    DeltaGradients gradients;
    gradients.d_o = call.d_o;
    gradients.dfinal_state = call.dfinal_state;
    if (assign(results, gradients))
        bytes =
            std::max(bytes, bytes_of(Functions::delta_backward, call.delta, gradients, call.delta_options, execution));
    return bytes;
}

template <class Functions>
std::size_t pass(const Call& call, const Results& results, const Execution& execution, bool always) {
    const Operation& op = operation_of(call);
    for (const auto& [name, tensor] : results)
        if (!tensor || !is_result(op, name)) throw std::invalid_argument(name + ": not a result of " + call.op);
    return call.is_attention ? pass_attention<Functions>(call, results, execution, always)
                             : pass_delta<Functions>(call, results, execution, always);
}

}  // namespace

std::size_t check(const Call& call, const Results& results, const Execution& execution) {
    return pass<Check>(call, results, execution, true);
}

void execute(const Call& call, const Results& results, const Execution& execution) {
    pass<Run>(call, results, execution, false);
}

}  // namespace softdelta::io
