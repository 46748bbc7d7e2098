// An engine as a value: its name, where its tensors lie, what it refuses, the memory it needs, and its passes.
// api/ has the table of engines and chooses from it; calls are checked and complete before an engine sees them.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/attention.h"
#include "core/delta_rule.h"
#include "core/execution.h"
#include "core/handover.h"
#include "core/layer/convolution.h"
#include "core/layer/norm.h"

namespace softdelta::engines {

// One checked call.
template <class Inputs, class Options, class Results>
struct Call {
    const Inputs& in;
    const Options& options;
    const core::Execution& execution;
    const Results& out;
    core::Handover handover{};  // of delta rules
};
using AttentionForward = Call<core::AttentionInputs, core::AttentionOptions, core::AttentionOutputs>;
using AttentionBackward = Call<core::AttentionInputs, core::AttentionOptions, core::AttentionGradients>;
using DeltaForward = Call<core::DeltaInputs, core::DeltaOptions, core::DeltaOutputs>;
using DeltaBackward = Call<core::DeltaInputs, core::DeltaOptions, core::DeltaGradients>;
using ConvolutionForward = Call<core::ConvolutionInputs, core::ConvolutionOptions, core::ConvolutionOutputs>;
using ConvolutionBackward = Call<core::ConvolutionInputs, core::ConvolutionOptions, core::ConvolutionGradients>;
using NormForward = Call<core::NormInputs, core::NormOptions, core::NormOutputs>;
using NormBackward = Call<core::NormInputs, core::NormOptions, core::NormGradients>;

// What a call computes, in words: for an engine without such a pass.
template <class Inputs>
inline constexpr const char* operation_of = nullptr;
template <>
inline constexpr const char* operation_of<core::AttentionInputs> = "attention";
template <>
inline constexpr const char* operation_of<core::DeltaInputs> = "delta rule";
template <>
inline constexpr const char* operation_of<core::ConvolutionInputs> = "causal convolution";
template <>
inline constexpr const char* operation_of<core::NormInputs> = "gated norm";

// A call that runs more than once: what its operands hold and where they lie may differ, and nothing else.
struct Prepared {
    virtual ~Prepared() = default;
    virtual void run() = 0;
};

template <class Call>
struct Pass {
    void (*run)(const Call& call) = nullptr;               // null: the engine has no such pass
    std::size_t (*workspace)(const Call& call) = nullptr;  // bytes of execution.workspace; null: none needed
    std::string (*refusal)(const Call& call) =
        nullptr;  // why it does not do this call, "": it does; null: it always does
    // Bytes that are enough for all calls within limits; null: the engine cannot say.
    std::size_t (*workspace_bound)(const Call& call, const core::Limits& limits) = nullptr;
    // The call, whose parts live longer, in its workspace; null: the engine has no plans.
    std::unique_ptr<Prepared> (*prepare)(const Call& call) = nullptr;
};

// A pass's `run` or `workspace` from a function of the call's parts.
template <class Call, auto function>
auto apply(const Call& call) {
    return function(call.in, call.options, call.execution, call.out);
}

// When a call that names no engine gets this one.
enum class Choice {
    fast,      // first: it is made for speed
    fallback,  // for calls of f64, and where no fast engine is available
    by_name,   // never
};

// The memory of an engine's device, for calls on tensors of the host. Each throws when it fails.
struct DeviceMemory {
    void* (*allocate)(std::size_t bytes);
    void (*release)(void* memory);  // waits until it is no longer used
    void (*to_device)(void* device, const void* host, std::size_t bytes);
    void (*to_host)(void* host, const void* device, std::size_t bytes);  // after all that was launched before
};

struct Engine {
    const char* name;         // as execution.engine spells it
    const char* description;  // a few words for `softdelta info`
    core::DeviceType device;  // of the tensors that it computes
    Choice choice;
    bool (*available)() = nullptr;         // whether this build and machine have it; null: always
    const DeviceMemory* memory = nullptr;  // of another device than the CPU
    bool rounds = false;                   // knows execution.rounding: a seed and shortcuts
    bool rounds_scores = false;            // … and float_scores
    // Refuse intermediates (execution.stages) that do not exist or have a wrong shape; null: it has none.
    void (*check_attention_stages)(const core::AttentionInputs& in, const core::Execution& execution) = nullptr;
    void (*check_delta_stages)(const core::DeltaInputs& in, const core::DeltaOptions& options,
                               const core::Execution& execution) = nullptr;
    Pass<AttentionForward> attention_forward;
    Pass<AttentionBackward> attention_backward;
    Pass<DeltaForward> delta_forward;
    Pass<DeltaBackward> delta_backward;
    // Bytes of execution.kept, 0: nothing is kept of such calls; null: never.
    std::size_t (*delta_kept_size)(const core::DeltaInputs& in, const core::DeltaOptions& options) = nullptr;
    Pass<ConvolutionForward> convolution_forward{};
    Pass<ConvolutionBackward> convolution_backward{};
    Pass<NormForward> norm_forward{};
    Pass<NormBackward> norm_backward{};
};

}  // namespace softdelta::engines
