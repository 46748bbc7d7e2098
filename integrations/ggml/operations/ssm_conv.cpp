// GGML_OP_SSM_CONV: the causal convolution of each channel by itself. x [W − 1 + T, C, N] begins with the last W − 1
// tokens of the state, weight [W, C]; the result is [C, T, N]. Shapes as ggml writes them, fastest first.
#include <softdelta/softdelta.h>

#include "operations/operations.h"
#include "operations/thresholds.h"
#include "operations/view.h"

namespace softdelta_ggml {

constexpr std::int64_t most_width = 8;  // that the library's kernels take

Support ssm_conv_support(const ggml_tensor* op) {
    const ggml_tensor *x = op->src[0], *weight = op->src[1];
    for (const ggml_tensor* t : {x, weight, op})
        if (t->type != GGML_TYPE_F32 || !is_plain(t)) return {};
    const bool shapes = x->ne[0] == weight->ne[0] - 1 + op->ne[1] && weight->ne[0] > 1 && x->ne[3] == 1;
    return {shapes && weight->ne[0] <= most_width, op->ne[1] >= convolution_tokens};
}

std::string compute_ssm_conv(const ggml_tensor* op, Resources& resources) {
    const ggml_tensor *x = op->src[0], *weights = op->src[1];
    const std::int64_t width = weights->ne[0], channels = op->ne[0], tokens = op->ne[1], sequences = op->ne[2];
    auto* data = static_cast<float*>(x->data);
    View history(data, f32, {sequences, channels, width - 1}, {stride(x, 2), stride(x, 1), 1});
    View now(data + width - 1, f32, {sequences, tokens, channels}, {stride(x, 2), 1, stride(x, 1)});
    View weight(weights->data, f32, {channels, width}, {stride(weights, 1), 1});
    View y(op->data, f32, {sequences, tokens, channels}, {stride(op, 2), stride(op, 1), 1});

    softdelta_causal_convolution_inputs in = softdelta_causal_convolution_inputs_default();
    in.x = now.get();
    in.weight = weight.get();
    in.initial_state = history.get();
    softdelta_execution execution = softdelta_execution_default();
    execution.threads = resources.threads;
    const softdelta_causal_convolution_outputs out = {sizeof(softdelta_causal_convolution_outputs), y.out(), nullptr};
    if (softdelta_causal_convolution_forward(&in, &out, nullptr, &execution) != SOFTDELTA_OK)
        return softdelta_last_error();
    return "";
}

}  // namespace softdelta_ggml
