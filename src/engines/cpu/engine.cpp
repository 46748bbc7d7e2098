#include "engines/cpu/engine.h"

#include <algorithm>

#include "engines/cpu/attention/attention.h"
#include "engines/cpu/delta_rule/delta_rule.h"
#include "engines/cpu/layer/layer.h"
#include "engines/cpu/machine/isa.h"
#include "engines/refuse_f64.h"

namespace softdelta::cpu {

namespace {

using namespace engines;

template <class Call>
std::string refusal(const Call& call) {
    std::string reason = refuse_f64(call.in);
    if (reason.empty()) reason = refuse_f64(call.out);
    if (!reason.empty()) return reason + ": convert it, or name the engine reference";
    if (find_kernels() == nullptr) return "this build has no fast kernels for this CPU";
    return "";
}

template <class Call>
std::string refuse_convolution(const Call& call) {
    const std::string reason = refusal(call);
    return reason.empty() ? refuse_width(call.in) : reason;
}

// Without regard to SOFTDELTA_ISA: a level that it names in vain is refused at the call.
bool has_level() {
    const auto levels = isa_levels();
    return std::any_of(levels.begin(), levels.end(), [](const Level& level) { return level.available(); });
}

}  // namespace

const engines::Engine engine = {
    .name = "cpu",
    .description = "kernels for this CPU",
    .device = core::DeviceType::cpu,
    .choice = engines::Choice::fast,
    .available = has_level,
    .attention_forward = {
        apply<AttentionForward, attention_forward>,
        [](const AttentionForward& c) { return attention_forward_workspace(c.in, c.options, c.execution); }, refusal,
        [](const AttentionForward& c, const core::Limits& limits) {
            return attention_forward_bound(c.in, c.options, c.execution, limits);
        },
        prepare_attention_forward},
    .attention_backward = {apply<AttentionBackward, attention_backward>,
                           apply<AttentionBackward, attention_backward_workspace>, refusal},
    .delta_forward = {apply<DeltaForward, delta_forward>, apply<DeltaForward, delta_forward_workspace>, refusal,
                      [](const DeltaForward& c, const core::Limits& limits) {
                          return delta_forward_bound(c.in, c.options, c.execution, limits);
                      }},
    .delta_backward = {apply<DeltaBackward, delta_backward>, apply<DeltaBackward, delta_backward_workspace>, refusal},
    .convolution_forward = {apply<ConvolutionForward, convolution_forward>,
                            apply<ConvolutionForward, convolution_forward_workspace>,
                            refuse_convolution<ConvolutionForward>,
                            [](const ConvolutionForward& c, const core::Limits&) {
                                return convolution_forward_bound(c.in, c.execution);
                            }},
    .convolution_backward = {apply<ConvolutionBackward, convolution_backward>,
                             apply<ConvolutionBackward, convolution_backward_workspace>,
                             refuse_convolution<ConvolutionBackward>},
    .norm_forward = {apply<NormForward, norm_forward>, apply<NormForward, norm_forward_workspace>, refusal,
                     [](const NormForward& c, const core::Limits&) { return norm_forward_bound(c.in, c.execution); }},
    .norm_backward = {apply<NormBackward, norm_backward>, apply<NormBackward, norm_backward_workspace>, refusal},
};

}  // namespace softdelta::cpu
