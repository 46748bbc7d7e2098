#include "engines/reference/reference.h"

namespace softdelta::reference {

using namespace engines;

const Engine engine = {
    .name = "reference",
    .description = "token recurrence and full softmax in f64: the truth",
    .device = core::DeviceType::cpu,
    .choice = Choice::fallback,
    .rounds_scores = true,
    .attention_forward = {apply<AttentionForward, attention_forward>},
    .attention_backward = {apply<AttentionBackward, attention_backward>},
    .delta_forward = {[](const DeltaForward& c) { delta_forward(c.in, c.options, c.execution.threads, c.out); }},
    .delta_backward = {[](const DeltaBackward& c) { delta_backward(c.in, c.options, c.execution.threads, c.out); }},
    .convolution_forward = {apply<ConvolutionForward, convolution_forward>},
    .convolution_backward = {apply<ConvolutionBackward, convolution_backward>},
    .norm_forward = {apply<NormForward, norm_forward>},
    .norm_backward = {apply<NormBackward, norm_backward>},
};

}  // namespace softdelta::reference
